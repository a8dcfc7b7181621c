"""What you ask for and what you get: values only, no computation of noise."""

from __future__ import annotations

import enum
import math
import numbers
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from veilstream.errors import InputError, UnknownName
from veilstream.mask_graph import graph_failure
from veilstream.mechanisms.checks import positive_number
from veilstream.mechanisms.participation import Participation
from veilstream.mechanisms.program import ENDLESS
from veilstream.privacy.gaussian import GaussianCurve
from veilstream.privacy.telemetry import Telemetry
from veilstream.wording import counted


class _Choice(enum.StrEnum):
    @classmethod
    def of(cls, value: Self | str) -> Self:
        if isinstance(value, cls):
            return value
        names = [member.value for member in cls]
        if value not in names:
            raise UnknownName(cls.__name__.lower(), str(value), names)
        return cls(value)


SETTLED_BEFORE = "chosen before their graph of masks is drawn"
"""Who colludes, where a graph says which learners share masks: the draw protects from nobody who is won over by it."""


class Neighbours(_Choice):
    """Which two data sets must look alike."""

    REPLACE_ONE = "replace-one"
    """One client's record becomes any other: its gradient moves by up to 2·clip_norm."""
    ZERO_OUT = "zero-out"
    """One client's gradient becomes zero: it moves by up to clip_norm."""

    @property
    def reach(self) -> int:
        """How far a clipped gradient can move, in clip norms."""
        return 2 if self is Neighbours.REPLACE_ONE else 1


class Order(_Choice):
    """Who knows at which step of an epoch a record is used."""

    KNOWN = "known"
    """Anybody may: the promise does not rest on it."""
    SECRET = "secret"
    """Nobody outside the learner: every record chooses its step independently and uniformly among all of them, and the
    promise rests on that choice as on the noise (`privacy.secret_order`)."""


SECRET_ORDER_THEOREM = (
    "balls in bins: the pair mean_j N(c_j, s²·I), N(0, s²·I) dominates zero-out neighbours in both orders, for C >= 0 "
    "(Choquette-Choo, Ganesh, Haque, Steinke and Thakurta 2024); replace-one by two hops over the record's absence"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretSteps:
    """Among which steps a record chooses unseen, and how its promise was worked out (`privacy.secret_order`)."""

    among: int
    """How many steps, each as likely as any other."""
    window: int | None
    """Steps of a window whose records are used in the next one; None where the whole epoch is one."""
    seed: int
    """Of the sampling that bounds δ, for whoever repeats it; it protects nobody."""
    draws: int
    """How many certified the noise, in each order; 0 where it rests on none."""
    failure_probability: float
    """With which the bound may be wrong; charged to δ."""
    first_hop: float
    """Part of ε that replace-one neighbours spend on the first of two hops; 0 or 1 where there is one."""
    epsilon_floor: float | None = None
    """The ε of one learner's own noise where only sums are seen; else None."""


class Trust(_Choice):
    """What the server sees of learners."""

    EACH = "each"
    """Every learner's noisy sums: each learner's noise hides its own clients."""
    SUM = "sum"
    """Only their sum over learners: the noise of all honest ones hides each of their clients (`privacy.sums`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SumTrust:
    """Whom the promise of a federation counts on in which only sums over learners are seen."""

    learners: int
    honest: int
    """Learners of every round so far that keep their noise and masks to themselves; fewer, and no sum is opened."""
    colluding: int = 0
    """Learners beside them that may tell the server all they know."""
    runs: int = 1
    """Runs that a record may be there for before it is used (`federation.epochs`): each may draw a graph of masks."""

    def __post_init__(self) -> None:
        if self.runs < 1:
            raise InputError(
                "federation.epochs", self.runs, "at least 1", "1, unless learners go along in several runs"
            )
        if not 1 <= self.honest <= self.learners:
            raise InputError(
                "privacy.honest", self.honest, f"from 1 to the {self.learners} learners", "about half of them"
            )
        if not 0 <= self.colluding <= self.learners - self.honest:
            raise InputError(
                "privacy.colluding",
                self.colluding,
                f"from 0 to {self.learners - self.honest}: honest and colluding learners are among the "
                f"{self.learners} of the plan",
                "fewer, or a smaller privacy.honest",
            )

    @property
    def gain(self) -> float:
        """√honest: how many times a learner's own noise the promise counts on."""
        return math.sqrt(self.honest)

    @property
    def graph_failure(self) -> float:
        """Probability that a graph on which learners share masks does not keep sums together, in any of the runs.

        Part of δ; 0 up to `mask_graph.SMALL` learners, where all pairs do.
        """
        return self.runs * graph_failure(self.learners, self.colluding)


class Accounting(_Choice):
    """How noise follows from a budget."""

    EXACT = "exact"
    """The Gaussian mechanism's own curve: the least noise that keeps the promise."""
    ZCDP = "zcdp"
    """The paper's formula, for reproduction: valid, and more noise than needed."""


@dataclass(frozen=True, slots=True)
class Budget:
    """The promise asked for: (ε, δ)-local differential privacy for every client."""

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        epsilon = positive_number("privacy.epsilon", self.epsilon, "lower means more private; try 1")
        if epsilon > 1e6:
            raise InputError("privacy.epsilon", self.epsilon, "<= 1e6", "that protects no one; try 1")
        delta = self.delta
        if isinstance(delta, bool) or not isinstance(delta, numbers.Real) or not 0.0 < float(delta) < 1.0:
            raise InputError("privacy.delta", delta, "in (0, 1)", "well below 1/clients; try 1e-6")


_WEAK_EPSILON = 8.0
_ALL_THAT_DELTA_MAY_MEET = 0.1  # δ times the clients: records that a mechanism may expose outright


def budget_remarks(budget: Budget, clients: int | None) -> list[str]:
    """What is weak about a budget for so many clients of a learner (None: a run without an end).

    Every command that reads a plan shows it: above ε = 8, or a δ that as many clients would meet.
    """
    epsilon, delta = budget.epsilon, budget.delta
    remarks = [_weak_epsilon(epsilon)] if epsilon > _WEAK_EPSILON else []
    if clients is None:
        remarks.append(
            f"a run without an end meets ever more clients: about {delta:g} of them are in the part that delta leaves "
            "out; keep it far below 1 / (all whom you expect)"
        )
    elif delta * clients > _ALL_THAT_DELTA_MAY_MEET:
        remarks.append(
            f"delta = {delta:g} is weak for {clients} clients a learner: a mechanism that exposes one record in "
            f"{round(1 / delta)} would meet it; {0.01 / clients:.0e} is safe"
        )
    return remarks


def _weak_epsilon(epsilon: float) -> str:
    rise = f"{math.exp(min(epsilon, 700)):.1e}-fold, at epsilon = 4 {math.exp(4):.0f}-fold"
    return (
        f"epsilon = {epsilon:.4g} is weak: odds on what somebody's record says may rise {rise}; {_WEAK_EPSILON:g} is "
        "the most that is usual"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Guarantee:
    """The promise given.

    Guarantees: every client's record has (``epsilon``, ``delta``)-local differential privacy, in
    the sense of ``neighbours`` and ``participation``, for all that a learner sends in ``horizon``
    steps, against the server and anyone who reads the wire, even if they choose each next model
    after seeing all before (adaptive continual release). By: one Gaussian mechanism C·G + ξ
    (lem-priv-analy; Denisov et al. 2022, Theorem 2.1), then post-processing. It presumes that
    every client's gradient is clipped to ``clip_norm``, that those of ``clients_per_step`` clients
    are averaged in a step, that ``telemetry``, where there is any, is within its bounds beside it,
    and that nobody but the learner knows its noise.
    """

    epsilon: float
    delta: float
    mechanism: str
    horizon: int
    clip_norm: float
    neighbours: Neighbours
    participation: Participation
    accounting: Accounting
    noise_std: float
    """V: standard deviation of the iid noise that the mechanism correlates."""
    sensitivity: float
    """Δ = reach · clip_norm / clients_per_step · sensitivity of C; with telemetry, the norm of the
    whole vector (`release_norm`) stands for clip_norm."""
    sensitivity_exact: bool
    """False where Δ is a safe upper bound: the promise holds with room to spare."""
    clients_per_step: int = 1
    arithmetic_mu: float = 0.0
    """What float64 arithmetic may add to μ at worst, counted in (`privacy.noise_law`); nothing is
    counted in a simulation."""
    arithmetic_delta: float = 0.0
    """Probability, in either world, of what that bound leaves out; charged to δ."""
    telemetry: Telemetry | None = None
    epochs: int = 1
    """In how many epochs one person may take part. Everything above is for one of them."""
    secret: SecretSteps | None = None
    """Among which steps a record chooses where nobody outside knows its step; None where anybody may. `epsilon` then
    rests on that secret as well, and `epsilon_if_order_known` does not."""
    trust: SumTrust | None = None
    """Whom it counts on where only sums over learners are seen; None where it counts on nobody. `epsilon` then needs
    them, and `floor_epsilon` does not."""

    unit = "one client's record"

    def __post_init__(self) -> None:
        failure = self.epochs * self.graph_failure
        if failure and not failure < 0.5 * self.delta:
            raise InputError(
                "privacy.epochs_per_person",
                self.epochs,
                f"so few that graphs of masks, which fail with probability {self.graph_failure:.1g} in an epoch, take "
                f"less than half of delta = {self.delta:g}",
                "fewer epochs_per_person or federation.epochs, a larger delta, or colluding = 0",
            )

    @property
    def adversary(self) -> str:
        """Who may try to tell neighbours apart."""
        if self.trust is None:
            return "the server and anyone who reads the messages, choosing models adaptively"
        told = f" and {counted(self.trust.colluding, 'colluding learner')}" if self.trust.colluding else ""
        if self.graph_failure:
            told += f" ({SETTLED_BEFORE})"
        return (
            f"the server{told} and anyone who reads the messages, choosing models adaptively, who see only sums over "
            f"learners, while at least {counted(self.trust.honest, 'honest learner')} took part in every round"
        )

    @property
    def hiding_std(self) -> float:
        """Noise std that the adversary must see through: V, or what honest learners have together."""
        return self.noise_std * (1.0 if self.trust is None else self.trust.gain)

    @property
    def order(self) -> Order:
        """Who knows at which step a record is used."""
        return Order.KNOWN if self.secret is None else Order.SECRET

    @property
    def curve(self) -> GaussianCurve:
        """The exact curve of the Gaussian, every (ε, δ(ε)) at once; less the tail's share of δ.

        Raises:
            InputError: beside a secret order, whose promise is worked out for one (ε, δ) and is no Gaussian's.

        """
        self._refuse_other_curves("curve")
        return self.curve_if_order_known

    @property
    def curve_if_order_known(self) -> GaussianCurve:
        """What holds even for somebody who knows at which step each record was used."""
        return GaussianCurve(self.sensitivity / self.hiding_std + self.arithmetic_mu)

    @property
    def epsilon_if_order_known(self) -> float:
        """The ε of `curve_if_order_known`, at the same δ: what is left if the secret of the order comes out."""
        known = self.curve_if_order_known
        return known.epsilon(self.delta - self.graph_failure - self._tail(known.epsilon(self.delta)))

    @property
    def floor(self) -> GaussianCurve:
        """What one learner's own noise gives its clients, whoever colludes and whatever cryptography breaks."""
        self._refuse_other_curves("floor")
        return GaussianCurve(self.sensitivity / self.noise_std + self.arithmetic_mu)

    @property
    def floor_epsilon(self) -> float:
        """The ε of one learner's own noise, at the same δ."""
        if self.secret is not None and self.trust is None:
            return self.epsilon
        if self.secret is not None and self.secret.epsilon_floor is not None:
            return self.secret.epsilon_floor
        return self.floor.epsilon(self.delta - self._tail(self.floor.epsilon(self.delta)))

    def _refuse_other_curves(self, name: str) -> None:
        if self.secret is not None:
            raise InputError(
                f"guarantee.{name}",
                "order = secret",
                "a known order: the promise of a secret one is worked out for one epsilon and delta",
                "epsilon and delta; curve_if_order_known holds whoever knows the order",
            )

    @property
    def graph_failure(self) -> float:
        """The part of δ that a graph of masks may take; none of the floor's."""
        return 0.0 if self.trust is None else self.trust.graph_failure

    def _tail(self, epsilon: float) -> float:
        """What finite draws take of δ at an ε; never more than half of it."""
        return min(0.5 * self.delta, self.arithmetic_delta * (1.0 + math.exp(min(epsilon + 1.0, 700.0))))

    def epsilon_at(self, delta: float) -> float:
        """The ε that this noise really gives at another δ; beside a secret order, at the guarantee's own δ alone.

        Infinite where δ is no more than the probability that a graph of masks fails.
        """
        if self.secret is not None and delta == self.delta:
            return self.epsilon
        left = delta - self.graph_failure
        return math.inf if left <= 0.0 < delta else self.curve.epsilon(left)

    def delta_at(self, epsilon: float) -> float:
        """The δ that this noise really gives at another ε."""
        tail = self.arithmetic_delta * (1.0 + math.exp(min(epsilon, 700.0)))
        return min(1.0, self.curve.delta(epsilon) + tail + self.graph_failure)

    @property
    def over_epochs(self) -> GaussianCurve:
        """The curve for a person who takes part in all ``epochs``.

        Each epoch has noise of its own, so they compose as Gaussian mechanisms do, also when the server chooses an
        epoch's models by what it saw in those before (Dong, Roth and Su 2022, Corollary 3.3): μ becomes √epochs · μ.
        """
        return GaussianCurve(math.sqrt(self.epochs) * self.curve.mu)

    @property
    def epsilon_over_epochs(self) -> float:
        """The ε of all epochs together, at the same δ."""
        if self.epochs == 1 and self.secret is not None:
            return self.epsilon
        left = self.delta - self.epochs * self.graph_failure
        whole = self.over_epochs.epsilon(left)
        tail = self.epochs * self.arithmetic_delta * (1.0 + math.exp(min(whole + 1.0, 700.0)))
        return self.over_epochs.epsilon(max(left - tail, 0.5 * left)) if tail else whole

    @property
    def release_norm(self) -> float:
        """The largest norm of what one client contributes, telemetry included."""
        told = self.telemetry
        return self.clip_norm if told is None else told.release_norm(self.clip_norm)

    @property
    def endless(self) -> bool:
        """Whether it holds for however many steps there will be."""
        return self.horizon >= ENDLESS

    @property
    def remarks(self) -> tuple[str, ...]:
        """What a careful reader should know about this promise."""
        clients = None if self.endless else self.horizon * self.clients_per_step
        remarks = budget_remarks(Budget(self.epsilon, self.delta), clients)
        if self.epochs > 1 and self.epsilon_over_epochs > _WEAK_EPSILON >= self.epsilon:
            remarks += [f"over all {self.epochs} epochs, {_weak_epsilon(self.epsilon_over_epochs)}"]
        if self.trust is not None and self.floor_epsilon > _WEAK_EPSILON >= self.epsilon:
            remarks.append(
                f"the floor, for whoever does not trust {counted(self.trust.honest, 'other learner')}: "
                f"{_weak_epsilon(self.floor_epsilon)}"
            )
        if self.accounting is Accounting.ZCDP:
            remarks.append(
                f"the paper's accounting is loose: this noise really gives "
                f"epsilon = {self.epsilon_at(self.delta):.3f} at delta = {self.delta:g}"
            )
        if not self.sensitivity_exact:
            remarks.append("the sensitivity is a safe upper bound, not the exact value")
        return tuple(remarks)

    def __str__(self) -> str:
        c = self.clients_per_step
        steps = "any number of" if self.endless else str(self.horizon)
        several = f" with {c} clients averaged in a step" if c > 1 else ""
        told = "" if self.telemetry is None else self._telemetry_in_words(self.telemetry)
        return (
            f"({self.epsilon:g}, {self.delta:g})-local differential privacy for {self.unit}, "
            f"{self.neighbours.value} neighbours, taking part {self.participation}, over "
            f"{steps} steps; {self.mechanism} noise with std {self.noise_std:.6g} at clip "
            f"norm {self.clip_norm:g}{several}{told} ({self.accounting.value} accounting)"
            f"{self._epochs_in_words() if self.epochs > 1 else ''}"
            f"{'' if self.secret is None else self._order_in_words(self.secret)}"
            f"{'' if self.trust is None else self._trust_in_words(self.trust)}"
        )

    @property
    def in_short(self) -> str:
        """ε and δ, and what is left of them without the secret of the order or the honesty of other learners."""
        left = [] if self.secret is None else [f"epsilon {self.epsilon_if_order_known:.4g} if the order comes out"]
        if self.trust is not None:
            left.append(f"the floor, if all others collude, epsilon {self.floor_epsilon:.4g}")
        return f"epsilon {self.epsilon}, delta {self.delta}" + (f" ({'; '.join(left)})" if left else "")

    def _order_in_words(self, secret: SecretSteps) -> str:
        where = f"all {secret.among} steps" if secret.window is None else f"the {secret.among} steps of the next window"
        return (
            f"; it rests on a secret, too: at which of {where} a record is used. If that comes out, "
            f"({self.epsilon_if_order_known:.4g}, {self.delta:g})"
        )

    def _trust_in_words(self, trust: SumTrust) -> str:
        failure = trust.graph_failure
        graph = ""
        if failure:
            runs = "" if trust.runs == 1 else f" in {trust.runs} runs"
            graph = f" (but for a probability of {failure:.1g} in delta, that of their graph of masks{runs})"
        return (
            f"; against a server that sees sums over learners, colluding with at most {trust.colluding} of "
            f"{trust.learners}{f' ({SETTLED_BEFORE})' if failure else ''}, while {trust.honest} honest ones take part "
            f"in every round{graph}. Against a server that all others collude with, the floor: "
            f"({self.floor_epsilon:.4g}, {self.delta:g})"
        )

    def _epochs_in_words(self) -> str:
        return (
            f"; a person may take part in {self.epochs} epochs, and all of them together are "
            f"({self.epsilon_over_epochs:.4g}, {self.delta:g})"
        )

    def _telemetry_in_words(self, telemetry: Telemetry) -> str:
        return (
            f" and telemetry ({', '.join(telemetry.metrics)}) of width {telemetry.width:g}, which "
            f"costs {100.0 * telemetry.price(self.clip_norm):.1f}% more noise"
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        plain = asdict(self)
        if self.telemetry is None:
            del plain["telemetry"]
        else:
            plain["telemetry"]["metrics"] = list(self.telemetry.metrics)
            plain["telemetry"]["noise_price"] = self.telemetry.price(self.clip_norm)
            plain["release_norm"] = self.release_norm
        if self.epochs == 1:
            del plain["epochs"]
        else:
            plain["epsilon_over_epochs"] = self.epsilon_over_epochs
        if self.secret is None:
            del plain["secret"]  # as guarantees were before there was a choice
        else:
            plain["order"] = self.order.value
            plain["theorem"] = SECRET_ORDER_THEOREM
            plain["epsilon_if_order_known"] = self.epsilon_if_order_known
        if self.trust is None:
            del plain["trust"]
        else:
            plain["trust"] = asdict(self.trust)
            plain["epsilon_floor"] = self.floor_epsilon
            if self.graph_failure:
                plain["graph_failure"] = self.graph_failure
        plain["neighbours"] = self.neighbours.value
        plain["accounting"] = self.accounting.value
        plain |= {
            "unit": self.unit,
            "adversary": self.adversary,
            "epsilon_exact": self.epsilon_at(self.delta),
            "remarks": list(self.remarks),
        }
        if self.secret is None:
            plain["mu"] = self.curve.mu
        assert math.isfinite(plain["epsilon_exact"])
        return plain

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Guarantee:
        """The guarantee that `as_dict` gave; `KeyError`, `TypeError` or `ValueError` for anything else."""
        told = plain.get("telemetry")
        return cls(
            epsilon=float(plain["epsilon"]),
            delta=float(plain["delta"]),
            mechanism=str(plain["mechanism"]),
            horizon=int(plain["horizon"]),
            clip_norm=float(plain["clip_norm"]),
            neighbours=Neighbours(plain["neighbours"]),
            participation=Participation(**plain["participation"]),
            accounting=Accounting(plain["accounting"]),
            noise_std=float(plain["noise_std"]),
            sensitivity=float(plain["sensitivity"]),
            sensitivity_exact=bool(plain["sensitivity_exact"]),
            clients_per_step=int(plain["clients_per_step"]),
            arithmetic_mu=float(plain["arithmetic_mu"]),
            arithmetic_delta=float(plain["arithmetic_delta"]),
            telemetry=told and Telemetry(tuple(told["metrics"]), told["width"], told["loss_cap"]),
            epochs=int(plain.get("epochs", 1)),
            secret=SecretSteps(**plain["secret"]) if plain.get("secret") else None,
            trust=SumTrust(**plain["trust"]) if plain.get("trust") else None,
        )
