"""One colour per mechanism, in every figure: Okabe and Ito's, told apart by nearly everyone."""

from __future__ import annotations

__all__ = ["COLOURS", "colour_of"]

COLOURS = {
    "optimal": "#D55E00",
    "buffered": "#0072B2",
    "toeplitz_normalised": "#009E73",
    "toeplitz": "#CC79A7",
    "tree_full": "#E69F00",
    "tree_online": "#56B4E9",
    "tree": "#8C564B",
    "banded": "#000000",
    "independent": "0.5",
}


def colour_of(mechanism: str) -> str:
    """Its colour; independent noise is always grey, an unknown mechanism blue."""
    return COLOURS.get(mechanism, "C0")
