"""How each public data set becomes two tables: "reported", for results, and "tuning", for choosing settings.

They share no record, and no person where people return. Nothing is random, so that a table has one checksum.
"""

from __future__ import annotations

import csv
import datetime
import hashlib
import io
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

PARTS = ("reported", "tuning")
Tables = dict[str, bytes]  # CSV by part
CsvRow = dict[str, str]  # cells by column, as text
T = TypeVar("T")

COVERTYPE_RECORDS = 29_000  # of each wilderness area, in both parts together; the smallest area has a few more
_BALANCED_RECORDS = 15_120  # Covertype's first records were chosen by its authors to hold each class equally often

FLIGHT_RECORDS = 17_000  # of each carrier, in both parts together; the eighth largest has a few more
_CARRIERS = 8
_LATE_MINUTES = 15.0  # an arrival is late from here on, by the U.S. Department of Transportation

HEALTH_PEOPLE = 340  # of each site, in each part; the smallest site has a few more


def electricity_tables(content: bytes) -> Tables:
    """Elec2: the first half of the records is for tuning, the second is reported."""
    names = {
        "feat_1": "period",
        "feat_2": "nswprice",
        "feat_3": "nswdemand",
        "feat_4": "vicprice",
        "feat_5": "vicdemand",
        "feat_6": "transfer",
    }
    rows = [
        {"market": "nsw", "change": "up" if row["target"] == "1" else "down"}
        | {name: f"{float(row[column]):.6g}" for column, name in names.items()}
        for row in _rows(content)
    ]
    half = len(rows) // 2
    return {"reported": _csv(rows[half:]), "tuning": _csv(rows[:half])}


def covertype_tables(content: bytes, records: int = COVERTYPE_RECORDS) -> Tables:
    """Covertype by wilderness area: records evenly spread over the file, halves as above."""
    names = {
        "Elevation": "elevation",
        "Aspect": "aspect",
        "Slope": "slope",
        "Horizontal_Distance_To_Hydrology": "to_water",
        "Vertical_Distance_To_Hydrology": "above_water",
        "Horizontal_Distance_To_Roadways": "to_road",
        "Hillshade_9am": "hillshade_9am",
        "Hillshade_Noon": "hillshade_noon",
        "Hillshade_3pm": "hillshade_3pm",
        "Horizontal_Distance_To_Fire_Points": "to_fire",
    }
    areas = ("rawah", "neota", "comanche_peak", "cache_la_poudre")
    lines = content.decode().splitlines()
    header = lines[0].split(",")
    areas_at, soils_at = header.index("Wilderness_Area1"), header.index("Soil_Type1")
    own: dict[str, list[str]] = {area: [] for area in areas}
    for line in lines[1 + _BALANCED_RECORDS :]:
        cells = line.split(",", areas_at + 4)
        own[areas[cells.index("1", areas_at) - areas_at]].append(line)

    def record(area: str, line: str) -> CsvRow:
        cells = line.split(",")
        told = {"area": area, "cover": cells[header.index("Cover_Type")]}
        told["soil"] = str(cells.index("1", soils_at) - soils_at + 1)
        return told | {name: cells[header.index(column)] for column, name in names.items()}

    spread = {area: _spread(found, records) for area, found in own.items()}
    return _halves([[record(area, line) for line in found] for area, found in spread.items()])


def flights_tables(content: bytes) -> Tables:
    """New York's flights by carrier, over the year: columns known when a ticket is sold, of flights that arrived."""
    reader = csv.reader(io.StringIO(content.decode(), newline=""))
    header = next(reader)
    delay, carrier = header.index("arr_delay"), header.index("carrier")
    own: dict[str, list[list[str]]] = {}
    for cells in reader:
        if cells[delay] not in ("", "NA"):
            own.setdefault(cells[carrier], []).append(cells)
    when = [header.index(c) for c in ("month", "day", "hour", "minute", "flight")]
    largest = sorted(own.values(), key=len, reverse=True)[:_CARRIERS]
    for flights in largest:
        flights.sort(key=lambda cells: [int(cells[column]) for column in when])

    def record(cells: list[str]) -> CsvRow:
        row = dict(zip(header, cells, strict=True))
        day = datetime.date(int(row["year"]), int(row["month"]), int(row["day"]))
        late = float(row["arr_delay"]) >= _LATE_MINUTES
        told = {"carrier": row["carrier"], "late": "yes" if late else "no"}
        told |= {"month": row["month"], "weekday": str(day.isoweekday())}
        return told | {name: row[name] for name in ("hour", "origin", "dest", "distance")}

    return _halves([[record(cells) for cells in _spread(flights, FLIGHT_RECORDS)] for flights in largest])


def health_tables(content: bytes, people: int = HEALTH_PEOPLE) -> Tables:
    """RAND's Health Insurance Experiment by site, a record for a person's year: whole people in one part or the other.

    The file does not say when in a year, so people come in an order by a hash of their number, the same every year.
    """
    names = {
        "coins": "coinsurance",
        "idp": "individual_deductible",
        "xage": "age",
        "female": "female",
        "educdec": "schooling",
        "income": "income",
        "num": "family",
        "disea": "chronic_diseases",
        "physlm": "limited",
        "mhi": "mental_health",
        "hlthg": "health_good",
        "hlthf": "health_fair",
        "hlthp": "health_poor",
    }
    sites = tuple(f"site {number}" for number in range(1, 7))
    own: dict[str, dict[str, list[tuple[int, CsvRow]]]] = {site: {} for site in sites}
    for row in _rows(content):
        site, person = sites[int(row["site"]) - 1], row["zper"]
        cells = {"site": site, "person": person, "year": row["year"]}
        cells["expense"] = "yes" if row["binexp"] == "1" else "no"
        cells |= {name: row[column] for column, name in names.items()}
        own[site].setdefault(person, []).append((int(row["year"]), cells))
    parts: dict[str, list[CsvRow]] = {part: [] for part in PARTS}
    for visits in own.values():
        in_order = sorted(visits, key=_hashed)
        for part, chosen in zip(PARTS, (in_order[:people], in_order[people : 2 * people]), strict=True):
            place = {person: i for i, person in enumerate(chosen)}
            told = [(year, place[p], cells) for p in chosen for year, cells in visits[p]]
            told.sort(key=lambda visit: visit[:2])
            parts[part] += [cells for _, _, cells in told]
    return {part: _csv(rows) for part, rows in parts.items()}


def _hashed(person: str) -> bytes:
    return hashlib.blake2b(person.encode(), digest_size=8, person=b"order").digest()


def _rows(content: bytes) -> Iterator[CsvRow]:
    return csv.DictReader(io.StringIO(content.decode(), newline=""))


def _spread(found: Sequence[T], records: int) -> list[T]:
    wanted = min(records, len(found))
    return [found[i * len(found) // wanted] for i in range(wanted)]


def _halves(learners: Iterable[Sequence[CsvRow]]) -> Tables:
    """The first half of every learner's records is for tuning."""
    parts: dict[str, list[CsvRow]] = {part: [] for part in PARTS}
    for rows in learners:
        half = len(rows) // 2
        parts["tuning"] += rows[:half]
        parts["reported"] += rows[half:]
    return {part: _csv(rows) for part, rows in parts.items()}


def _csv(rows: Sequence[CsvRow]) -> bytes:
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue().encode()
