"""Public streams: by checksum alone, from a wheel that is read and never run. No network."""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import io
from collections import Counter

import pytest

from tests.streams.test_fetching import NEVER, given
from veilstream.errors import InputError, UnknownName
from veilstream.plans.clients import stream_of
from veilstream.plans.plan import Plan
from veilstream.streams import datasets
from veilstream.streams.dataset_tables import covertype_tables, electricity_tables, flights_tables, health_tables
from veilstream.streams.datasets import DATASETS, dataset_problems, dataset_table, get_dataset, tables_by
from veilstream.streams.fetching import KnownFile


def rows(table):
    return list(csv.DictReader(io.StringIO(table.decode())))


def text(header, lines):
    return "\n".join([header, *(",".join(map(str, line)) for line in lines), ""]).encode()


def elec(count=40):
    header = "feat_1,feat_2,feat_3,feat_4,feat_5,feat_6,target"
    return text(header, [[*(f"0.{i:03d}{j}" for j in range(6)), i % 3 % 2] for i in range(count)])


RAND = "site,year,zper,binexp,coins,idp,xage,female,educdec,income,num,disea,physlm,mhi,hlthg,hlthf,hlthp"


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
    "year,month,day,dep_time,sched_dep_time,dep_delay,arr_time,sched_arr_time,arr_delay,"
    "carrier,flight,tailnum,origin,dest,air_time,distance,hour,minute,time_hour"
)


def flight(day, delay, carrier="UA", number=1):
    return [2013, 1, day, 555, 600, -5, 900, 855, delay, carrier, number, "N1", "EWR", "IAH", 200, 1400, 6, 0, "x"]


COVERTYPE = (
    "Elevation,Aspect,Slope,Horizontal_Distance_To_Hydrology,Vertical_Distance_To_Hydrology,"
    "Horizontal_Distance_To_Roadways,Hillshade_9am,Hillshade_Noon,Hillshade_3pm,Horizontal_Distance_To_Fire_Points,"
    + "".join([f"Wilderness_Area{i}," for i in range(1, 5)] + [f"Soil_Type{i}," for i in range(1, 41)])
    + "Cover_Type"
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


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Electricity and health in small, as known data sets; the user's directory is empty."""
    monkeypatch.setenv("VEILSTREAM_DATA", str(tmp_path / "home"))
    contents = {"electricity": elec(), "health": rand_hie()}
    makes = {"electricity": electricity_tables, "health": lambda c: health_tables(c, people=6)}
    known = known_small(contents, makes)
    monkeypatch.setattr(datasets, "DATASETS", DATASETS | known)
    return {name: given({f"{name}-original.csv": content}) for name, content in contents.items()}


def known_small(contents, makes):
    """Data sets as known, with other content and its checksums."""
    known = {}
    for name, content in contents.items():
        make = tables_by(makes[name])
        file = known_file(f"{name}-original.csv", content)
        kept = tuple(known_file(n, c, exact=True) for n, c in make({file.name: content}).items())
        known[name] = dataclasses.replace(DATASETS[name], files=(file,), make=make, kept=kept)
    return known


def known_file(name, content, **how):
    return KnownFile(name, len(content), hashlib.sha256(content).hexdigest(), **how)


def test_a_source_gives_tables_with_their_licence_and_citation(small, tmp_path):
    place = get_dataset("electricity", sources=[small["electricity"]]).directory
    assert place == tmp_path / "home" / "electricity"
    assert dataset_problems("electricity", place) == {}
    assert len(rows(dataset_table("electricity").read_bytes())) == 20
    told = (place / "SOURCE.txt").read_text()
    assert "BSD-3-Clause" in told
    assert "Harries" in told
    assert datasets.DATASETS["electricity"].files[0].sha256 in told
    assert {path.name for path in place.iterdir()} == {"reported.csv", "tuning.csv", "SOURCE.txt"}
    assert set(get_dataset("electricity", sources=[NEVER]).came.values()) == {"already here"}


def test_another_content_of_the_same_size_is_refused(small, tmp_path):
    other = {"health-original.csv": rand_hie().replace(b"40.5", b"41.5", 1)}
    with pytest.raises(InputError, match=r"health-original\.csv from.*--from.*SHA-256"):
        get_dataset("health", sources=[given(other)])
    assert not (tmp_path / "home" / "health" / "reported.csv").exists()


def test_a_table_that_was_changed_is_named_and_made_again(small, tmp_path):
    place = get_dataset("health", sources=[small["health"]]).directory
    table = place / "reported.csv"
    table.write_bytes(table.read_bytes().replace(b"yes", b"no", 1))
    with pytest.raises(InputError, match="veilstream data get health") as error:
        dataset_table("health")
    assert "SHA-256" in str(error.value)
    get_dataset("health", sources=[small["health"]])
    assert dataset_table("health") == table


def test_a_damaged_copy_of_the_users_is_said_so_and_the_next_source_asked(small, tmp_path):
    (tmp_path / "electricity-original.csv").write_bytes(elec(39))
    got = get_dataset("electricity", None, tmp_path, sources=[small["electricity"]])
    assert len(got.failed) == 1
    assert "cannot be used" in got.failed[0]
    (tmp_path / "electricity-original.csv").write_bytes(elec())
    get_dataset("electricity", tmp_path / "again", tmp_path, sources=[NEVER])
    with pytest.raises(InputError, match="a directory that exists"):
        get_dataset("health", None, tmp_path / "nowhere", sources=[NEVER])


def test_every_data_set_says_where_it_comes_from():
    for name, data in DATASETS.items():
        assert data.name == name
        assert data.licence
        assert data.citation
        assert data.source
        assert {len(known.sha256) for known in (data.wheel, *data.files, *data.kept)} == {64}
        assert name == "mnist" or [file.name for file in data.kept] == ["reported.csv", "tuning.csv"]
    with pytest.raises(UnknownName, match="electricity"):
        get_dataset("electricty")


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


def test_a_promise_of_once_is_refused_while_people_return(small):
    get_dataset("health", sources=[small["health"]])
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
        place = get_dataset(name, tmp_path / name).directory
    except InputError as error:
        pytest.skip(f"the registry does not give it: {error}")
    assert dataset_problems(name, place) == {}
