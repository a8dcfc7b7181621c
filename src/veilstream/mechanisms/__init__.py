"""Which noise: factorizations A = B·C of the prefix sums, their sensitivity, error and noise.

Every mechanism is a function of the horizon T = R·τ that returns a `Factorization`.
"""

from veilstream.mechanisms.banded import banded
from veilstream.mechanisms.buffered import buffered
from veilstream.mechanisms.factorization import Factorization, from_strategy_matrix, normalised
from veilstream.mechanisms.independent import independent
from veilstream.mechanisms.keystream import NoiseKey
from veilstream.mechanisms.optimal import OptimalFactorization, optimal
from veilstream.mechanisms.participation import ONCE, Participation, Sensitivity
from veilstream.mechanisms.program import NoiseProgram
from veilstream.mechanisms.registry import MECHANISMS, build
from veilstream.mechanisms.stream import NoiseStream
from veilstream.mechanisms.toeplitz import toeplitz, toeplitz_normalised
from veilstream.mechanisms.tree import tree, tree_full, tree_online

__all__ = [
    "MECHANISMS",
    "ONCE",
    "Factorization",
    "NoiseKey",
    "NoiseProgram",
    "NoiseStream",
    "OptimalFactorization",
    "Participation",
    "Sensitivity",
    "banded",
    "buffered",
    "build",
    "from_strategy_matrix",
    "independent",
    "normalised",
    "optimal",
    "toeplitz",
    "toeplitz_normalised",
    "tree",
    "tree_full",
    "tree_online",
]
