"""The pictures of the explanation, as SVG: drawn from the mechanisms themselves, byte for byte.

    python docs/draw_pictures.py            write them into docs/pictures
    python docs/draw_pictures.py --check    exit 1 and name those that are not current

No plotting library: a picture is text that any version of one would write otherwise. Coordinates
are rounded to a tenth of a pixel, far above what floating point leaves open.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

import numpy as np
from made_files import write_or_check

import veilstream as vs

HERE = Path(__file__).resolve().parent / "pictures"
INK, SOFT, PAPER, GRID = "#1b2733", "#566573", "#ffffff", "#dfe5ea"
INDEPENDENT, TREE, CORRELATED, ACCENT = "#b5432c", "#8a6d00", "#0b6e8a", "#e8f3f6"
FONT = "font-family='system-ui, sans-serif'"


def document(width: int, height: int, title: str, parts: Sequence[str]) -> str:
    """A picture with a background of its own, so that it reads on dark pages too."""
    return "\n".join(
        [
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' "
            f"width='{width}' height='{height}' role='img' {FONT}>",
            f"<title>{escape(title)}</title>",
            f"<rect width='{width}' height='{height}' rx='8' fill='{PAPER}'/>",
            *parts,
            "</svg>\n",
        ]
    )


def words(
    x: float, y: float, text: str, *, size: int = 14, fill: str = INK, anchor: str = "start", bold: bool = False
) -> str:
    """One line of text."""
    weight = " font-weight='600'" if bold else ""
    look = f"font-size='{size}' fill='{fill}' text-anchor='{anchor}'{weight}"
    return f"<text x='{x:g}' y='{y:g}' {look}>{escape(text)}</text>"


def box(
    x: float,
    y: float,
    width: float,
    height: float,
    lines: Sequence[str],
    *,
    fill: str = PAPER,
    stroke: str = SOFT,
    size: int = 14,
) -> str:
    """A box with lines of text in its middle; the first is bold."""
    start = y + height / 2 - (len(lines) - 1) * (size + 4) / 2 + size / 3
    inside = [
        words(x + width / 2, start + i * (size + 4), line, size=size, anchor="middle", bold=i == 0)
        for i, line in enumerate(lines)
    ]
    shape = f"<rect x='{x:g}' y='{y:g}' width='{width:g}' height='{height:g}' rx='6' "
    return shape + f"fill='{fill}' stroke='{stroke}' stroke-width='1.5'/>" + "".join(inside)


def arrow(x1: float, y1: float, x2: float, y2: float, colour: str = SOFT) -> str:
    """A line with a head at its end."""
    length = float(np.hypot(x2 - x1, y2 - y1))
    ux, uy = (x2 - x1) / length, (y2 - y1) / length
    left = (x2 - 9 * ux - 4.5 * uy, y2 - 9 * uy + 4.5 * ux)
    right = (x2 - 9 * ux + 4.5 * uy, y2 - 9 * uy - 4.5 * ux)
    head = " ".join(f"{px:.1f},{py:.1f}" for px, py in ((x2, y2), left, right))
    return (
        f"<line x1='{x1:g}' y1='{y1:g}' x2='{x2 - 7 * ux:.1f}' y2='{y2 - 7 * uy:.1f}' "
        f"stroke='{colour}' stroke-width='2'/><polygon points='{head}' fill='{colour}'/>"
    )


class Axes:
    """A plot's area: where numbers lie on the page, with gridlines and labels."""

    def __init__(
        self, left: float, top: float, width: float, height: float, x_most: float, y_least: float, y_most: float
    ) -> None:
        self.left, self.top, self.width, self.height = left, top, width, height
        self.x_most, self.y_least, self.y_most = x_most, y_least, y_most

    def x(self, value: float) -> float:
        """Across."""
        return self.left + self.width * value / self.x_most

    def y(self, value: float) -> float:
        """Down."""
        share = (value - self.y_least) / (self.y_most - self.y_least)
        return self.top + self.height * (1.0 - share)

    def frame(self, x_ticks: Sequence[float], y_ticks: Sequence[float], x_label: str) -> list[str]:
        """Gridlines, their numbers, and what lies across."""
        parts = []
        for tick in y_ticks:
            level = self.y(tick)
            parts.append(
                f"<line x1='{self.left:g}' x2='{self.left + self.width:g}' y1='{level:.1f}' "
                f"y2='{level:.1f}' stroke='{GRID}'/>"
            )
            parts.append(words(self.left - 8, round(level + 5, 1), f"{tick:g}", size=13, fill=SOFT, anchor="end"))
        below = self.top + self.height + 20
        parts += [
            words(round(self.x(tick), 1), below, f"{tick:g}", size=13, fill=SOFT, anchor="middle") for tick in x_ticks
        ]
        middle = self.left + self.width / 2
        parts.append(words(middle, self.top + self.height + 42, x_label, size=13, fill=SOFT, anchor="middle"))
        return parts

    def line(self, values: Sequence[float], colour: str, width: float = 2.0) -> str:
        """A curve through values at 1, 2, 3, ..."""
        points = " ".join(f"{self.x(i + 1):.1f},{self.y(float(value)):.1f}" for i, value in enumerate(values))
        return f"<polyline points='{points}' fill='none' stroke='{colour}' stroke-width='{width}'/>"


def noise_over_time(horizon: int = 512) -> str:
    """Noise in the released sum after t steps, at one and the same promise."""
    axes = Axes(56, 64, 560, 250, horizon, 0.0, 24.0)
    curves = []
    for name, colour, label, at in (
        ("independent", INDEPENDENT, "independent noise", 21.0),
        ("tree", TREE, "binary tree", 9.0),
        ("buffered", CORRELATED, "correlated (buffered)", 2.6),
    ):
        f = getattr(vs.mechanisms, name)(horizon)
        spread = f.sensitivity() * np.sqrt(f.row_norms_squared())
        curves.append(axes.line(spread, colour))
        curves.append(words(624, round(axes.y(at), 1), label, fill=colour, bold=True))
    return document(
        800,
        380,
        "Noise in the released sum over time, for three kinds of noise",
        [
            words(24, 30, "Noise in the released sum, at the same promise", size=17, bold=True),
            words(24, 50, "standard deviation, in units of one client's noise", size=13, fill=SOFT),
            *axes.frame(range(0, horizon + 1, 128), range(0, 25, 4), "steps (clients met)"),
            *curves,
        ],
    )


def noise_that_cancels(steps: int = 200, runs: int = 5) -> str:
    """Some draws of each: how the noise in the released sum moves on from client to client."""
    axes = Axes(56, 64, 560, 250, steps, -30.0, 30.0)
    parts = [
        words(24, 30, "Five runs: what noise does to the released sum", size=17, bold=True),
        words(24, 50, "in units of one client's noise, the same draws twice", size=13, fill=SOFT),
        *axes.frame(range(0, steps + 1, 50), range(-30, 31, 10), "steps (clients met)"),
    ]
    draws = np.random.default_rng(1).standard_normal((steps, runs))  # a picture's, nobody's noise
    C = vs.mechanisms.toeplitz_normalised(steps).strategy_matrix()
    for noise, colour in ((draws, INDEPENDENT), (np.linalg.solve(C, draws), CORRELATED)):
        sums = np.cumsum(noise, axis=0)
        parts += [axes.line(sums[:, run], colour, 1.5) for run in range(runs)]
    parts.append(words(624, 110, "independent:", fill=INDEPENDENT, bold=True))
    parts.append(words(624, 128, "wanders off", fill=INDEPENDENT))
    parts.append(words(624, 190, "correlated:", fill=CORRELATED, bold=True))
    parts.append(words(624, 208, "taken back", fill=CORRELATED))
    return document(800, 380, "Five runs of independent and of correlated noise, summed", parts)


def on_the_wire() -> str:
    """Who sees what: clients, one learner, the wire, the server."""
    parts = [
        words(24, 32, "What stays, and what crosses the wire", size=17, bold=True),
        f"<rect x='24' y='52' width='476' height='252' rx='10' fill='#f4f6f8' stroke='{SOFT}' stroke-dasharray='6 4'/>",
        words(40, 76, "a learner's machine: data, noise and keys stay", size=13, fill=SOFT),
        *(
            box(44, 94 + 66 * i, 96, 50, lines)
            for i, lines in enumerate((["client 1", "one record"], ["client 2", "one record"], ["client 3", "..."]))
        ),
        *(arrow(140, 119 + 66 * i, 176, 170 + 16 * i) for i in range(3)),
        box(178, 146, 92, 80, ["gradient", "of one", "record"]),
        arrow(270, 186, 292, 186),
        box(294, 146, 84, 80, ["clip", "to norm", "B_g"]),
        arrow(378, 186, 400, 186),
        box(402, 146, 88, 80, ["+ noise", "correlated", "in time"], fill=ACCENT, stroke=CORRELATED),
        words(44, 296, "the record is discarded once its step is stored", size=13, fill=SOFT),
        arrow(490, 186, 660, 186, CORRELATED),
        words(580, 150, "one message a round:", size=13, fill=CORRELATED, anchor="middle", bold=True),
        words(580, 168, "the noisy sum so far", size=13, fill=CORRELATED, anchor="middle"),
        words(580, 206, "whole numbers,", size=13, fill=SOFT, anchor="middle"),
        words(580, 222, "always of one size", size=13, fill=SOFT, anchor="middle"),
        box(662, 140, 120, 92, ["server", "adds up, moves", "the model,", "publishes it"]),
        arrow(720, 232, 720, 262),
        words(720, 282, "the model,", size=13, fill=SOFT, anchor="middle"),
        words(720, 298, "for everybody", size=13, fill=SOFT, anchor="middle"),
        arrow(664, 284, 502, 284),
        words(662, 108, "not trusted with", size=13, fill=SOFT),
        words(662, 126, "anyone's data", size=13, fill=SOFT),
    ]
    return document(800, 326, "What stays at a learner and what crosses the wire", parts)


PICTURES = {
    "noise-over-time.svg": noise_over_time,
    "noise-that-cancels.svg": noise_that_cancels,
    "on-the-wire.svg": on_the_wire,
}


def main() -> int:
    """Write the pictures, or say which are not current."""
    return write_or_check(HERE, PICTURES, "docs/draw_pictures.py")


if __name__ == "__main__":
    raise SystemExit(main())
