"""Telemetry in a federation: summed, spread over windows, written down, and gone on with."""

from __future__ import annotations

import csv
import dataclasses

import numpy as np
import pytest

from tests.support.federation import DIM, World, plan_of
from veilstream.deployment.ledger.store import Ledger
from veilstream.deployment.release import decode, encode
from veilstream.deployment.terms import Terms
from veilstream.federation.protocol.bounds import OutOfBounds, ReleaseBounds
from veilstream.federation.protocol.fold import ClosedRound, ServerFold
from veilstream.federation.server import telemetry_files
from veilstream.federation.server.run_files import RunFiles
from veilstream.federation.server.telemetry_files import TelemetryFiles
from veilstream.learning.telemetry_estimates import NORMAL_95, RoundNoise
from veilstream.plans.plan import TelemetryPlan
from veilstream.privacy.gradient_types import Noised

X0 = np.zeros(DIM, np.float32)


def told_plan(**changes):
    told = {"metrics": ("accuracy", "clipped", "present"), "window": 3} | changes.pop("told", {})
    return dataclasses.replace(plan_of(**changes), telemetry=TelemetryPlan(**told))


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_federations_folder_has_its_estimates(tmp_path):
    plan = told_plan()
    with World(tmp_path, plan) as world:
        world.start_all()
        coordinator = world.coordinator()
        coordinator.go(world.transport())
        latest = coordinator.telemetry.latest
    # The ledgers hold what each learner said last: all of it, noise included.
    total = np.zeros(3)
    for name in world.names:
        with Ledger(world.store(name), create=True) as ledger:
            message = decode(ledger.blob("message"))
        assert len(message.prefix) == DIM + 3
        total += message.prefix[DIM:] * message.grid
    sums = rows_of(tmp_path / "run/telemetry_sums.csv")
    told = np.array([[float(row[m]) for m in plan.telemetry.metrics] for row in sums])
    np.testing.assert_allclose(told.sum(axis=0), total, rtol=1e-12)
    # The last window has three of six rounds of three learners' two steps.
    estimates = rows_of(tmp_path / "run/telemetry.csv")
    assert [row["metric"] for row in estimates] == [*plan.telemetry.metrics] * 6
    terms = Terms.of(plan, DIM)
    B = terms.mechanism.decoder_matrix()
    width = 2 * int(0.15 / terms.grid.step) * terms.grid.step  # what 0.3 is on the grid
    sd = terms.noise_std * np.sqrt(3 * ((B[11] - B[5]) ** 2).sum()) / (18 * width)
    for row, last, factor, zero in zip(estimates[-3:], latest, (1, 1, 2), (0.5, 0.5, 0), strict=True):
        i = [*plan.telemetry.metrics].index(row["metric"])
        expected = zero + factor * told[3:, i].sum() / (18 * width)
        assert float(row["estimate"]) == pytest.approx(expected, rel=1e-6)
        assert float(row["high"]) - expected == pytest.approx(NORMAL_95 * factor * sd, rel=1e-4)
        assert last.estimate == pytest.approx(expected)
        assert row["steps"] == "18"


def test_the_model_is_made_of_the_gradients_alone(tmp_path):
    with World(tmp_path, told_plan()) as world:
        world.start_all()
        coordinator = world.coordinator()
        coordinator.go(world.transport())
        model = coordinator.models.read(coordinator.round)
    total = np.zeros(DIM)
    for name in world.names:
        with Ledger(world.store(name), create=True) as ledger:
            message = decode(ledger.blob("message"))
        total += (message.prefix * message.grid)[:DIM]
    np.testing.assert_allclose(model, -0.2 * total / 3, rtol=1e-5)


def payload(terms, round_, value, epoch=0):
    prefix = np.full(terms.release_dim, value, np.int64)
    steps = terms.local_steps * (round_ + 1)
    return encode(epoch, round_, steps, terms.grid.step, Noised(prefix))


def test_what_counts_is_summed_and_listed():
    terms = Terms.of(told_plan(), DIM)
    fold = ServerFold(terms, X0, ["a", "b", "c"])
    for name in "abc":
        fold.enrol(name, 0, 0)
    for name, value in (("a", 5), ("b", 7), ("c", 90)):
        fold.accept(name, payload(terms, 0, value))
    closed = fold.close_round()
    assert closed.spans == {"a": (0, 0, 1), "b": (0, 0, 1), "c": (0, 0, 1)}
    np.testing.assert_allclose(closed.telemetry, 102 * terms.grid.step)
    assert len(fold.x) == DIM
    fold.accept("a", payload(terms, 1, 6))
    fold.enrol("b", 1, 0)  # a new epoch: its sums begin at zero again
    fold.accept("b", payload(terms, 0, 3, epoch=1))
    closed = fold.close_round()
    assert closed.spans == {"a": (0, 1, 2), "b": (1, 0, 1)}
    np.testing.assert_allclose(closed.telemetry, (6 - 5 + 3) * terms.grid.step)


def test_a_release_without_its_telemetry_is_refused():
    terms = Terms.of(told_plan(), DIM)
    fold = ServerFold(terms, X0, ["a", "b", "c"])
    fold.enrol("a", 0, 0)
    short = encode(0, 0, 2, terms.grid.step, Noised(np.zeros(DIM, np.int64)))
    with pytest.raises(Exception, match="round 0 was asked for"):
        fold.accept("a", short)


def test_bounds_count_the_whole_vector():
    told, plain = (ReleaseBounds.of(Terms.of(p, DIM)) for p in (told_plan(), plan_of()))
    assert told.dim == plain.dim + 3
    assert told.clip / plain.clip == pytest.approx(np.sqrt(1 + 3 * 0.15**2), rel=1e-9)


def hand_made(terms, round_, telemetry):
    """A release without any gradient, and with this in the first sum of telemetry."""
    prefix = np.zeros(terms.release_dim, np.int64)
    prefix[terms.dim] = telemetry
    return encode(0, round_, terms.local_steps * (round_ + 1), terms.grid.step, Noised(prefix))


def honest_most(terms, before, rounds):
    """Of a sum of telemetry between two rounds: w/2 a step and z deviations, by the dense B."""
    B = terms.mechanism.decoder_matrix()
    steps = terms.local_steps
    rows = [np.linalg.norm(B[r * steps - 1]) if r else 0.0 for r in (before, rounds)]
    z = np.sqrt(2 * np.log(4 * 3 * terms.rounds**2 * terms.release_dim * 2.0**40))
    noise = z * terms.noise_std * sum(rows)
    return ((rounds - before) * steps * terms.telemetry.width / 2 + noise) / terms.grid.step + 1


def test_no_learner_moves_a_sum_of_telemetry_further_than_clients_and_noise_could():
    terms = Terms.of(told_plan(), DIM)
    fold = ServerFold(terms, X0, ["a", "b", "c"])
    bound = honest_most(terms, 0, 1)
    assert fold.bounds.coordinate(1) > 1.05 * bound  # of a gradient's coordinate: for more steps
    for name, units in (("a", 0.9999 * bound), ("b", 1.0001 * bound), ("c", -1.0001 * bound)):
        fold.enrol(name, 0, 0)
        if name == "a":
            assert fold.accept(name, hand_made(terms, 0, int(units)))
            continue
        with pytest.raises(OutOfBounds, match="with a sum of telemetry of"):
            fold.accept(name, hand_made(terms, 0, int(units)))
        assert fold.seats[name].state == "held"


def test_what_is_added_to_telemetry_is_bounded_though_each_sum_could_be():
    told = {"metrics": ("accuracy",), "scale": 1.0}
    terms = Terms.of(told_plan(told=told, rounds=30, learning={"local_steps": 50}), DIM)
    fold = ServerFold(terms, X0, ["a", "b", "c"])
    fold.enrol("a", 0, 0)
    sums = 0
    for r in range(25):
        sums += int(50 * 0.5 / terms.grid.step)  # every client right
        assert fold.accept("a", hand_made(terms, r, sums))
        fold.close_round()
    most = honest_most(terms, 25, 26)
    beyond = sums - int(1.0001 * most)  # each of them could be: a sum goes both ways
    assert abs(beyond) < honest_most(terms, 0, 26)
    with pytest.raises(OutOfBounds, match="units to a sum of telemetry"):
        fold.accept("a", hand_made(terms, 25, beyond))
    assert fold.seats["a"].state == "held"


def test_an_old_copy_that_is_taken_in_again_has_noise_of_its_own():
    """It goes on exactly where the counted rounds end, and is not one stretch with them."""
    terms = Terms.of(told_plan(), DIM)
    fold = ServerFold(terms, X0, ["a", "b", "c"])
    fold.enrol("a", 0, 0)
    noise = RoundNoise(terms.mechanism, terms.noise_std, terms.local_steps)
    for r in range(2):
        fold.accept("a", payload(terms, r, 5))
        noise.add(fold.close_round().spans)
    fold.reset("a")
    fold.enrol("a", 0, 1)  # the copy had done one round of its own
    for r in (1, 2):
        fold.accept("a", payload(terms, r, 7))
        closed = fold.close_round()
        noise.add(closed.spans)
    assert closed.spans == {"a": (0, 2, 3)}
    assert noise.steps(0, 4) == 2 * 3
    B = np.vstack([np.zeros(terms.mechanism.horizon), terms.mechanism.decoder_matrix()])
    apart = np.hypot(np.linalg.norm(B[4]), np.linalg.norm(B[6] - B[4]))
    added = np.linalg.norm(B[4]) + np.linalg.norm(B[6] - B[4])
    assert terms.noise_std * apart <= noise.deviation(0, 4)
    assert noise.deviation(0, 4) == pytest.approx(terms.noise_std * added, rel=1e-5)
    assert noise.deviation(2, 4) == pytest.approx(terms.noise_std * np.linalg.norm(B[6] - B[4]), rel=1e-5)


def test_learners_and_server_must_agree_on_it():
    told, plain = Terms.of(told_plan(), DIM).settings, Terms.of(plan_of(), DIM).settings
    assert told["digest"] != plain["digest"]
    wider = Terms.of(told_plan(told={"scale": 0.31}), DIM).settings
    assert wider["digest"] != told["digest"]


class Cut(BaseException):
    pass


def go(folder, plan, stop_before=None):
    """A server without a network; cut off after a round's lines and before its checkpoint."""
    terms = Terms.of(plan, DIM)
    files = RunFiles(folder, plan, terms)
    fold = files.open(X0, ["a", "b", "c"])
    while not fold.finished:
        r = fold.round
        for name in "abc":
            fold.enrol(name, 0, fold.seats[name].round)
            if not (name == "c" and r == 1):
                own = fold.seats[name].round
                fold.accept(name, payload(terms, own, 11 * own + ord(name)))
        if r == stop_before:
            files._save = lambda fold: (_ for _ in ()).throw(Cut())
        files.close_round(fold, fold.close_round(), 0.0)
    return files.telemetry


@pytest.mark.parametrize("damage", ["", "3,0.25,0.1", '3,0.2,0.1,0.4,"{""a"":[0,'])
def test_a_server_that_was_killed_goes_on_to_the_same_estimates(tmp_path, damage):
    plan = told_plan()
    whole = go(tmp_path / "whole", plan)
    with pytest.raises(Cut):
        go(tmp_path / "cut", plan, stop_before=3)
    with (tmp_path / "cut/telemetry_sums.csv").open("a") as file:
        file.write(damage)
    again = go(tmp_path / "cut", plan)
    assert again.latest == whole.latest
    for name in ("telemetry.csv", "telemetry_sums.csv"):
        assert (tmp_path / "cut" / name).read_text() == (tmp_path / "whole" / name).read_text()


@pytest.mark.parametrize("written", [0, 1])
def test_a_kill_while_a_server_starts_again_loses_nothing(tmp_path, monkeypatch, written):
    """Before the first, or the second, of both files is written."""
    plan = told_plan()
    go(tmp_path, plan)
    names = ("telemetry.csv", "telemetry_sums.csv")
    before = [(tmp_path / name).read_text() for name in names]
    writes = iter([telemetry_files.write_file] * written)

    def cut_off(*args, **options):
        write = next(writes, None)
        if write is None:
            raise Cut
        write(*args, **options)

    again = TelemetryFiles.of(tmp_path, plan, Terms.of(plan, DIM))
    monkeypatch.setattr(telemetry_files, "write_file", cut_off)
    with pytest.raises(Cut):
        again.resume(6)
    assert [(tmp_path / name).read_text() for name in names] == before


def test_a_server_that_starts_again_knows_its_estimates_at_once(tmp_path):
    """Also at a round at which it does not write any."""
    plan = told_plan(told={"window": 40}, rounds=50)
    terms = Terms.of(plan, DIM)
    files = TelemetryFiles.of(tmp_path, plan, terms)
    files.begin()
    for r in range(6):
        spans = dict.fromkeys("abc", (0, r, r + 1))
        files.close_round(ClosedRound(r, {}, (), (), np.array([0.1, 0.2, 0.3]), spans))
    assert files.latest[0].round == 4
    again = TelemetryFiles.of(tmp_path, plan, terms)
    again.resume(6)
    assert [estimate.round for estimate in again.latest] == [6, 6, 6]
    assert {estimate["average"] for estimate in again.as_dicts()} == {"plain mean over steps"}


def test_without_telemetry_there_are_no_such_files(tmp_path):
    assert go(tmp_path, plan_of()) is None
    assert not list(tmp_path.glob("telemetry*"))
