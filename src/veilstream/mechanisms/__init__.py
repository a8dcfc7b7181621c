"""Which noise: factorizations A = B·C of the prefix sums, their sensitivity, error and noise.

Every mechanism is a function of the horizon T = R·τ that returns a `Factorization`.
"""

from typing import TYPE_CHECKING

from veilstream.lazy import names_from
from veilstream.mechanisms.banded import banded, banded_inverse
from veilstream.mechanisms.buffered import buffered
from veilstream.mechanisms.factorization import Factorization, from_strategy_matrix, normalised
from veilstream.mechanisms.independent import independent
from veilstream.mechanisms.optimal import OptimalFactorization, optimal
from veilstream.mechanisms.participation import ONCE, Participation, Sensitivity
from veilstream.mechanisms.program import NoiseProgram
from veilstream.mechanisms.registry import MECHANISMS, build
from veilstream.mechanisms.steps import ConstantSteps
from veilstream.mechanisms.toeplitz import toeplitz, toeplitz_normalised
from veilstream.mechanisms.tree import tree, tree_full, tree_online
from veilstream.mechanisms.unbounded import StationaryFactorization, doubling, stationary
from veilstream.mechanisms.workload import PublishedError, Workload

if TYPE_CHECKING:
    from veilstream.mechanisms.keystream import NoiseKey
    from veilstream.mechanisms.stream import NoiseStream

__all__ = [
    "MECHANISMS",
    "ONCE",
    "ConstantSteps",
    "Factorization",
    "NoiseKey",
    "NoiseProgram",
    "NoiseStream",
    "OptimalFactorization",
    "Participation",
    "PublishedError",
    "Sensitivity",
    "StationaryFactorization",
    "Workload",
    "banded",
    "banded_inverse",
    "buffered",
    "build",
    "doubling",
    "from_strategy_matrix",
    "independent",
    "normalised",
    "optimal",
    "stationary",
    "toeplitz",
    "toeplitz_normalised",
    "tree",
    "tree_full",
    "tree_online",
]

_LATER = {"NoiseKey": "veilstream.mechanisms.keystream", "NoiseStream": "veilstream.mechanisms.stream"}

# Loaded on first use: a server calibrates and must not load code that draws noise.
__getattr__ = names_from(__name__, _LATER)


def __dir__() -> list[str]:
    return sorted(__all__)
