"""The paper's bounds, to evaluate: constants, bounds, rates, growth conditions."""

from veilstream.theory.bounds import (
    Bound,
    RegretTerms,
    dynamic_regret_bound,
    dynamic_regret_bound_independent,
    static_regret_bound,
)
from veilstream.theory.constants import Constants
from veilstream.theory.growth import GrowthConstants, assumption_constants, quasi_strong_convexity
from veilstream.theory.rates import (
    advised_step_size,
    correlated_beats_independent,
    main_theorem_rate,
    step_size_scaling,
)

__all__ = [
    "Bound",
    "Constants",
    "GrowthConstants",
    "RegretTerms",
    "advised_step_size",
    "assumption_constants",
    "correlated_beats_independent",
    "dynamic_regret_bound",
    "dynamic_regret_bound_independent",
    "main_theorem_rate",
    "quasi_strong_convexity",
    "static_regret_bound",
    "step_size_scaling",
]
