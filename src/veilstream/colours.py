"""One colour per mechanism, in every figure: Okabe and Ito's, told apart by nearly everyone.

page/charts.js has the same for pages, a shade lighter on dark ones.
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
    """Its colour; an unknown mechanism is blue. Black is for methods without noise."""
    return COLOURS.get(mechanism, "C0")
