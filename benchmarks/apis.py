"""How long a caller waits for an answer of the model API and of the learner API.

    python benchmarks/apis.py [--requests 200]

Sequential requests on one kept connection over loopback, with a model of 20 numbers: what is left
is HTTP, TLS and the server's own work. Prints milliseconds.
"""

from __future__ import annotations

import argparse
import http.client
import json
import ssl
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from veilstream.deployment.learner import Learner
from veilstream.federation.demo import demo_plan
from veilstream.federation.keys.identity import LearnerKeys, ServerKeys
from veilstream.federation.keys.new_keys import make_keys
from veilstream.federation.learner.daemon import Daemon
from veilstream.federation.learner.learner_api import LearnerApi
from veilstream.federation.server.coordinator import Coordinator
from veilstream.federation.server.model_api import ModelApi
from veilstream.plans.tasks import task_of
from veilstream.streams.waiting_source import LiveSource

_TOKEN = "k" * 43


def timed(
    connection: http.client.HTTPConnection,
    count: int,
    method: str,
    path: str,
    body: str | None = None,
    headers: dict[str, str] | None = None,
) -> dict[str, float]:
    took = []
    for _ in range(count):
        began = time.perf_counter()
        connection.request(method, path, body, headers or {})
        connection.getresponse().read()
        took.append(1e3 * (time.perf_counter() - began))
    connection.close()
    took.sort()
    return {"p50_ms": statistics.median(took), "p99_ms": took[int(0.99 * (count - 1))]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=200)
    count = parser.parse_args().requests
    found = {}
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        make_keys(root / "keys", ["127.0.0.1"], ["a"])
        plan, server = demo_plan(1, 30), root / "keys/server"
        task, host = task_of(plan), "127.0.0.1"
        x0 = np.zeros(task.dim, np.float32)
        coordinator = Coordinator(plan, x0, ServerKeys.load(server), root / "run", task=task)
        api = ModelApi(coordinator, plan, (host, 0), (server / "tls.pem", server / "tls.key"))
        trust = ssl.create_default_context(cafile=str(server / "ca.pem"))
        secure = http.client.HTTPSConnection(host, api.port, context=trust)
        found["model API, TLS"] = timed(secure, count, "GET", "/model/latest")
        api.close()
        source = LiveSource(1.0)
        learner = Learner(plan, root / "a.db", task, create=True)
        daemon = Daemon(learner, LearnerKeys.load(root / "keys/learners/a"), source)
        beside = LearnerApi(daemon, source, (host, 0), _TOKEN)
        record = json.dumps({"client": "t", "features": [0.5] * plan.data.dim, "target": 1})
        headers = {"Authorization": f"Bearer {_TOKEN}", "Content-Type": "application/json"}
        plain = http.client.HTTPConnection(host, beside.port)
        found["learner API, between rounds"] = timed(plain, count, "POST", "/observe", record, headers)
        beside.close()
        daemon.close()
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
