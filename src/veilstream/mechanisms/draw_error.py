"""How exact a deployed draw is, for those who calibrate and never draw.

`fine_normals` proves it; apart from it, so that a server can work out a guarantee without loading
code that makes noise.
"""

from __future__ import annotations

DRAW_ERROR = 2.0**-46
"""How far a draw (std one) may lie from the ideal normal that it stands for."""
