"""What live pages are told: every round once, bounded, and nothing that is not to be known."""

from __future__ import annotations

import json
import time
import tomllib
from types import SimpleNamespace

import numpy as np
import pytest

import veilstream as vs
from tests.browser.samples import TELEMETRY
from tests.support.federation import World, plan_of
from tests.test_package import SMALL_PLAN
from veilstream.federation.server.open_round import Standing
from veilstream.federation.server.server_metrics import CountedTransport, ServerMetrics
from veilstream.learning.telemetry_estimates import Estimate
from veilstream.reports.charts import unpack
from veilstream.reports.federation_report import federation_state
from veilstream.reports.live_federation import LiveFederation, ThinnedRounds
from veilstream.reports.live_simulation import LiveSimulation
from veilstream.simulation.runner import simulate


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Reader:
    """What a browser would show: the state that it began with, and every event since."""

    def __init__(self, page) -> None:
        self._page = page
        self.id, state = page.snapshot()
        self.state = json.loads(state)
        self.points: dict[str, list] = {c["id"]: list(c["x"]) for c in self.state["charts"].get("rounds", [])}

    def catch_up(self) -> int:
        events = self._page.feed.since(self.id)
        assert events is not None
        for event in events:
            patch = json.loads(event.data)
            for name, more in patch.pop("append", {}).items():
                self.points[name] += more["x"]
            if "charts" in patch:
                self.points = {c["id"]: list(c["x"]) for c in patch["charts"]["rounds"]}
            self.state |= {k: v for k, v in patch.items() if k != "charts"}
            self.id = self._page.feed.id_of(event.number)
        return len(events)

    @property
    def beside(self) -> dict[str, str]:
        return {each["label"]: each["value"] for each in self.state["headline"]["beside"]}

    @property
    def rows(self) -> dict[str, list[str]]:
        """Rows of the table as text: now, rounds taken part, rounds left, epoch."""
        rows = [[c if isinstance(c, str) else c["text"] for c in row] for row in self.state["results"]["rows"]]
        return {row[0]: row[1:] for row in rows}


@pytest.fixture
def here(tmp_path):
    """Three learners and a page, with a clock that stands still unless it is moved."""
    with World(tmp_path, plan_of(federation={"quorum": 0.3, "deadline_s": 1.0})) as world:
        world.start_all()
        made = SimpleNamespace(world=world, clock=Clock(), metrics=ServerMetrics())

        def open_page(named: bool = True) -> None:
            made.coordinator = world.coordinator()
            made.page = LiveFederation(
                made.coordinator, made.metrics, tmp_path / "run", "/live", named=named, clock=made.clock
            )
            made.coordinator._watch = made.page.standing

        def go(until: int) -> None:
            transport = CountedTransport(world.transport(), made.metrics)
            made.coordinator.go(transport, until, look=lambda: setattr(made.clock, "now", made.clock.now + 0.02))

        def later() -> None:
            """The server waits, and says so, ten seconds later."""
            made.clock.now += 10
            made.page.standing(Standing(made.coordinator.round, 6, (), ()))

        made.open_page, made.go, made.later = open_page, go, later
        open_page()
        yield made


def test_every_round_is_told_once_and_the_page_agrees_with_the_folder(here):
    reader = Reader(here.page)
    assert reader.beside["rounds done"] == "0 of 6"
    assert reader.state["charts"]["rounds"] == []
    here.go(6)
    assert reader.catch_up() > 0
    assert reader.points["seconds"] == reader.points["bytes"] == [1, 2, 3, 4, 5, 6]
    assert reader.beside["rounds done"] == "6 of 6"
    assert reader.beside["rounds left"] == "0"
    assert reader.beside["learners present"] == "3 of 3"
    assert {name: row[1] for name, row in reader.rows.items()} == dict.fromkeys("abc", "6")
    assert "All rounds are done" in reader.state["notices"][0]
    again = Reader(here.page)
    assert again.points == reader.points  # who comes now sees the same
    assert again.state["headline"] == reader.state["headline"]
    charts = {c["id"]: c["series"] for c in again.state["charts"]["rounds"]}
    lines = (here.world.root / "run/rounds.csv").read_text().splitlines()[1:]
    seconds = [float(line.split(",")[1]) for line in lines]
    found = unpack(charts["seconds"]["Duration of a round"])[0]
    np.testing.assert_allclose(found, seconds, atol=1e-4 + max(seconds) / 60000)
    received = unpack(charts["bytes"]["from learners"])[0].sum()
    assert received == pytest.approx(here.metrics.counted("message_received_bytes"), rel=1e-3)


def test_a_server_that_goes_on_shows_the_rounds_before(here):
    here.go(3)
    here.open_page()
    reader = Reader(here.page)
    assert reader.beside["rounds done"] == "3 of 6"
    assert reader.points["seconds"] == [1, 2, 3]
    here.go(5)
    here.later()
    reader.catch_up()
    assert reader.points["answered"] == [1, 2, 3, 4, 5]


def test_a_round_that_was_listed_before_a_kill_and_is_done_again_is_shown_once(here):
    here.go(3)
    with (here.world.root / "run/rounds.csv").open("a") as file:
        file.write("3,0.5,3,\n")  # what a kill leaves between this line and the checkpoint
    here.open_page()
    reader = Reader(here.page)
    assert reader.points["seconds"] == [1, 2, 3]
    here.go(5)
    here.later()
    reader.catch_up()
    assert reader.points["seconds"] == Reader(here.page).points["seconds"] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("torn", ["3,0.5", "3", "3,0.5,2,\n4;0.2\n", "x,y,z,\n"])
def test_a_torn_line_of_rounds_stops_no_page(here, torn):
    here.go(3)
    with (here.world.root / "run/rounds.csv").open("a") as file:
        file.write(torn)
    report = federation_state(vs.Run(here.world.root / "run"))
    assert any("rounds.csv cannot be read" in notice for notice in report["notices"])
    page = LiveFederation(
        here.coordinator, here.metrics, here.world.root / "run", "/live", named=True, clock=here.clock
    )
    assert Reader(page).points["seconds"][:3] == [1, 2, 3]


def test_who_is_away_late_or_left_out_is_told_and_by_number_where_names_are_not(here):
    here.open_page(named=False)
    here.go(1)
    reader = Reader(here.page)
    assert set(reader.rows) == {"learner 1", "learner 2", "learner 3"}
    assert reader.state["absent"] == []
    began = time.time()
    here.world.stop("c")
    here.coordinator.void("b", "the director of clinic b has asked for it")
    here.go(2)
    here.later()
    reader.catch_up()
    assert reader.rows["learner 2"][0] == "void"
    assert reader.rows["learner 3"][0] == "away"
    (absent,) = reader.state["absent"]
    assert (absent["who"], absent["now"], absent["why"]) == ("learner 3", "has been away", "its connection ended")
    assert began <= absent["since"] <= time.time()
    assert reader.beside["void"] == "1"
    everything = here.page.html()[1].decode()
    assert "director" not in everything  # what the server's operator or a learner says stays there
    assert str(here.world.root) not in everything
    assert not any(f'"{name}"' in json.dumps(reader.state["results"]) for name in "abc")


def test_no_path_column_or_label_of_the_plan_is_on_the_page_or_in_events(here, monkeypatch):
    features = [{"name": "QX-column", "kind": "numeric", "low": 0.0, "high": 24.0}]
    data = {
        "kind": "table",
        "source": "/srv/QX-source/*.csv",
        "client": "QX-client",
        "time": "QX-time",
        "label": "QX-label",
        "labels": ["QX-no", "QX-yes"],
        "features": features,
    }
    secret = vs.Plan(
        name="clinics",
        learning={"rounds": 6, "learners": 3, "clip_norm": 0.625, "start": "/srv/QX-start.npz"},
        data=data,
        privacy={"epsilon": 4.0, "delta": 1e-3},
        telemetry={"metrics": ["accuracy"], "scale": 0.3125},
        methods=[{"name": "QX-method", "mechanism": "buffered", "step_size": 0.1}],
    )
    assert secret.to_toml().count("QX-") == 9
    monkeypatch.setattr(vs.Run, "plan", secret)
    here.open_page()
    reader = Reader(here.page)
    here.go(6)
    here.later()
    everything = here.page.html()[1].decode() + here.page.snapshot()[1].decode()
    everything += "".join(str(event.data) for event in here.page.feed.since(reader.id))
    assert reader.catch_up() > 0
    assert "QX-" not in everything
    assert "/srv" not in everything
    shown = tomllib.loads(reader.state["provenance"]["plan"])
    assert shown["learning"]["rounds"] == 6
    assert shown["learning"]["clip_norm"] == 0.625
    assert shown["privacy"]["epsilon"] == 4.0
    assert shown["telemetry"] | {"metrics": ["accuracy"], "scale": 0.3125} == shown["telemetry"]
    assert shown["methods"][0]["mechanism"] == "buffered"
    assert "data" not in shown


def test_a_new_epoch_is_named_with_its_round(here):
    here.go(2)
    reader = Reader(here.page)
    here.coordinator.fold.seats["a"].epoch = 1
    here.later()
    reader.catch_up()
    assert reader.rows["a"][3] == "1, new since round 2"
    assert reader.beside["in a new epoch"] == "1"


def test_what_does_not_change_is_not_told_and_changes_are_told_twice_a_second(here):
    here.go(1)
    here.later()
    reader = Reader(here.page)
    for _ in range(50):
        here.clock.now += 0.1
        here.page.standing(Standing(1, 6, (), ()))
    late = {"late"} | {"asked", "answered"}
    assert reader.catch_up() <= 2  # at most: the round has become overdue
    assert {row[0] for row in reader.rows.values()} <= late


def test_a_page_opens_with_the_models_quality_or_says_that_it_is_not_measured(here):
    head = Reader(here.page).state["headline"]
    assert "is not measured" in head["sentence"]
    assert '[telemetry] metrics = ["accuracy"]' in head["sentence"]
    assert head["figures"] == []
    here.coordinator.telemetry = SimpleNamespace(latest=[Estimate(10, "accuracy", 0.5, 0.4, 0.6, 4, 40, 0.0)])
    here.later()
    here.coordinator.telemetry.latest = [Estimate(20, "accuracy", 0.8, 0.75, 0.85, 4, 40, 0.0)]
    here.later()
    head = Reader(here.page).state["headline"]
    (figure,) = head["figures"]
    assert head["sentence"].startswith("Accuracy 0.800 ± 0.050 on the people met lately")
    assert figure["value"] == "0.800 ± 0.050"
    assert "rounds 17 to 20" in figure["label"]
    assert {each["label"]: each["value"] for each in figure["compared"]} == {
        "guessing among 2 labels": "0.500",
        "always the commonest label": "learners’ pages say",
        "after 10 rounds": "0.500 ± 0.100",
    }
    assert head["better"] is None  # better than guessing says nothing where one label is common
    here.coordinator.telemetry.latest = [Estimate(30, "accuracy", 0.3, 0.2, 0.4, 4, 40, 0.0)]
    here.later()
    assert Reader(here.page).state["headline"]["better"] is False


def test_private_telemetry_is_shown_as_its_file_grows(here):
    here.go(1)
    (here.world.root / "run/telemetry.csv").write_text(TELEMETRY)
    here.later()
    state = json.loads(here.page.snapshot()[1])
    (chart,) = state["charts"]["telemetry"]
    np.testing.assert_allclose(unpack(chart["series"]["accuracy"]["estimate"]), 0.5 + 0.03 * np.arange(12), atol=1e-4)
    assert [c["id"] for c in state["charts"]["rounds"]] == ["answered", "seconds", "bytes"]


def test_rounds_of_a_long_run_take_bounded_memory():
    rounds = ThinnedRounds(["a"], most=64)
    for r in range(1, 10_001):
        rounds.add(r, [float(r)])
    x, table = rounds.table()
    assert len(x) <= 65
    assert (x[0], x[-1]) == (1, 10_000)
    assert (np.diff(x)[:-1] == np.diff(x)[0]).all()
    np.testing.assert_array_equal(table["a"], x)
    assert rounds.recent("a", 3) == [9998.0, 9999.0, 10_000.0]


def test_a_simulations_page_has_every_seeds_losses_and_ends_as_the_report(tmp_path):
    plan = vs.Plan.parse(SMALL_PLAN)
    page = LiveSimulation(plan, "/live", clock := Clock())
    told = []

    def progressed(progress):
        clock.now += 2.0
        page.progressed(progress)
        told.append(progress.done)

    seen = {}

    def written(run):
        seen.update(json.loads(page.snapshot()[1]))
        page.written(run)

    run = simulate(
        plan,
        tmp_path / "out",
        on_prepared=page.prepared,
        on_baselines=page.compared,
        on_progress=progressed,
        on_solving=page.solved,
        on_written=written,
    )
    assert {"label": "done", "value": "100 %"} in seen["headline"]["beside"]
    majority = run.summary["baselines"]["majority"]
    always, last = f"always “{majority['label']}”", run.held_out_accuracy()[1]["tree"][:, -1].mean()
    assert seen["headline"]["figures"][0]["value"] == f"{last:.3f}"
    assert seen["headline"]["figures"][0]["compared"][0]["label"] == always
    assert seen["charts"]["learning"][0]["lines"][0]["label"] == always
    assert "regret is known for 2 of 2 seeds" in seen["notices"][1]
    charts = {c["id"]: c for c in seen["charts"]["learning"]}
    assert set(charts) == {"held-out", "loss"}
    assert charts["loss"]["x"] == list(range(1, 13))
    losses = run.history("loss")["tree"]
    so_far = np.cumsum(losses, axis=1) / np.arange(1, 13)
    np.testing.assert_allclose(unpack(charts["loss"]["series"]["tree"]), so_far, rtol=1e-3)
    _, held = run.held_out_accuracy()
    np.testing.assert_allclose(unpack(charts["held-out"]["series"]["free"]), held["free"], atol=1e-4)
    assert [m["name"] for m in seen["methods"]] == ["free", "tree"]
    assert page.feed.ended
    final = json.loads(page.snapshot()[1])
    assert final["results"]["main"] == run.summary["main_method"]
    assert told[-1] == 12


def test_processes_hand_over_what_they_measured(tmp_path):
    plan = vs.Plan.parse(SMALL_PLAN)
    found = {}

    def progressed(progress):
        news = progress.measured
        for place, seed in enumerate(news.seeds):
            for r in range(news.loss.shape[-1]):
                found[seed, news.first + r] = news.loss[1, place, r]

    run = simulate(plan, tmp_path / "out", processes=2, on_progress=progressed)
    losses = run.history("loss")["tree"]
    expected = {(s, r): losses[s, r] for s in range(2) for r in range(12)}
    assert found == pytest.approx(expected, rel=1e-6)
