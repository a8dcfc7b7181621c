"""Tables as strangers bring them: made up, with what such files have in them."""

from __future__ import annotations

import csv
import math
import random
from pathlib import Path


def patients(path: Path, rows: int = 12_000) -> Path:
    """Yes or no, 29% yes: quoted cells, dates as people write them, missing cells, labels in any case."""
    dice = random.Random(27)
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        out = csv.writer(file, quoting=csv.QUOTE_ALL)
        out.writerow(["Patient No", "Admitted", "Hospital", "Age", "Ward, unit", "Blood pressure", "Came back"])
        for row in range(rows):
            age, ward = dice.uniform(18, 95), dice.choice(["surgery", "medicine, north", "geriatrics"])
            pressure = dice.gauss(125, 18)
            score = 0.09 * (age - 60) + 0.03 * (pressure - 125) + (1.6 if ward == "geriatrics" else -0.4) - 1.65
            told = "Yes" if dice.random() < 1 / (1 + math.exp(-score)) else "No"
            day = f"{1 + row % 28}.{1 + (row // 28) % 12}.{2022 + row // 4000}"
            shown = "" if dice.random() < 0.05 else f"{pressure:.0f}"
            out.writerow(
                [
                    f"P{row:06d}",
                    day,
                    ("North", "South", "West")[row % 3],
                    f"{age:.0f}",
                    ward,
                    shown,
                    dice.choice([told, told.lower(), told.upper()]),
                ]
            )
    return path


def stations(path: Path, rows: int = 9_000) -> Path:
    """A number to predict, with a time; semicolons and decimal commas."""
    dice = random.Random(3)
    lines = ["zeit;ort;temperatur;wind;verbrauch"]
    for row in range(rows):
        hour, degrees, wind = row % 24, dice.gauss(11, 8), dice.expovariate(0.2)
        used = 40 - 1.4 * degrees + 0.8 * wind + 6 * math.sin(hour / 24 * 2 * math.pi) + dice.gauss(0, 4)
        time = f"2025-{1 + row // 744 % 12:02d}-{1 + row // 24 % 28:02d} {hour:02d}:00"
        cells = [time, f"h{row % 900:03d}", *(f"{x:.2f}".replace(".", ",") for x in (degrees, wind, max(used, 0.0)))]
        lines.append(";".join(cells))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def rooms(path: Path, rows: int = 8_000) -> Path:
    """Four classes."""
    dice = random.Random(4)
    kinds = ["empty", "meeting", "office", "party"]
    lines = ["room,co2,noise,light,use"]
    for row in range(rows):
        use = dice.choices(range(4), [4, 2, 3, 1])[0]
        co2, noise, light = dice.gauss(420 + 250 * use, 120), dice.gauss(30 + 12 * use, 6), dice.gauss(200 * use, 120)
        lines.append(f"r{row},{co2:.0f},{noise:.1f},{max(light, 0):.0f},{kinds[use]}")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
