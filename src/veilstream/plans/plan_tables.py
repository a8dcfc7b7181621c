"""The tables of a plan: every key with its type, default and rule. What fits what is `Plan`'s."""

from __future__ import annotations

from typing import Any, Literal

from veilstream.errors import InputError
from veilstream.learning.methods import METHODS, Method, method_of
from veilstream.learning.task_registry import TASKS
from veilstream.mechanisms import MECHANISMS
from veilstream.mechanisms.workload import published_blend
from veilstream.plans.records import FeaturePlan
from veilstream.plans.schema import PlanError, PlanTable, agreed, value
from veilstream.privacy.telemetry import METRIC_NAMES


class PrivacyPlan(PlanTable):
    """The budget of methods that do not name their own."""

    epsilon: float = agreed(gt=0, le=1e6, hint="lower means more private; try 1")
    delta: float = agreed(ge=1e-300, lt=1, hint="well below 1/clients; try 1e-6")
    accounting: Literal["exact", "zcdp"] = agreed(default="exact")
    """How noise is worked out from the budget: exactly for a Gaussian, or by the paper's bound,
    which asks for more."""
    neighbours: Literal["replace-one", "zero-out"] = agreed(default="replace-one")
    """Between which streams the promise is made: one client replaced by another, or by none."""
    participations: int = agreed(default=1, ge=1, hint="how often a client may take part; try 1")
    """How often one client may take part; more visits need more noise."""
    min_separation: int = agreed(default=1, ge=1, hint="steps between two visits; try 1")
    """How many steps lie between two visits of one client, at least."""


class LearningPlan(PlanTable):
    """Algorithm 1's numbers, shared by all methods."""

    rounds: int = agreed(ge=1, hint="R, how many models are released; try 1000")
    unbounded: bool = agreed(default=False)
    """Noise without an end: `rounds` then only says how many of them are simulated. With forgetting
    it is stationary, without it comes in epochs of doubling length (`mechanisms.unbounded`)."""
    local_steps: int = agreed(default=1, ge=1, hint="τ, steps between two releases; try 1")
    learners: int = agreed(default=1, ge=1, hint="n, how many are averaged; try 1")
    clients_per_step: int = agreed(default=1, ge=1, hint="how many a step averages; try 1")
    """How many clients' gradients a step averages."""
    clip_norm: float = agreed(default=1.0, ge=1e-15, le=1e15, hint="of a gradient; try 1")
    """B_g: every client's gradient is shortened to this norm where it is longer."""
    task: str = agreed(
        default="logistic",
        choices=TASKS,
        pattern=r"custom|[^\W\d][\w.]*:[^\W\d]\w*",
        shape='"custom", or "package.module:function"',
    )
    """What is learned. "package.module:function" names a function that makes a task of your own, on
    every machine; "custom" is one given in Python: run(plan, task=...)."""
    ridge: float = agreed(default=0.0, ge=0, hint="0 for none")
    """Weight of half the squared norm of the model, added to the loss."""
    projection_radius: float | None = agreed(default=None, gt=0, hint="leave it out for none")
    """The server moves a model that is longer back to this norm."""
    model_norm_cap: float = agreed(default=1e6, gt=0, hint="try 1e6")
    """A deployed learner refuses models with a larger norm."""
    start: str | None = value(default=None, empty=False, hint="leave it out for the task's own")
    """Start from an earlier model: the folder of a finished run, an .npz file, or the address of a
    server's models (`veilstream.runs.start`). Learners do not read it: they get the server's x."""
    start_sha256: str | None = agreed(
        default=None,
        pattern=r"[0-9a-f]{64}",
        shape="64 hexadecimal digits",
        hint="start.json of a run says it",
        only_with="start",
    )
    """Which model `start` must be; server and learners then agree on it."""
    start_ca: str | None = value(default=None, empty=False, hint="leave it out for the system's", only_with="start")
    """Who vouches for a server that `start` names: a PEM file."""


def of_table(**rule: Any) -> Any:
    """A key of [data] that only records of a table have."""
    return value(only_where=("kind", "table"), **rule)


class DataPlan(PlanTable):
    """Where clients come from."""

    kind: Literal["synthetic", "ripple", "mnist", "table", "custom"] = "synthetic"
    """"table" is records of your own: the keys from `source` on. "custom" is a stream given in
    Python: run(plan, stream=...)."""
    dim: int = value(default=100, ge=1, hint="d, parameters of the model; try 100")
    """d, how many features made-up records have; those of a table have what its columns come to."""
    alpha: float = value(default=0.1, ge=0, hint="0 for learners with one model; try 0.1")
    """How far learners of synthetic data differ in their true model."""
    beta: float = value(default=0.1, ge=0, hint="0 for learners with like features; try 0.1")
    """How far learners of synthetic data differ in their features."""
    feature_norm: float = value(default=1.0, ge=1e-15, le=1e15, hint="try 1")
    """The largest norm that a record's features have."""
    drift: Literal["none", "abrupt", "gradual", "seasonal"] = value(default="none", only_where=("kind", "synthetic"))
    """How the labels of synthetic data turn from one model to another over the run."""
    split: Literal["paper", "dirichlet", "writers", "even"] = "paper"
    """How MNIST is dealt to the learners."""
    walk: float = value(default=0.02, ge=0, hint="0 for a target that stays; try 0.02")
    """How far the target of `ripple` data moves in a round."""
    held_out: int = value(default=2000, ge=1, hint="clients that accuracy is measured on; try 2000")
    """How many made-up clients accuracy is measured on; none of them is learned from."""
    source: str | None = of_table(default=None, empty=False, hint='a file, or "stations/*.csv"')
    """Where a simulation's records are: a file, several by a pattern, "sqlite:FILE", or
    "data:NAME", a public data set that `veilstream data get NAME` fetches."""
    query: str | None = of_table(default=None, empty=False, hint="SELECT ... ORDER BY time")
    """Of a SQLite file: which records, in order."""
    learner: str | None = of_table(default=None, empty=False, hint="leave it out for one file each")
    """Column that says at which learner a record is."""
    client: str | None = of_table(default=None, empty=False, hint='"#row" if each row is someone else')
    """Column that says who; "#row" where every row is another person."""
    time: str | None = of_table(default=None, empty=False, hint="leave it out for the file's order")
    """Column that orders records."""
    label: str | None = of_table(default=None, empty=False, hint="the column that is predicted")
    """Column that is predicted."""
    labels: tuple[str, ...] | None = of_table(default=None, empty=False, hint='["no", "yes"]')
    """The label's texts; in logistic regression the second is +1."""
    label_range: tuple[float, ...] | None = of_table(default=None, hint="[0.0, 100.0]")
    """The label's public range, where it is a number."""
    features: tuple[FeaturePlan, ...] = of_table(default=())
    """Columns that predict, each a [[data.features]]."""
    interactions: tuple[str, ...] = of_table(default=(), hint='["hour * weekday"]')
    """Pairs of features whose products are features too."""
    bias: bool = of_table(default=True)
    """Whether a feature that is always 1 is added."""
    fit: Literal["scale", "clip"] = of_table(default="scale")
    """How features get a norm of at most `feature_norm`: divided by the largest that they can have,
    or cut where they are longer."""
    encode: str | None = of_table(
        default=None,
        pattern=r"[^\W\d][\w.]*:[^\W\d]\w*",
        shape='"package.module:function"',
        hint="a function from a row to features, for features of your own",
    )
    """A function of a row's cells that returns (features, target), instead of [[data.features]]."""
    held_out_share: float = of_table(default=0.2, ge=0, lt=1, hint="try 0.2")
    """Share of a table's people who are measured on and not learned from."""
    returning: Literal["refuse", "first"] = of_table(default="refuse")
    """What a simulation does with people who come more often than the promise allows: refuse the
    plan, or use only as many of their records as it does."""
    missing: float = value(default=0.0, ge=0, lt=1, hint="0 for nobody; try 0.3")
    """In a simulation, how likely each learner is to miss a round; drawn by the run's seeds. In a
    federation learners miss what they miss."""
    late: float = value(default=0.0, ge=0, le=1, hint="0 for nobody; try 0.2")
    """In a simulation, the share of learners that come at a later round."""
    leaving: float = value(default=0.0, ge=0, le=1, hint="0 for nobody; try 0.2")
    """In a simulation, the share of learners that leave for good."""

    @property
    def partial_attendance(self) -> bool:
        """Whether some learners do not take part in every round."""
        return max(self.missing, self.late, self.leaving) > 0.0


class RunPlan(PlanTable):
    """How often, and how much of it is looked at."""

    seeds: int = value(default=10, ge=1, hint="how many repetitions; try 10")
    """How often the simulation is repeated, each time with other draws."""
    first_seed: int = value(default=0, ge=0, hint="try 0")
    """The first repetition's seed; the others follow it."""
    evaluate_every: int = value(default=10, ge=1, hint="in rounds; try 10")
    """How many rounds lie between two measurements of accuracy."""
    memory_mib: int = value(default=4096, ge=1, hint="try 4096")
    """Budget for the simulation's memory, besides the data set; block length and the number of
    seeds that run together follow from it. Changes memory and speed, nothing else."""
    noise: Literal["auto", "host", "device"] = "auto"
    """Where noise is made: "device" has the same draws on every machine; "auto" is "host" on a CPU
    (faster there) and "device" on a GPU."""
    regret: bool = True
    """Whether regret is worked out after a run: it solves for the best model in hindsight."""


class FederationPlan(PlanTable):
    """How a server waits for learners on other machines."""

    quorum: float = value(default=0.5, gt=0, le=1, hint="share of learners a round needs; try 0.5")
    """Share of the learners that a round needs."""
    deadline_s: float = value(default=60.0, gt=0, hint="to wait for the rest; try 60")
    """How long a round waits for the rest of them."""
    patience_s: float = value(default=30.0, ge=0, hint="a learner's wait for clients; try 30")
    """How long a learner waits for clients."""
    min_clients: int = value(default=1, ge=0, hint="0 answers every round; try 1")
    """How many clients must wait at a learner for it to begin a round. Where fewer do, it sits the
    round out and spends nothing; the server sees that it does."""
    epochs: int = agreed(default=1, ge=1, hint="how many runs in a row learners go along; try 1")
    """A learner goes into the server's next run by itself until it has been in so many; each is an
    epoch of its own, with fresh noise and for new clients only."""


class TelemetryPlan(PlanTable):
    """Bounded numbers that each client contributes beside its gradient, under the same promise.

    Without this table there is none, to the bit. `docs/telemetry.md` says what it costs and shows.
    """

    metrics: tuple[str, ...] = agreed(
        default=("accuracy",),
        empty=False,
        choices=METRIC_NAMES,
        hint='["accuracy"]; leave the table out for no telemetry',
    )
    scale: float = agreed(default=0.3, gt=0, le=10, hint="times the clip norm; try 0.3")
    """Width of each metric's coordinate, in clip norms: wider is seen better and needs more noise,
    √(1 + metrics·(scale/2)²) times as much; 1.1% for one metric at 0.3."""
    loss_cap: float = agreed(default=1.0, gt=0, hint="losses beyond count as this; try 1")
    """For the metric "loss"; public, never taken from records."""
    window: int | None = value(default=None, ge=1, hint="in rounds; leave it out for 1000 steps")
    """Rounds that an estimate averages over."""

    def check(self) -> None:
        """Refuse a metric that is named twice."""
        if len(set(self.metrics)) < len(self.metrics):
            raise PlanError("metrics", list(self.metrics), "each metric once", "remove one")


class MethodPlan(PlanTable):
    """One line of the comparison."""

    name: str = value(
        pattern=r"[^/\\\x00-\x1f\x7f]+",
        shape="text without slashes and control characters",
        hint="a short name for tables and figures",
    )
    kind: str = agreed(default="ours", choices=METHODS)
    """Whose method: ours, one of those that the paper compares, without noise, or one that needs no
    tuning ("auto")."""
    mechanism: str | None = agreed(default=None, choices=MECHANISMS)
    """Which correlated noise; left out, the one that belongs to the kind."""
    step_size: float | None = agreed(default=None, gt=0, hint="try 0.1")
    """η, of a local step. Only kind = "auto" leaves it out, and must: it follows from the plan."""
    server_step_size: float = agreed(default=1.0, gt=0, hint="try 1")
    """η_g. Chosen by kind = "auto" too."""
    step_decay: float = agreed(default=0.0, ge=0, hint="0 for none, 0.5 for 1/sqrt(round)")
    """Both step sizes together fall like (1 + round)^-step_decay."""
    averaging: float | None = agreed(default=None, ge=0, hint="leave it out for none; try 3")
    """Publish an average of the models so far, in which model r weighs about r^averaging. Learners
    still start from the latest one. Post-processing: it costs nothing of the promise."""
    newest_weight: float | None = agreed(default=None, gt=0, le=1, hint="leave it out; try 0.01")
    """Publish an exponential average instead, in which the newest model has this weight."""
    forgetting: float = agreed(default=1.0, gt=0, le=1, hint="1 forgets nothing; try 0.999")
    """ρ: every round the server first draws the model to where the run began, x⁰ + ρ·(x - x⁰)."""
    clip_norm: float | None = agreed(default=None, ge=1e-15, le=1e15, hint="of a gradient; try 1")
    """B_g of this method, if not the plan's; its noise is calibrated to it."""
    clients_per_step: int | None = agreed(default=None, ge=1, hint="leave it out for the plan's")
    """How many of a round's clients a step of this method averages, if not the plan's: fewer and
    larger steps in as many rounds. Divides local_steps x clients_per_step of the plan."""
    epsilon: float | None = agreed(default=None, gt=0, le=1e6, hint="lower means more private")
    """ε of this method, if not the plan's."""
    delta: float | None = agreed(default=None, ge=1e-300, lt=1, hint="well below 1/clients")
    """δ of this method, if not the plan's."""
    accounting: Literal["exact", "zcdp"] | None = agreed(default=None)
    """Of this method, if not the plan's."""
    objective: Literal["mean", "max", "rounds", "published"] | None = agreed(default=None)
    """What the mechanism is best for. "published" is the noise in what this method publishes, by
    its steps, averaging and forgetting, at round ends (`buffered` and `banded` are then
    tuned for people who return, where [privacy] allows it); the others are for `optimal`."""

    def check(self) -> None:
        """Refuse a method that neither says its step size nor chooses it."""
        if self.step_size is None and not self.method.chooses_steps:
            raise PlanError(
                "step_size",
                None,
                "a finite number > 0",
                'add step_size = ...; try 0.1, or kind = "auto" which needs none',
            )

    @property
    def method(self) -> Method:
        """Whose method this is."""
        return method_of(self.kind)

    @property
    def local_step_size(self) -> float:
        """η, of a local step.

        Raises:
            InputError: for a method of kind "auto" as a plan holds it; `prepare` chooses it.

        """
        if self.step_size is None:
            raise InputError(
                "step_size",
                None,
                f"a number: {self.name} has not chosen its own yet",
                "take the method from prepare(plan, method).plan",
            )
        return self.step_size

    def blend(self, round_: Any) -> Any:
        """Weight of the model that a round ends with in the average that is published."""
        return published_blend(self.averaging, self.newest_weight, round_)

    @property
    def forgets(self) -> bool:
        """Whether the server draws the model to where the run began."""
        return self.forgetting < 1.0

    @property
    def mechanism_name(self) -> str | None:
        """The mechanism that makes its noise, if any."""
        return self.mechanism or self.method.default_mechanism
