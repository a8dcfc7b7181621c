"""Shared by all tests: a cache directory of their own, kinds of tests, what did not run."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# No example has a time limit: on a busy machine that tells of the machine alone.
hypothesis.settings.register_profile("veilstream", deadline=None)
hypothesis.settings.load_profile("veilstream")

WORKER = "PYTEST_XDIST_WORKER" in os.environ

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# What one test has compiled, others need not: workers and the commands that tests start share it.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    COMPILED = tempfile.TemporaryDirectory(prefix="veilstream-compiled-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = COMPILED.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
if WORKER:  # as many workers as cores: libraries that also want all of them would only wait
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")

ENGINES = ("tests/engine/", "tests/process/test_chaos.py")
KINDS = ("process", "engine", "browser")  # folders of that name; all else is unit
# The wider suite, which only `./test --all` runs: a test in one of these that every change needs is marked `quick`.
ALL = (
    "tests/engine/",  # frameworks
    "tests/browser/",
    "tests/audit/test_mutations.py",
    "tests/audit/test_whole_audit.py::test_the_audit_says_what_is_wrong",
    "tests/audit/test_telemetry_audit.py::test_the_whole_audit_sees_what_is_wrong_with_telemetrys_coordinates",
    "tests/cli/test_streams.py",  # figures
    "tests/cli/test_run.py::test_reproduce_smoke_shows_the_papers_order",
    "tests/deployment/test_private_model.py::test_rivers_own_checks_pass",
    "tests/learning/test_telemetry_estimates.py::test_bars_of_a_ratio_are_those_of_drawn_ratios",
    "tests/mechanisms/test_banded.py::test_long_horizons_have_an_exact_sensitivity",
    "tests/mechanisms/test_workload.py::test_buffers_tuned_for_a_workload_beat_those_for_prefix_sums",
    "tests/mechanisms/test_unbounded.py::TestPlans::test_unbounded_rounds_are_simulated",
    "tests/mechanisms/test_participation.py::test_bounds_for_long_horizons_are_safe_and_say_what_they_are",
    "tests/privacy/test_gradient_types.py::test_mypy_refuses_raw_and_clipped_gradients_in_a_release",
    "tests/process/test_deployed.py",
    "tests/process/test_federated_batches.py",
    "tests/simulation/test_attendance.py::test_the_study_in_small",
    "tests/simulation/test_drift_study.py",
    "tests/simulation/test_memory.py::test_a_block_on_the_device_takes_what_was_planned_for_it",
    "tests/cli/test_ten_minutes.py::test_from_a_clone",
    "tests/docs/test_site.py",
    "tests/docs/test_code_blocks.py::test_shell_runs_as_it_stands",
    "tests/docs/test_code_blocks.py::test_the_tutorial",
    "tests/federation/test_run_files.py::test_a_server_cut_off_at_any_write_goes_on_to_the_same_bits",
    "tests/mechanisms/test_references.py",
    "tests/mechanisms/test_participation.py::test_long_horizons_have_an_exact_sensitivity",
    "tests/mechanisms/test_workload.py::test_the_optimum_is_certified_by_a_dense_dual_bound",
    "tests/mechanisms/test_unbounded.py::test_the_study_in_small",
    "tests/plans/test_experiments.py",
    "tests/privacy/test_cell_attack.py",
    "tests/process/test_cells.py",
    "tests/reports/test_export.py",
    "tests/runs/test_export.py::test_a_registry",
    "tests/simulation/test_telemetry_study.py",
)
# Long files go to the workers first, so that short ones fill the gap at the end.
LONG_FIRST = ("engine", "docs", "plans", "audit", "conformance", "simulation", "process", "cli")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file's tests go to one worker: they share what they set up.

    Engines start servers and job runners and wait for them by the clock; no two do at a time.
    (Marks of xdist_group would say the same, but with pytest 9.2 xdist 3.8 does not see them.)
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.partition("::")[0]
            return "engines" if path.startswith(ENGINES) else path

    return ByFile(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each test its kind, and put long files first."""
    folders = {}
    for item in items:
        folder = item.path.relative_to(Path(__file__).parent).parts[0]
        folders[item] = folder
        if not any(item.get_closest_marker(kind) for kind in KINDS):
            item.add_marker(folder if folder in KINDS else "unit")
        if item.nodeid.startswith(ALL) and not item.get_closest_marker("quick"):
            item.add_marker("all")
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
    if "not all" in terminalreporter.config.option.markexpr:
        terminalreporter.line("      the wider suite: ./test --all runs it")
    if "not slow" in terminalreporter.config.option.markexpr:
        terminalreporter.line("      long studies: ./test --slow runs them")
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
    from veilstream.streams.datasets import dataset_directory, dataset_problems, get_dataset

    place = dataset_directory("mnist")
    if dataset_problems("mnist", place):
        try:
            get_dataset("mnist")
        except VeilstreamError as error:
            pytest.skip(f"MNIST is not here and cannot be fetched: {error}")
    return place
