"""One colour per mechanism, in every figure, from Okabe and Ito's palette for all kinds of sight.

reports/page/charts.js has the same colours, with lighter ones for dark pages.
"""

from __future__ import annotations

COLOURS = {
    "optimal": "#D55E00",
    "buffered": "#0072B2",
    "toeplitz_normalised": "#009E73",
    "toeplitz": "#CC79A7",
    "tree_full": "#E69F00",
    "tree_online": "#56B4E9",
    "tree": "#8C564B",
    "banded": "#999933",
    "independent": "#5B3FA8",
}


def colour_of(mechanism: str) -> str:
    """A mechanism's colour; blue for an unknown one. Methods without noise are black."""
    return COLOURS.get(mechanism, "C0")
