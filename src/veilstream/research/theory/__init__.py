"""The paper's bounds, to evaluate: with constants, as rates, and beside the compared methods."""

from veilstream.research.theory.bounds import (
    Bound,
    RegretTerms,
    dynamic_regret_bound,
    dynamic_regret_bound_independent,
    dynamic_regret_bound_strongly_convex,
    static_regret_bound,
)
from veilstream.research.theory.compared_methods import COMPARED_METHODS, ComparedMethod, TableSetting
from veilstream.research.theory.constants import Constants
from veilstream.research.theory.growth import GrowthConstants, assumption_constants, quasi_strong_convexity
from veilstream.research.theory.hidden_constants import (
    independent_noise_constants,
    main_theorem_constants,
    static_regret_constants,
    strongly_convex_constants,
)
from veilstream.research.theory.printed_norms import (
    SquaredNorms,
    largest_norms,
    toeplitz_norms,
    toeplitz_norms_as_printed,
    tree_norms,
    tree_norms_as_printed,
)
from veilstream.research.theory.quadratics import ExactRegret, Quadratics, Repaired, exact_regret, repaired_bounds
from veilstream.research.theory.rates import (
    advised_step_size,
    correlated_beats_independent,
    drift_exceeds_noise,
    independent_noise_rate,
    main_theorem_rate,
    static_regret_rate,
    step_size_scaling,
)

__all__ = [
    "COMPARED_METHODS",
    "Bound",
    "ComparedMethod",
    "Constants",
    "ExactRegret",
    "GrowthConstants",
    "Quadratics",
    "RegretTerms",
    "Repaired",
    "SquaredNorms",
    "TableSetting",
    "advised_step_size",
    "assumption_constants",
    "correlated_beats_independent",
    "drift_exceeds_noise",
    "dynamic_regret_bound",
    "dynamic_regret_bound_independent",
    "dynamic_regret_bound_strongly_convex",
    "exact_regret",
    "independent_noise_constants",
    "independent_noise_rate",
    "largest_norms",
    "main_theorem_constants",
    "main_theorem_rate",
    "quasi_strong_convexity",
    "repaired_bounds",
    "static_regret_bound",
    "static_regret_constants",
    "static_regret_rate",
    "step_size_scaling",
    "strongly_convex_constants",
    "toeplitz_norms",
    "toeplitz_norms_as_printed",
    "tree_norms",
    "tree_norms_as_printed",
]
