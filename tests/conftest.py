"""Shared by all tests: a cache directory of their own, kinds of tests, what did not run."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

WORKER = "PYTEST_XDIST_WORKER" in os.environ

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if WORKER:  # as many workers as cores: libraries that also want all of them would only wait
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")

KINDS = ("process", "engine", "browser")  # folders of that name; all else is unit
# Long files go to the workers first, so that short ones fill the gap at the end.
LONG_FIRST = ("engine", "audit", "conformance", "federation", "process", "simulation")


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each test its kind, and a file's tests to one worker: they share what they set up.

    Engines start servers and job runners and wait for them by the clock; no two do at a time.
    """
    folders = {}
    for item in items:
        folder = item.path.relative_to(Path(__file__).parent).parts[0]
        folders[item] = folder
        kinds = [kind for kind in KINDS if item.get_closest_marker(kind)]
        if not kinds:
            kinds = [folder if folder in KINDS else "unit"]
            item.add_marker(kinds[0])
        if WORKER and item.get_closest_marker("xdist_group") is None:
            shared = "engine" if "engine" in kinds else str(item.path)
            item.add_marker(pytest.mark.xdist_group(shared))
    rank = {folder: place for place, folder in enumerate(LONG_FIRST)}
    items.sort(key=lambda item: rank.get(folders[item], len(rank)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The last lines: what did not run, and why."""
    skipped = Counter()
    for report in terminalreporter.stats.get("skipped", []):
        why = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        skipped[why.removeprefix("Skipped: ")] += 1
    terminalreporter.section("did not run")
    for why, count in sorted(skipped.items()):
        terminalreporter.line(f"{count:5} skipped: {why}")
    if terminalreporter.config.option.markexpr == "not slow":
        terminalreporter.line("      slow tests: ./test --slow runs them")
    elif not skipped:
        terminalreporter.line("      nothing")


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory):
    """Solutions are solved and cached once a session, never read from the user's directory."""
    base = tmp_path_factory.getbasetemp()
    cache = (base.parent if WORKER else base) / "cache"  # one for all workers
    cache.mkdir(exist_ok=True)
    os.environ["VEILSTREAM_CACHE"] = str(cache)
    return os.environ["VEILSTREAM_CACHE"]


@pytest.fixture(scope="session")
def mnist() -> Path:
    """Where MNIST is: in the user's data directory, fetched into it if it can be."""
    from veilstream.errors import VeilstreamError
    from veilstream.streams.mnist import mnist_directory, mnist_problems
    from veilstream.streams.mnist_sources import get_mnist

    place = mnist_directory()
    if mnist_problems(place):
        try:
            get_mnist()
        except VeilstreamError as error:
            pytest.skip(f"MNIST is not here and cannot be fetched: {error}")
    return place
