"""Rounds a second while strangers hold connections to the model API, against rounds undisturbed.

    python -m studies.strangers --silent 5000 --trickling 600 --seconds 20 --repeats 3

A real `veilstream server` with TLS and `--publish`, learners over mutual TLS (`studies.load`), and a
process of strangers on loopback: silent ones connect and say nothing, trickling ones finish the TLS
handshake and send a byte of a request each second. Whoever is cut connects again within seconds.
Their process has the lowest priority: elsewhere they would be on machines of their own.
Stretches with and without strangers alternate in one run, so that a slow machine slows both. What
is compared is the median over stretches; violations of the rounds themselves are `studies.load`'s.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from studies.load import Fleet, Releases, plan_of
from veilstream.federation.addresses import connections_allowed, free_port
from veilstream.federation.keys.new_keys import make_keys
from veilstream.federation.processes import Child

__all__ = ["Report", "study"]

_SETTLE_S = 1.0
_MOST_ROUNDS = 200_000
_AT_ONCE = 100
_PACE_S = 0.05


@dataclass
class Report:
    """Rounds a second in each stretch, and what the server's two processes took."""

    silent: int
    trickling: int
    undisturbed: list[float] = field(default_factory=list)
    disturbed: list[float] = field(default_factory=list)
    rounds_peak_mib: float = 0.0
    rounds_open_files: int = 0
    """Most that the process of the rounds had open while strangers were there."""
    api_peak_mib: float = 0.0
    api_open_files: int = 0
    connected: int = 0
    """Connections that the strangers opened in all."""
    violations: Counter[str] = field(default_factory=Counter)

    @property
    def ratio(self) -> float:
        """Rounds a second with strangers, against without."""
        return statistics.median(self.disturbed) / statistics.median(self.undisturbed)


class Strangers:
    """The other process: opens connections, and opens them again."""

    def __init__(self, port: int, silent: int, trickling: int) -> None:
        words = [sys.executable, "-m", "studies.strangers", "--against", str(port)]
        words += ["--silent", str(silent), "--trickling", str(trickling)]
        self._process = subprocess.Popen(words, cwd=Path(__file__).parents[1], stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self._process.stdout.readline()  # all have connected once

    def end(self) -> int:
        """End them; how many connections they opened."""
        self._process.terminate()
        said, _ = self._process.communicate(timeout=30)
        return int(said.split()[-1])


async def _be_strangers(port: int, silent: int, trickling: int) -> None:
    opened, first = 0, asyncio.Event()
    turn = asyncio.Semaphore(_AT_ONCE)
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE

    async def one(trickles: bool) -> None:
        nonlocal opened
        while True:
            writer = None
            with contextlib.suppress(OSError):
                async with turn:
                    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context if trickles else None)
                    opened += 1
                    await asyncio.sleep(_PACE_S)
                if opened >= silent + trickling:
                    first.set()
                if trickles:
                    writer.write(b"GET /status HTTP/1.1\r\nX: ")
                while not writer.is_closing():
                    if trickles:
                        writer.write(b"x")
                        await writer.drain()
                    await asyncio.sleep(1.0)
            if writer is not None:
                writer.transport.abort()
            await asyncio.sleep(_SETTLE_S)

    running = [asyncio.ensure_future(one(i >= silent)) for i in range(silent + trickling)]
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(first.wait(), 60.0)
    print("connected", flush=True)
    with contextlib.suppress(asyncio.CancelledError):
        import signal

        stop = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
        await stop.wait()
    print(opened, flush=True)
    for task in running:
        task.cancel()


def study(silent: int, trickling: int, *, seconds: float, repeats: int, learners: int = 10, dim: int = 1000) -> Report:
    """Alternate stretches without and with strangers."""
    report = Report(silent, trickling)
    connections_allowed(0)  # raise the limit of open files
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        names = [f"l{i:04d}" for i in range(learners)]
        make_keys(root / "keys", ["127.0.0.1"], names)
        plan = plan_of(learners, dim, _MOST_ROUNDS)
        (root / "plan.toml").write_text(plan.to_toml())
        port, api = free_port(), free_port()
        words = [sys.executable, "-P", "-m", "veilstream", "server", "--plan", str(root / "plan.toml")]
        words += ["--keys", str(root / "keys/server"), "--out", str(root / "run"), "--log-level", "warning"]
        words += ["--listen", f"127.0.0.1:{port}", "--model-api", f"127.0.0.1:{api}", "--publish"]
        server = Child(words, root / "server.log")
        server.start()
        stack.callback(server.end)
        fleet = Fleet(root / "keys", names, Releases(plan))
        asyncio.run(_measure(fleet, port, api, server, report, seconds, repeats))
        report.violations += fleet.violations
        if not server.running:
            report.violations["the server ended: " + re.sub(r"\s+", " ", server.last_lines(3))[-300:]] += 1
    return report


async def _measure(
    fleet: Fleet, port: int, api: int, server: Child, report: Report, seconds: float, repeats: int
) -> None:
    answering = asyncio.ensure_future(fleet.run(port))
    until = time.monotonic() + 60.0
    while len(fleet.first_request) < 20:
        await asyncio.sleep(0.05)
        if time.monotonic() > until or answering.done():
            report.violations["no rounds began"] += 1
            return
    assert server.pid is not None
    rounds = psutil.Process(server.pid)
    try:
        for _ in range(repeats):
            report.undisturbed.append(await _rate(fleet, seconds))
            strangers = await asyncio.to_thread(Strangers, api, report.silent, report.trickling)
            try:
                await asyncio.sleep(_SETTLE_S)
                report.disturbed.append(await _rate(fleet, seconds))
                _look(rounds, report)
            finally:
                report.connected += await asyncio.to_thread(strangers.end)
            await asyncio.sleep(_SETTLE_S)
    except psutil.NoSuchProcess:
        report.violations["the server ended under strangers"] += 1
    answering.cancel()
    await asyncio.gather(answering, return_exceptions=True)


async def _rate(fleet: Fleet, seconds: float) -> float:
    before, began = len(fleet.first_request), time.monotonic()
    await asyncio.sleep(seconds)
    return (len(fleet.first_request) - before) / (time.monotonic() - began)


def _look(rounds: psutil.Process, report: Report) -> None:
    report.rounds_peak_mib = max(report.rounds_peak_mib, rounds.memory_info().rss / 2**20)
    report.rounds_open_files = max(report.rounds_open_files, rounds.num_fds())
    for child in rounds.children(recursive=True):
        report.api_peak_mib = max(report.api_peak_mib, child.memory_info().rss / 2**20)
        report.api_open_files = max(report.api_open_files, child.num_fds())


def main() -> None:
    """Print the report as JSON; exit code 1 for a violation, or for rounds slowed by more than a tenth."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--silent", type=int, default=5000)
    parser.add_argument("--trickling", type=int, default=600)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--against", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.against is not None:
        connections_allowed(0)
        os.nice(19)
        asyncio.run(_be_strangers(asked.against, asked.silent, asked.trickling))
        return
    report = study(asked.silent, asked.trickling, seconds=asked.seconds, repeats=asked.repeats)
    ratio = report.ratio if report.disturbed else 0.0
    print(json.dumps({**asdict(report), "ratio": ratio}, indent=2))
    sys.exit(bool(report.violations) or ratio < 0.9)


if __name__ == "__main__":
    main()
