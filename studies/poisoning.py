"""What a learner that lies within bounds does to the model.

    python -m studies.poisoning                       the figures of docs/tried.md
    python -m studies.poisoning --seeds 1 --rounds 20

Ten learners with logistic regression on one law, real noise on the grid, the server's own fold. The
liar knows the truth: every coordinate of its releases is as far to the wrong side as the bounds of
`veilstream.federation.protocol.bounds` let it be, less 5%. Seeds make it repeatable, so the noise
protects nobody here.
"""

from __future__ import annotations

import argparse
import hashlib
from dataclasses import dataclass

import numpy as np

from veilstream.deployment.local_rounds import LocalRounds
from veilstream.deployment.release import encode
from veilstream.deployment.terms import Terms
from veilstream.federation.protocol.bounds import ReleaseBounds
from veilstream.federation.protocol.fold import ServerFold
from veilstream.plans.plan import Plan
from veilstream.privacy.gradient_types import Noised, RawGradient
from veilstream.runs.released_model import model_sha256

LEARNERS, DIM, STEPS = 10, 10, 5


@dataclass(frozen=True)
class Outcome:
    """Of the last model, on 20,000 fresh records."""

    loss: float
    accuracy: float


def plan_of(rounds: int, epsilon: float) -> Plan:
    return Plan(
        name="poisoning",
        learning={"rounds": rounds, "local_steps": STEPS, "learners": LEARNERS},
        data={"dim": DIM},
        privacy={"epsilon": epsilon, "delta": 1e-3},
        methods=[{"name": "ours", "mechanism": "buffered", "step_size": 0.1, "averaging": 3.0}],
    )


class Truth:
    """Records of one law: y = sign of a noisy linear function."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        direction = self.rng.standard_normal(DIM)
        self.direction = direction / np.linalg.norm(direction)

    def records(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        features = self.rng.standard_normal((count, DIM)) / DIM**0.5
        score = features @ self.direction * DIM**0.5 + 0.3 * self.rng.standard_normal(count)
        return features, np.where(score >= 0, 1.0, -1.0)


def gradient(z: np.ndarray, features: np.ndarray, target: float) -> np.ndarray:
    return -target / (1.0 + np.exp(target * (features @ z))) * features


def play(plan: Plan, terms: Terms, seed: int, *, liar: bool) -> Outcome:
    """One run to its end."""
    truth, names = Truth(seed), [str(i) for i in range(LEARNERS)]
    fold = ServerFold(terms, np.zeros(DIM, np.float32), names)
    local = {name: LocalRounds(terms, 0) for name in names}
    lie = Lie(terms, truth.direction)
    for r in range(plan.learning.rounds):
        for name in names:
            if liar and name == "0":
                fold.accept(name, lie.release(r))
                continue
            rounds = local[name]
            x = fold.x.astype(np.float32)
            rounds.pin(x, model_sha256(x))
            features, targets = truth.records(STEPS)
            for t in range(STEPS):
                raw = gradient(rounds.model.reveal(), features[t], targets[t]).astype(np.float32)
                secret = hashlib.sha256(f"{seed} {name} {r} {t}".encode()).digest()
                rounds.apply(rounds.noisy(rounds.clip(RawGradient(raw)), secret))
            release = rounds.message()
            rounds.seal(release)
            fold.accept(name, release.payload)
        fold.close_round()
    features, targets = Truth(seed).records(20_000)
    margin = targets * (features @ fold.average)
    return Outcome(float(np.logaddexp(0.0, -margin).mean()), float((margin > 0).mean()))


class Lie:
    """Releases at the bounds, on the wrong side: x moves against them."""

    def __init__(self, terms: Terms, direction: np.ndarray) -> None:
        self._terms, self._bounds = terms, ReleaseBounds.of(terms)
        self._sign = np.sign(direction)
        self._prefix = np.zeros(DIM)

    def release(self, r: int) -> bytes:
        aim = 0.95 * self._bounds.coordinate(r + 1) * self._sign
        step = aim - self._prefix
        longest = 0.95 * self._bounds.increment(r, r + 1)
        self._prefix = self._prefix + step * min(1.0, longest / np.linalg.norm(step))
        units = Noised(np.trunc(self._prefix).astype(np.int64))
        return bytes(encode(0, r, STEPS * (r + 1), self._terms.grid.step, units))


def study(rounds: int, epsilon: float, seeds: int) -> dict[bool, list[Outcome]]:
    """Without and with one liar."""
    plan = plan_of(rounds, epsilon)
    terms = Terms.of(plan, DIM)
    return {liar: [play(plan, terms, seed, liar=liar) for seed in range(seeds)] for liar in (False, True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--epsilon", type=float, default=4.0)
    parser.add_argument("--seeds", type=int, default=3)
    asked = parser.parse_args()
    print("liars   log loss            accuracy")
    for liar, runs in study(asked.rounds, asked.epsilon, asked.seeds).items():
        losses = np.array([run.loss for run in runs])
        accuracies = np.array([run.accuracy for run in runs])
        print(
            f"{int(liar)} of 10 {losses.mean():.4f} (to {losses.max():.4f})  "
            f"{accuracies.mean():.3f} (from {accuracies.min():.3f})"
        )


if __name__ == "__main__":
    main()
