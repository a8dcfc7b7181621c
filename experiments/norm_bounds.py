"""Where eq-bc-logR holds: ‖c‖² <= log2(T) + 1 and ‖b‖² <= log2(T), for every mechanism.

    python experiments/norm_bounds.py

T is every whole number from 2 to 64, then 2^k - 1, 2^k, 2^k + 1 and about 1.4·2^k up to 2^14. Norms
are computed from the noise programs. Prints the horizons at which a bound fails, and at each
boundary between holding and failing the exact T, by bisection. Minutes on one core, nearly all of
them for the optimal factorizations.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from itertools import pairwise

from veilstream.mechanisms import MECHANISMS, Factorization, optimal
from veilstream.research.theory import largest_norms, tree_norms_as_printed

ROUNDING = 1 + 1e-6  # programs are float32
HORIZONS = sorted(
    {*range(2, 65)}
    | {T for k in range(6, 14) for T in (2**k - 1, 2**k, 2**k + 1, round(1.4 * 2**k))}
    | {2**14 - 1, 2**14}
)


def failing(mechanism: Callable[[int], Factorization]) -> dict[str, list[str]]:
    """For column, row and product: ranges of horizons at which the printed bound is exceeded."""

    @cache
    def exceeded(T: int) -> tuple[bool, bool, bool]:
        true, printed = largest_norms(mechanism(T)), tree_norms_as_printed(T)
        return (
            true.column > printed.column * ROUNDING,
            true.row > printed.row * ROUNDING,
            true.column * true.row > printed.column * printed.row * ROUNDING,
        )

    def boundary(low: int, high: int, which: int) -> int:
        """The first T of (low, high] that is as ``high`` is."""
        while high - low > 1:
            middle = (low + high) // 2
            same = exceeded(middle)[which] == exceeded(high)[which]
            low, high = (low, middle) if same else (middle, high)
        return high

    found: dict[str, list[str]] = {}
    for which, name in enumerate(("column", "row", "product")):
        ranges: list[str] = []
        begin = HORIZONS[0] if exceeded(HORIZONS[0])[which] else None
        for low, high in pairwise(HORIZONS):
            if exceeded(low)[which] == exceeded(high)[which]:
                continue
            at = boundary(low, high, which)
            if begin is None:
                begin = at
            else:
                ranges.append(f"{begin}..{at - 1}" if at - 1 > begin else f"{begin}")
                begin = None
        if begin is not None:
            ranges.append(f"{begin}..{HORIZONS[-1]}")
        found[name] = ranges
    return found


def main() -> None:
    mechanisms: dict[str, Callable[[int], Factorization]] = dict(MECHANISMS)
    mechanisms["optimal, max"] = partial(optimal, objective="max")
    for name, mechanism in mechanisms.items():
        for bound, ranges in failing(mechanism).items():
            print(f"{name:20} {bound:8} fails at T = {', '.join(ranges) or 'none'}", flush=True)


if __name__ == "__main__":
    main()
