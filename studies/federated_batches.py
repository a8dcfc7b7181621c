"""Steps of several clients: real processes serve the simulation's models, though some are killed.

    python -m studies.federated_batches             a short synthetic plan, 3 learners
    python -m studies.federated_batches --mnist     the preset mnist_private, 10 learners, "buffered @ 2"

1. The plan is simulated for one seed.
2. The same plan runs as a federation: the `veilstream server` command, and learner processes that run
   the `veilstream learner` command. One thing is replaced, here and nowhere else: rows of normals are
   the simulation's (`studies.parity`), so **these learners protect no one**. Their epochs are marked in
   the ledger, and no deployed learner goes on with one. The server, the process of its model API and one
   learner are killed (SIGKILL) in the middle of a round and started again.
3. The same learners and the server's fold run once more, in this process, undisturbed. What the
   processes serve must be equal to the bit in every round.
4. The simulation computes in float32 and on no grid. After r rounds its models may differ from those
   served by η·η_g times the sum of (`allowance`; Euclidean norms, s is the grid, m the clients of a step)

* √d·s·m for each step, whose m shares are rounded towards zero, and √d·s/2 for the noise's prefix;
* (d + 13)·2^-23·B_g for each step, by which a clipped gradient stays below the bound in float32,
  and (d + 16)·2^-24·B_g for the gradient's own arithmetic;
* how far the float32 and the float64 program of the noise are apart, computed from both;

and 4·2^-24·|x| for each round of float32 sums. Gradients at models that differ also differ; nothing is
allowed for that, so a run whose differences grow by themselves fails.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil

from studies.parity import UNIT, Deployed, Floats, GivenNoise, deploy, simulated_models, simulated_noise
from veilstream.deployment.ledger.inspect import verify
from veilstream.deployment.terms import Terms
from veilstream.federation.addresses import free_port
from veilstream.federation.demo import direct_processes
from veilstream.federation.demo_data import DemoData
from veilstream.federation.keys.new_keys import make_keys
from veilstream.federation.processes import Child
from veilstream.federation.server.checkpoint import ModelFile
from veilstream.plans.experiments import experiment_path
from veilstream.plans.plan import Plan
from veilstream.plans.prepare import prepare
from veilstream.plans.tasks import task_of
from veilstream.progress import progress

ROOT = Path(__file__).parent.parent
MNIST_METHOD = "buffered @ 2"
ALL_THERE = {"federation.quorum": 1.0, "federation.deadline_s": 300.0, "federation.patience_s": 120.0}
"""A learner that is killed is waited for: the replay has everyone in every round."""


@dataclass
class Report:
    """What was compared, and what was wrong."""

    learners: int
    rounds: int
    clients_per_step: int
    accuracy: tuple[float, float] = (0.0, 0.0)
    """Of the last model on held-out people: simulated, served."""
    units: float = 0.0
    """Largest difference of a number in a served model from the simulation's, in units of the grid times η·η_g."""
    relative: float = 0.0
    """That difference over the largest number in a model."""
    used: float = 0.0
    """Largest share of the allowance that a round's model used."""
    unequal_rounds: int = 0
    """Rounds whose served model is not the replayed one, to the bit."""
    kills: dict[str, int] = field(default_factory=dict)
    """The round in which each was killed."""
    clients: int = 0
    """By the processes' ledgers, which verify."""
    seconds: dict[str, float] = field(default_factory=dict)

    def text(self) -> str:
        killed = ", ".join(f"{name} in round {r}" for name, r in self.kills.items())
        took = ", ".join(f"{name} {s:.0f} s" for name, s in self.seconds.items())
        lines = {
            "federation": f"{self.learners} learner processes, {self.rounds} rounds, {self.clients_per_step} clients a "
            f"step, {self.clients} clients in verified ledgers",
            "accuracy": f"simulated {self.accuracy[0]:.4f}, served {self.accuracy[1]:.4f}",
            "killed": killed,
            "replay": f"{self.unequal_rounds} of {self.rounds + 1} served models differ from it in a bit",
            "simulation": f"largest difference {self.units:.1f} grid units ({self.relative:.1e} of the largest "
            f"number), {self.used:.0%} of the allowance",
            "time": took,
        }
        return "\n".join(f"{name:<11} {text}" for name, text in lines.items())


def mnist_plan() -> Plan:
    """The preset's deployed method, for one seed."""
    plan = Plan.load(experiment_path("mnist_private"), ALL_THERE | {"run.seeds": 1, "run.noise": "host"})
    return dataclasses.replace(plan, methods=tuple(m for m in plan.methods if m.name == MNIST_METHOD))


def short_plan(learners: int = 3, rounds: int = 12) -> Plan:
    """Made-up clients; some gradients are clipped."""
    return Plan(
        name="federated_batches",
        learning={"rounds": rounds, "local_steps": 2, "clients_per_step": 7, "learners": learners, "clip_norm": 0.4},
        data={"dim": 8, "held_out": 500},
        privacy={"epsilon": 4.0, "delta": 1e-5},
        federation={key.partition(".")[2]: value for key, value in ALL_THERE.items()},
        run={"seeds": 1, "first_seed": 3, "noise": "host", "regret": False},
        methods=[
            {"name": "ours", "mechanism": "buffered", "averaging": 3.0, "step_size": 0.2, "server_step_size": 0.7}
        ],
    )


# --- the processes -------------------------------------------------------------------------------


def learner_process(place: int, arguments: list[str]) -> None:
    """`veilstream learner`, with the simulation's normals at this learner's place."""
    from veilstream import cli
    from veilstream.federation.learner import process

    def daemon(learner: GivenNoise, *values: object, **more: object) -> object:
        return deployed_daemon(learner, *values, **more, parts=learner.parts)

    deployed_daemon, process.Daemon, process.Learner = process.Daemon, daemon, GivenNoise.at(place)
    sys.argv = ["veilstream", "learner", *arguments]
    cli.main()


def processes(folder: Path, names: list[str]) -> list[Child]:
    """The server, then the learners, with normals of the simulation; none is started."""
    sources = {name: f"plan:{place}" for place, name in enumerate(names)}
    server, *learners = direct_processes(folder, sources, free_port())
    server.command += ["--model-api", f"127.0.0.1:{free_port()}"]
    given = []
    for place, child in enumerate(learners):
        arguments = child.command[child.command.index("learner") + 1 :]
        command = [sys.executable, "-m", "studies.federated_batches", "--learner", str(place), *arguments]
        given.append(Child(command, child.log, directory=ROOT))
    return [server, *given]


def run_processes(plan: Plan, folder: Path, names: list[str], limit_s: float) -> dict[str, int]:
    """Run to the end and kill the server, its model API and a learner on the way; when each was killed."""
    make_keys(folder / "keys", ["127.0.0.1", "localhost"], names)
    (folder / "plan.toml").write_text(plan.to_toml())
    server, *learners = children = processes(folder, names)
    rounds = plan.learning.rounds
    due = {"server": (server, rounds // 3), "learner": (learners[-1], 2 * rounds // 3)}
    api_due = rounds // 2
    killed: dict[str, int] = {}
    until = time.monotonic() + limit_s
    try:
        for child in children:
            child.start()
        with progress("rounds", rounds) as tick:
            shown = 0
            while server.running or server.exit_code != 0:
                assert time.monotonic() < until, f"{shown} of {rounds} rounds after {limit_s} s"
                for child in children:
                    assert child.running or child.exit_code == 0, f"{child.exit_code}: {child.last_lines()}"
                done = rounds_done(folder)
                tick(max(0, done - shown))
                shown = max(shown, done)
                for name, (child, first) in due.items():
                    if name not in killed and first <= done < rounds - 1:
                        killed[name] = done
                        assert child.pid is not None
                        os.kill(child.pid, signal.SIGKILL)
                        child.end()
                        assert child.exit_code == -signal.SIGKILL
                        child.start()
                if "model API" not in killed and api_due <= done < rounds - 1 and kill_model_api(server.pid):
                    killed["model API"] = done
                time.sleep(0.02)
    finally:
        for child in reversed(children):
            child.end()
    return killed


def kill_model_api(server: int | None) -> bool:
    """End the process that the server shows its models with; False if it has not started yet."""
    for child in psutil.Process(server).children():
        if any("model_process" in word for word in child.cmdline()):
            child.kill()
            return True
    return False


def rounds_done(folder: Path) -> int:
    path = folder / "run/rounds.csv"
    return max(0, path.read_bytes().count(b"\n") - 1) if path.exists() else 0


# --- the comparison ------------------------------------------------------------------------------


def allowance(plan: Plan, terms: Terms, noise: Floats, replayed: Deployed) -> Floats:
    """How far x^0 to x^R may be from the simulation's, in Euclidean norm, as the module's text says."""
    d, s, m, tau = terms.dim, terms.grid.step, terms.clients_per_step, terms.local_steps
    bound, root = terms.grid.clip_norm, np.sqrt(terms.dim)
    apart = np.linalg.norm(np.cumsum((replayed.noise - noise).mean(axis=1), axis=0), axis=-1)[tau - 1 :: tau]
    step = root * s * m + (2 * (d + 13) + d + 16) * UNIT * bound
    r = np.arange(1, terms.rounds + 1)
    size = terms.method.local_step_size * terms.method.server_step_size
    largest = np.linalg.norm(replayed.models, axis=-1).max()
    # What is served is an average of models so far, so it is off by no more than the worst of them.
    model = np.maximum.accumulate(size * (r * tau * step + root * s / 2 + apart) + 4 * UNIT * r * largest)
    return np.concatenate([[0.0], model])


def study(plan: Plan, folder: Path, limit_s: float = 900.0) -> Report:
    """Simulate, run processes, replay, compare."""
    folder = folder.resolve()
    task = task_of(plan)
    terms = Terms.of(plan, task.dim, task)
    learning = plan.learning
    names = [f"learner-{place}" for place in range(learning.learners)]
    report = Report(learning.learners, learning.rounds, terms.clients_per_step)
    began = time.monotonic()

    def took(name: str) -> None:
        nonlocal began
        report.seconds[name], began = time.monotonic() - began, time.monotonic()

    prepared = prepare(plan, plan.methods[0])
    simulated = simulated_models(plan, [prepared])[0]
    took("simulation")
    (folder / "federation").mkdir(parents=True)
    report.kills = run_processes(plan, folder / "federation", names, limit_s)
    file = ModelFile(folder / "federation/run/models.f32", task.dim)
    served = np.array([file.read(r) for r in range(learning.rounds + 1)])
    report.clients = sum(verify(folder / f"federation/learners/{name}/store.db").clients for name in names)
    took("processes")
    replayed = deploy(plan, folder / "replay", task)
    took("replay")
    report.unequal_rounds = int((served.view(np.uint32) != replayed.models.astype("<f4").view(np.uint32)).any(1).sum())
    apart = served.astype(np.float64) - simulated
    allowed = allowance(plan, terms, simulated_noise(plan, prepared, task.dim), replayed)
    unit = terms.grid.step * terms.method.local_step_size * terms.method.server_step_size
    report.units = float(np.abs(apart).max() / unit)
    report.relative = float(np.abs(apart).max() / np.abs(served).max())
    assert not apart[0].any()
    report.used = float((np.linalg.norm(apart, axis=-1)[1:] / allowed[1:]).max())
    scores = DemoData.of(plan).scores(task, simulated[-1], served[-1])
    assert scores is not None
    report.accuracy = scores.before, scores.after
    return report


def main() -> None:
    if sys.argv[1:2] == ["--learner"]:
        learner_process(int(sys.argv[2]), sys.argv[3:])
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mnist", action="store_true", help="the preset mnist_private with ten learners")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="federated-batches-") as folder:
        report = study(mnist_plan() if asked.mnist else short_plan(), Path(folder))
    print(report.text())
    sys.exit(1 if report.unequal_rounds or report.used > 1.0 or len(report.kills) < 3 else 0)


if __name__ == "__main__":
    main()
