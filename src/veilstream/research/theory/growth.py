"""asm-noncvx's constants from other growth conditions (lem:equi)."""

from __future__ import annotations

from typing import NamedTuple

from veilstream.errors import InputError
from veilstream.mechanisms.checks import non_negative, positive_number
from veilstream.research.theory.constants import STEP_SLACK


class GrowthConstants(NamedTuple):
    """The pair (α, μ) with which asm-noncvx holds."""

    alpha: float
    mu: float


def quasi_strong_convexity(modulus: float) -> GrowthConstants:
    """Quasi strongly convex losses satisfy asm-noncvx as they are: α = 1, μ the modulus μ_QSC.

    Args:
        modulus: μ_QSC.

    Returns:
        α and μ.

    """
    return GrowthConstants(1.0, positive_number("modulus", modulus, "μ_QSC"))


def assumption_constants(
    *,
    quadratic_growth: float | None = None,
    polyak_lojasiewicz: float | None = None,
    error_bound: float | None = None,
    weak_convexity: float = 0.0,
    smoothness: float,
    alpha: float,
    as_printed: bool = False,
) -> GrowthConstants:
    """(α, μ) for losses that are weakly convex and meet one growth condition: cor:weakcvx.

    Give exactly one of: c_QG with c/2·dist² <= f - f*; c_PL with c·(f - f*) <= ‖∇f‖²/2; c_EB with
    c·dist <= ‖∇f‖. They become one c = c_QG = c_PL/2 = c_EB²/(2L), and any
    α in (0, (c - μ_WC)/L) will do.

    Corrected: adding the two inequalities of the proof gives μ/2 = (c - μ_WC - αL)/2, and
    asm-noncvx has that half in front of μ already, so μ = c - μ_WC - αL. ``as_printed=True``
    gives the paper's half of it: valid, and looser in every bound. c_PL/2 is cautious too, since
    Polyak-Łojasiewicz gives quadratic growth with c_PL itself: pass that as ``quadratic_growth``.

    Args:
        quadratic_growth: c_QG.
        polyak_lojasiewicz: c_PL.
        error_bound: c_EB.
        weak_convexity: μ_WC; 0 for convex losses.
        smoothness: L.
        alpha: the α that is wanted.
        as_printed: with the paper's constants, uncorrected.

    Returns:
        α and μ.

    Raises:
        InputError: for none or several growth conditions, or an α that they do not allow.

    """
    L = positive_number("smoothness", smoothness, "L")
    weak = non_negative("weak_convexity", weak_convexity, "0 for convex losses")
    alpha = positive_number("alpha", alpha, "below (c - μ_WC)/L")
    conditions = {
        "quadratic_growth": quadratic_growth,
        "polyak_lojasiewicz": polyak_lojasiewicz,
        "error_bound": error_bound,
    }
    given = {name: value for name, value in conditions.items() if value is not None}
    if len(given) != 1:
        names = ", ".join(conditions)
        raise InputError("conditions", sorted(given), f"exactly one of {names}", "the one known")
    ((name, value),) = given.items()
    constant = positive_number(name, value, "its constant in the definition before lem:equi")
    if constant > L * STEP_SLACK:
        raise InputError(name, value, f"<= smoothness = {L:.6g}", "no L-smooth loss has more")
    c = {"quadratic_growth": constant, "polyak_lojasiewicz": constant / 2, "error_bound": constant**2 / (2 * L)}[name]
    if weak >= c:
        rule = f"< c = {c:.6g}, the quadratic growth that {name} gives"
        raise InputError("weak_convexity", weak_convexity, rule, "find α and μ directly")
    mu = c - weak - alpha * L
    if mu <= 0:
        raise InputError("alpha", alpha, f"< (c - μ_WC)/L = {(c - weak) / L:.6g}", "try half of it")
    return GrowthConstants(alpha, mu / 2 if as_printed else mu)
