"""The synthetic(α, β) data of Li et al. 2020, with binary labels.

They describe it in "Federated Optimization in Heterogeneous Networks".

Their recipe has ten classes and an argmax, under which α cancels. Ours, in their notation, for each
learner k (α and β are variances, as in their text; their code takes them as standard deviations):

    u_k ~ N(0, α),  B_k ~ N(0, β)
    w_k ~ N(u_k·1, I_d),  c_k ~ N(u_k, 1)            the learner's own linear model
    v_k ~ N(B_k·1, I_d)                              the centre of its clients
    a ~ N(v_k, Σ),  Σ_jj = j^-1.2                    a client's raw features
    y = sign(w_k·a + c_k)                            its label, -1 or +1

The features that a client shows are then scaled to norm `feature_norm` (default 1), each by itself,
so that the logistic gradient is bounded by it without looking at anyone else's data.

Two numbers of ours widen the recipe; its own are spread = 1, shared = 0. Clients lie `spread` times
as far from their centre (Σ_jj = (spread·j^-0.6)²), since a learner whose clients crowd together has
one label, and guessing it takes no learning. And a share of every learner's model may be the same for
all: w_k = √shared·w + √(1 - shared)·w_k, with w ~ N(0, I_d), and c_k likewise; without it no model of
all learners is much better than each learner's commonest label once clients spread.

Drift rotates w_k towards a second model w'_k drawn likewise: "abrupt" switches over half-way,
"gradual" turns from one to the other over the whole horizon, "seasonal" goes there and back
`SEASONS` times.

Every round of every seed has its own generator, so a stream can be read from any round, in any
blocking, by any process, and gives the same clients.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from veilstream.errors import InputError, UnknownName
from veilstream.learning.tasks import Sample

Float32s = NDArray[np.float32]
Floats = NDArray[np.float64]

DRIFTS = ("none", "abrupt", "gradual", "seasonal")
SEASONS = 4  # how often a seasonal drift comes back to where it began
_WORLD, _ROUND, _HELD_OUT = 1, 2, 3


@dataclass(frozen=True, kw_only=True)
class SyntheticStream:
    """Clients of ``learners`` learners over ``rounds`` rounds of ``per_round`` clients each."""

    learners: int
    rounds: int
    per_round: int
    dim: int
    alpha: float = 0.1
    beta: float = 0.1
    shared: float = 0.0
    spread: float = 1.0
    feature_norm: float = 1.0
    drift: str = "none"
    targets: str = "labels"
    """"labels" for classification, "values" for regression on w_k·a of the scaled features."""

    def __post_init__(self) -> None:
        if self.drift not in DRIFTS:
            raise UnknownName("data.drift", str(self.drift), DRIFTS)
        for name in ("alpha", "beta"):
            if not np.isfinite(getattr(self, name)) or getattr(self, name) < 0:
                raise InputError(f"data.{name}", getattr(self, name), "a number >= 0", "try 0.1")

    @property
    def provenance(self) -> str:
        """Where the data come from, for the run folder."""
        widened = f"spread {self.spread:g}, shared {self.shared:g}, " if (self.spread, self.shared) != (1, 0) else ""
        return (
            f"synthetic({self.alpha:g}, {self.beta:g}) after Li et al. 2020, binary labels, {widened}"
            f"features of norm {self.feature_norm:g}, drift {self.drift}"
        )

    @lru_cache(maxsize=1024)  # noqa: B019 - frozen, few, and asked for every round
    def _world(self, seed: int) -> tuple[Floats, Floats, Floats, Floats]:
        """Models w (2, n, d), c (2, n), centres (n, d) and feature scales (d,) of one seed."""
        rng = np.random.default_rng([seed, _WORLD])
        n, d = self.learners, self.dim
        u = rng.normal(0.0, np.sqrt(self.alpha), n)
        b = rng.normal(0.0, np.sqrt(self.beta), n)
        centres = rng.normal(b[:, None], 1.0, (n, d))
        w = rng.normal(u[None, :, None], 1.0, (2, n, d))
        c = rng.normal(u[None, :], 1.0, (2, n))
        if self.shared:
            own, common = np.sqrt(1.0 - self.shared), np.sqrt(self.shared)
            w = own * w + common * rng.standard_normal((2, 1, d))
            c = own * c + common * rng.standard_normal((2, 1))
        scales: Floats = self.spread * np.arange(1, d + 1, dtype=np.float64) ** -0.6
        return w, c, centres, scales

    def _turn(self, round_: int) -> float:
        """How far, from 0 to 1, the second model has taken over."""
        if self.drift == "none":
            return 0.0
        if self.drift == "abrupt":
            return float(2 * round_ >= self.rounds)
        if self.drift == "seasonal":
            return float(np.sin(np.pi * SEASONS * round_ / self.rounds) ** 2)
        return round_ / max(1, self.rounds - 1)

    def _draw(self, seed: int, rng: np.random.Generator, round_: int, count: int) -> Sample:
        """``count`` clients per learner: features (n, count, d), targets (n, count)."""
        w, c, centres, scales = self._world(seed)
        angle = 0.5 * np.pi * self._turn(round_)
        model = np.cos(angle) * w[0] + np.sin(angle) * w[1]
        offset = np.cos(angle) * c[0] + np.sin(angle) * c[1]
        raw = centres[:, None] + scales * rng.standard_normal((self.learners, count, self.dim))
        features = raw * (self.feature_norm / np.linalg.norm(raw, axis=-1, keepdims=True))
        if self.targets == "values":
            target = np.einsum("nkd,nd->nk", features, model)
        else:
            score = np.einsum("nkd,nd->nk", raw, model) + offset[:, None]
            target = np.where(score >= 0, 1.0, -1.0)
        return Sample(features.astype(np.float32), target.astype(np.float32))

    def round(self, seed: int, round_: int) -> Sample:
        """The round's clients: features (n, per_round, d), targets (n, per_round)."""
        rng = np.random.default_rng([seed, _ROUND, round_])
        return self._draw(seed, rng, round_, self.per_round)

    def held_out(self, seed: int, count: int, round_: int) -> Sample:
        """Other clients of the same learners, as of a round: (count, d), (count,)."""
        rng = np.random.default_rng([seed, _HELD_OUT])
        drawn = self._draw(seed, rng, round_, -(-count // self.learners))
        features = drawn.features.reshape(-1, self.dim)
        chosen = rng.permutation(len(features))[:count]
        return Sample(features[chosen], drawn.target.reshape(-1)[chosen])


@dataclass(frozen=True, kw_only=True)
class RippleStream:
    """Targets θ_r for the nonconvex task: one a round, on a random walk, shared by its clients."""

    learners: int
    rounds: int
    per_round: int
    dim: int
    step: float = 0.02
    """Length of the walk's step per round."""

    provenance = "random walk of a target shared by the clients of a round"

    def centre(self, seed: int, round_: int) -> Floats:
        """θ of a round."""
        here: Floats = self._walk(seed)[round_]
        return here

    @lru_cache(maxsize=1024)  # noqa: B019 - frozen, few, and asked for every round
    def _walk(self, seed: int) -> Floats:
        rng = np.random.default_rng([seed, _WORLD])
        walk = rng.standard_normal((self.rounds, self.dim))
        walk *= self.step / np.linalg.norm(walk, axis=1, keepdims=True)
        places: Floats = 0.5 + np.cumsum(walk, axis=0)
        return places

    def round(self, seed: int, round_: int) -> Sample:
        """The round's clients, all with the same θ."""
        shape = (self.learners, self.per_round)
        features = np.broadcast_to(self.centre(seed, round_), (*shape, self.dim))
        return Sample(features.astype(np.float32), np.zeros(shape, np.float32))

    def held_out(self, seed: int, count: int, round_: int) -> Sample:
        """The round's target."""
        features = np.broadcast_to(self.centre(seed, round_), (count, self.dim))
        return Sample(features.astype(np.float32), np.zeros(count, np.float32))
