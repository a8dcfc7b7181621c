"""The tables of a plan: every key with its type, default and rule. Rules between tables: `rules`."""

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
    """How the budget becomes noise: exactly, or by the paper's looser bound, which needs more noise."""
    neighbours: Literal["replace-one", "zero-out"] = agreed(default="replace-one")
    """What the promise hides: whose record it was ("replace-one"), or whether there was one ("zero-out")."""
    order: Literal["known", "secret"] = agreed(default="known", silent_default=True)
    """Who may know at which step a record is used: "known" for anybody; "secret" where every record of an epoch chooses
    its step at random and nobody outside the learner sees which, which needs less noise. The promise then rests on
    that secret, too."""
    window: int | None = agreed(
        default=None,
        ge=2,
        hint="leave it out where records lie there before an epoch begins; try 20",
        only_where=("order", "secret"),
        silent_default=True,
    )
    """Steps of a window, for records that come while the run goes on: those of one window are used in the next, at a
    step of their own choice, and the first window has none. The gain is that of so many steps, not of all."""
    trust: Literal["each", "sum"] = agreed(default="each", silent_default=True)
    """What the server sees: "each" learner's noisy sums, or only their "sum" over learners. Under "sum" the noise of
    `honest` learners together keeps ε, so each adds 1/√honest of it; whoever trusts none of them reads the floor, which
    every command prints beside ε."""
    honest: int | None = agreed(
        default=None, ge=1, hint="about half the learners", only_where=("trust", "sum"), silent_default=True
    )
    """How many learners' noise the promise counts on: nothing is opened unless so many, besides `colluding` ones, took
    part in every round so far."""
    colluding: int = agreed(
        default=0,
        ge=0,
        hint="0 if no learner tells the server what it knows",
        only_where=("trust", "sum"),
        silent_default=True,
    )
    """How many learners may tell the server all that they know, beside the honest ones."""
    participations: int = agreed(default=1, ge=1, hint="how often a client may take part; try 1")
    """How often one client may take part; more visits need more noise."""
    min_separation: int = agreed(default=1, ge=1, hint="steps between two visits; try 1")
    """Least number of steps between two visits of one client."""
    epochs_per_person: int = agreed(default=1, ge=1, hint="1, unless the same people come in every epoch")
    """In how many epochs one person may take part. ε is for each of them; the guarantee also says the ε of
    all together, about √epochs_per_person times as large."""


class LearningPlan(PlanTable):
    """Algorithm 1's numbers, shared by all methods."""

    rounds: int = agreed(ge=1, hint="R, how many models are released; try 1000")
    unbounded: bool = agreed(default=False)
    """The run has no planned end: `rounds` only says how many a simulation runs. With forgetting the
    noise is stationary, without it comes in epochs of doubling length (`mechanisms.unbounded`)."""
    local_steps: int = agreed(default=1, ge=1, hint="τ, steps between two releases; try 1")
    learners: int = agreed(default=1, ge=1, hint="n, how many are averaged; try 1")
    clients_per_step: int = agreed(default=1, ge=1, hint="how many a step averages; try 1")
    """How many clients' gradients a step averages."""
    clip_norm: float = agreed(default=1.0, ge=1e-15, le=1e15, hint="of a gradient; try 1")
    """B_g: a longer gradient of a client is shortened to this norm."""
    task: str = agreed(
        default="logistic",
        choices=TASKS,
        pattern=r"custom|[^\W\d][\w.]*:[^\W\d]\w*",
        shape='"custom", or "package.module:function"',
    )
    """The task. "package.module:function" names a function of your own that makes one; "custom" is a
    task given in Python: run(plan, task=...)."""
    class_weights: tuple[float, ...] | None = agreed(
        default=None, empty=False, ge=0.001, le=1, hint="the largest is 1: [0.4, 1.0]"
    )
    """How much a client's gradient counts, by its label, in the order of `data.labels`. A smaller weight shortens a
    gradient before it is clipped, so no promise changes. `data.label_shares` chooses them."""
    ridge: float = agreed(default=0.0, ge=0, hint="0 for none")
    """Weight of half the squared norm of the model, added to the loss."""
    projection_radius: float | None = agreed(default=None, gt=0, hint="leave it out for none")
    """The server shortens a longer model to this norm."""
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
    """Hash of the model that `start` must be; server and learners compare it."""
    start_ca: str | None = value(default=None, empty=False, hint="leave it out for the system's", only_with="start")
    """PEM file of the authority that signed the certificate of the server in `start`."""


def of_table(**rule: Any) -> Any:
    """A key of [data] that only records of a table have."""
    return value(only_where=("kind", "table"), **rule)


class DataPlan(PlanTable):
    """Where clients come from."""

    kind: Literal["synthetic", "ripple", "mnist", "table", "custom"] = "synthetic"
    """"table" is records of your own: the keys from `source` on. "custom" is a stream given in
    Python: run(plan, stream=...)."""
    dim: int = value(default=100, ge=1, hint="d, parameters of the model; try 100")
    """d, the number of features of made-up records; a table's follow from its columns."""
    alpha: float = value(default=0.1, ge=0, hint="0 for learners with one model; try 0.1")
    """How far learners of synthetic data differ in their true model."""
    beta: float = value(default=0.1, ge=0, hint="0 for learners with like features; try 0.1")
    """How far learners of synthetic data differ in their features."""
    shared: float = value(default=0.0, ge=0, le=1, only_where=("kind", "synthetic"))
    """Which part of synthetic learners' true models, by variance, is the same for all; 0 is Li et al.'s recipe."""
    spread: float = value(default=1.0, gt=0, only_where=("kind", "synthetic"), hint="try 4")
    """How far synthetic clients lie from their learner's centre, in units of Li et al.'s recipe."""
    feature_norm: float = value(default=1.0, ge=1e-15, le=1e15, hint="try 1")
    """Largest norm of a record's features."""
    drift: Literal["none", "abrupt", "gradual", "seasonal"] = value(default="none", only_where=("kind", "synthetic"))
    """How synthetic labels move from one true model to another during the run."""
    split: Literal["paper", "dirichlet", "writers", "even"] = "paper"
    """How MNIST is dealt to the learners."""
    walk: float = value(default=0.02, ge=0, hint="0 for a target that stays; try 0.02")
    """How far the target of `ripple` data moves in a round."""
    held_out: int = value(default=2000, ge=1, hint="clients that accuracy is measured on; try 2000")
    """Number of made-up clients that measure accuracy; the model never learns from them."""
    source: str | None = of_table(default=None, empty=False, hint='a file, or "stations/*.csv"')
    """Where a simulation's records are: a file, several by a pattern, "sqlite:FILE", or
    "data:NAME", a public data set that `veilstream data get NAME` fetches."""
    query: str | None = of_table(default=None, empty=False, hint="SELECT ... ORDER BY time")
    """Query that selects and orders the records of a SQLite file; other files ignore it. Without one, the file's
    only table is read."""
    key: str | None = of_table(default=None, empty=False, hint="a column that only grows, such as id")
    """Column of a SQLite file's records that is different in each and larger in newer ones: a learner reads on
    behind it. A table without a query has its rowid."""
    learner: str | None = of_table(default=None, empty=False, hint="leave it out for one file each")
    """Column that names a record's learner."""
    client: str | None = of_table(default=None, empty=False, hint='"#row" if each row is someone else')
    """Column that identifies the person; "#row" if every row is another person."""
    time: str | None = of_table(default=None, empty=False, hint="leave it out for the file's order")
    """Column that orders records."""
    label: str | None = of_table(default=None, empty=False, hint="the column that is predicted")
    """Column that is predicted."""
    labels: tuple[str, ...] | None = of_table(default=None, empty=False, hint='["no", "yes"]')
    """The label's texts; in logistic regression the second is +1."""
    label_shares: tuple[float, ...] | None = of_table(default=None, empty=False, gt=0, lt=1, hint="[0.73, 0.27]")
    """Shares of the labels, in the order of `labels`, as far as they are known without these records; never taken from
    private ones. Then labels count alike, however rare they are: `learning.class_weights` in inverse proportion."""
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
    """Share of a table's people, or of each learner's last records, that measure how good a model is; it never
    learns from them."""
    held_out_by: Literal["time", "people"] | None = of_table(default=None)
    """Who measures how good a model is: the last records of each learner ("time", the default where there is a
    column `time`), as a deployed model meets them; or people whom a hash picks, at any time ("people")."""
    returning: Literal["refuse", "first"] = of_table(default="refuse")
    """When people come more often than the promise allows, a simulation refuses the plan, or uses only
    their first records."""
    missing: float = value(default=0.0, ge=0, lt=1, hint="0 for nobody; try 0.3")
    """Simulation only: the probability that a learner misses a round."""
    late: float = value(default=0.0, ge=0, le=1, hint="0 for nobody; try 0.2")
    """Simulation only: the share of learners that join at a later round."""
    leaving: float = value(default=0.0, ge=0, le=1, hint="0 for nobody; try 0.2")
    """Simulation only: the share of learners that leave for good."""

    @property
    def partial_attendance(self) -> bool:
        """Whether some learners do not take part in every round."""
        return max(self.missing, self.late, self.leaving) > 0.0


class RunPlan(PlanTable):
    """How a simulation is repeated and measured."""

    seeds: int = value(default=10, ge=1, hint="how many repetitions; try 10")
    """Number of repetitions, each with its own draws."""
    first_seed: int = value(default=0, ge=0, hint="try 0")
    """The first repetition's seed; the others follow it."""
    evaluate_every: int = value(default=10, ge=1, hint="in rounds; try 10")
    """Rounds between two measurements of accuracy."""
    memory_mib: int = value(default=4096, ge=1, hint="try 4096")
    """Memory for the simulation, besides the data set. It sets how many seeds run together: speed
    changes, results do not."""
    noise: Literal["auto", "host", "device"] = "auto"
    """Where noise is made: "device" has the same draws on every machine; "auto" is "host" on a CPU
    (faster there) and "device" on a GPU."""
    regret: bool = True
    """Whether to compute regret after a run, by solving for the best model in hindsight."""


class FederationPlan(PlanTable):
    """How a server waits for learners on other machines."""

    quorum: float = value(default=0.5, gt=0, le=1, hint="share of learners a round needs; try 0.5")
    """Share of the learners that a round needs."""
    deadline_s: float = value(default=60.0, gt=0, hint="to wait for the rest; try 60")
    """How long a round waits for the rest of them."""
    grace_s: float = value(default=5.0, ge=0, hint="for a learner that is away; try 5")
    """How long rounds wait for a learner whose connection has ended, counted once from that moment. One that has not
    been seen since the server started is waited for `deadline_s`."""
    patience_s: float = value(default=30.0, ge=0, hint="a learner's wait for clients; try 30")
    """How long a round of a learner with live data or an iterator takes clients. Its reply leaves a second later
    whoever came, so it takes at most local_steps x clients_per_step clients in patience_s + 1 seconds: more steps, more
    clients a step or less patience take more."""
    min_clients: int | None = value(default=None, ge=0, hint="1 begins with whoever is there, 0 with nobody")
    """Clients who must be waiting for a learner to begin a round. With fewer it sits the round out and spends nothing;
    the server sees that it does. By default a whole round of them where data come from a file or an iterator, so that
    no noise is spent on nobody: a model is then as old as a round takes to fill. 1 where people call."""
    method: str | None = value(default=None, hint="the name of one private method; leave it out if there is one")
    """Which of the plan's private methods learners run; needed where there are several."""
    epochs: int = agreed(default=1, ge=1, hint="how many runs in a row learners go along; try 1")
    """How many of the server's runs a learner joins by itself. Each is an epoch of its own, with fresh
    noise and new clients only."""


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
    """The method: ours, one that needs no tuning ("auto"), one of those that the paper compares, or
    one without noise."""
    mechanism: str | None = agreed(default=None, choices=MECHANISMS)
    """The noise mechanism; by default the kind's own."""
    step_size: float | None = agreed(default=None, gt=0, hint="try 0.1")
    """η, of a local step. kind = "auto" chooses it, and refuses one that is given."""
    server_step_size: float = agreed(default=1.0, gt=0, hint="try 1")
    """η_g, of the server. kind = "auto" chooses it."""
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
    """Clients that a step of this method averages, if not the plan's. Must divide local_steps x
    clients_per_step of the plan."""
    epsilon: float | None = agreed(default=None, gt=0, le=1e6, hint="lower means more private")
    """ε of this method, if not the plan's."""
    delta: float | None = agreed(default=None, ge=1e-300, lt=1, hint="well below 1/clients")
    """δ of this method, if not the plan's."""
    accounting: Literal["exact", "zcdp"] | None = agreed(default=None)
    """Of this method, if not the plan's."""
    objective: Literal["mean", "max", "rounds", "published"] | None = agreed(default=None)
    """What the mechanism is best for. "published" is the noise in what this method publishes, by
    its steps, averaging and forgetting, at round ends (`optimal`, `buffered` and `banded` are then
    made for people who return, where [privacy] allows it). "mean" and "max" are for `optimal` and
    `buffered`, "rounds" for `optimal`."""

    def check(self) -> None:
        """Refuse a method without a step size."""
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
        """η, of a local step."""
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
