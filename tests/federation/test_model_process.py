"""The model API as a process of its own: what it serves, and that its end is not the server's."""

from __future__ import annotations

import os
import signal
from contextlib import closing
from types import SimpleNamespace

import numpy as np
import pytest

from tests.support.federation import Lines, World, plan_of, wait_for
from veilstream.errors import InputError
from veilstream.federation.server.model_process import ModelProcess
from veilstream.federation.server.server_metrics import CountedTransport, ServerMetrics
from veilstream.http_client import send_request
from veilstream.runs.model_download import fetch_model


@pytest.fixture
def world(tmp_path):
    with World(tmp_path, plan_of()).start_all() as world:
        metrics, coordinator = ServerMetrics(), world.coordinator()
        transport = CountedTransport(world.transport(), metrics)
        coordinator.go(transport, 2)
        yield SimpleNamespace(
            plan=world.plan,
            coordinator=coordinator,
            transport=transport,
            metrics=metrics,
            keys=tmp_path / "keys/server",
        )


def published(world) -> ModelProcess:
    tls = (world.keys / "tls.pem", world.keys / "tls.key")
    return ModelProcess(world.coordinator, world.plan, ("127.0.0.1", 0), tls, metrics=world.metrics)


def latest(world, api) -> int:
    return fetch_model(f"https://127.0.0.1:{api.port}", ca=world.keys / "ca.pem").round


def test_another_process_serves_each_model_as_it_is_released(world):
    with closing(published(world)) as api:
        assert api.pid not in (None, os.getpid())
        assert latest(world, api) == 2
        world.coordinator.go(world.transport, 3)
        api.tell()
        wait_for(lambda: latest(world, api) == 3)
        model = fetch_model(f"https://127.0.0.1:{api.port}/model/3", ca=world.keys / "ca.pem")
        np.testing.assert_array_equal(model.model, world.coordinator.models.read(3))
        pid = api.pid
    assert pid is not None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_killed_model_api_ends_no_round_is_said_and_comes_back(world):
    lines = Lines("veilstream.federation.server.model_process")
    with closing(published(world)) as api:
        first = api.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        world.coordinator.go(world.transport, 4)
        assert world.coordinator.round == 4
        wait_for(lambda: api.pid not in (None, first), 20)
        wait_for(lambda: latest(world, api) == 4, 20)
    lines.end()
    assert any("rounds go on" in line for line in lines)


def test_metrics_of_both_processes_are_one_page(world):
    with closing(published(world)) as api:
        latest(world, api)
        answer = send_request(f"https://127.0.0.1:{api.port}/metrics", ca=world.keys / "ca.pem", most_bytes=1 << 20)
        text = answer.body.decode()
    for line in (
        "veilstream_rounds_done 2.0",
        "veilstream_model_requests_total 1.0",
        "veilstream_model_api_connections ",
    ):
        assert line in text


def test_an_address_that_is_taken_is_named(world):
    with closing(published(world)) as api, pytest.raises(InputError, match="--model-api"):
        ModelProcess(world.coordinator, world.plan, ("127.0.0.1", api.port), metrics=world.metrics)
