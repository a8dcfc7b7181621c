"""The Grafana dashboard asks for what the server's Prometheus text has, and shows all of it."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.support.federation import World, plan_of
from veilstream.federation.server.model_process import _Counts
from veilstream.federation.server.server_metrics import ServerMetrics

DASHBOARD = Path(__file__).parents[2] / "deploy/grafana/veilstream-server.json"


def expressions() -> list[str]:
    dashboard = json.loads(DASHBOARD.read_text())
    asked = [t["expr"] for panel in dashboard["panels"] for t in panel["targets"]]
    return asked + [v["query"]["query"] for v in dashboard["templating"]["list"] if isinstance(v["query"], dict)]


def named() -> set[str]:
    return set(re.findall(r"veilstream_\w+", " ".join(expressions())))


def test_every_metric_of_the_dashboard_is_in_the_servers_text(tmp_path):
    with World(tmp_path, plan_of(rounds=2, learners=1), names=("a",)).start_all() as world:
        coordinator = world.coordinator()
        coordinator.messages_refused["ProtocolError"] += 1
        coordinator.go(world.transport())
        counts = _Counts(ServerMetrics().text(coordinator))
        counts.refuse("handshake")
        text = counts.text(None)  # as the model API serves it
    samples = {re.match(r"\w+", line).group() for line in text.splitlines() if line[0] != "#"}
    families = set(re.findall(r"^# TYPE (\w+)", text, re.M))
    assert named() <= samples
    assert {n.removesuffix("_sum").removesuffix("_count") for n in named()} == families
    for label in set(re.findall(r"\{\{(\w+)\}\}", DASHBOARD.read_text())):
        assert f'{label}="' in text


def test_counters_are_asked_for_as_rates_and_panels_do_not_overlap():
    for expression in expressions():
        for name in re.findall(r"veilstream_\w+_total", expression):
            assert f"rate({name}" in expression
    taken = set()
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken
        assert panel["description"]
        taken |= cells
