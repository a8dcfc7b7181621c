"""The cache: atomic, validated, safe between processes, and never trusted with privacy."""

from __future__ import annotations

import io
import multiprocessing
import sys
import warnings

import numpy as np
import platformdirs
import pytest

import veilstream.mechanisms as m
from veilstream.errors import MissingExtra
from veilstream.mechanisms import solution_cache
from veilstream.mechanisms.solution_cache import CacheNotice, cache_directory


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VEILSTREAM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("name", ["optimal", "buffered"])
def test_second_call_reads_what_the_first_wrote(name, cache, monkeypatch):
    first = m.build(name, 40)
    assert [p.suffix for p in cache.iterdir()] == [".npz"]

    def must_not_solve(*_, **__):
        raise AssertionError("solved again")

    # The functions have their modules' names, so the modules are reached by sys.modules.
    monkeypatch.setattr(sys.modules["veilstream.mechanisms.optimal"], "solve", must_not_solve)
    monkeypatch.setattr(sys.modules["veilstream.mechanisms.buffered"], "_tune", must_not_solve)
    second = m.build(name, 40)
    np.testing.assert_array_equal(first.noising_matrix(), second.noising_matrix())


@pytest.mark.parametrize("damage", ["empty", "short", "flipped", "text", "other"])
def test_damaged_file_is_rebuilt_with_a_notice(damage, cache):
    good = m.optimal(30)
    (path,) = cache.iterdir()
    content = path.read_bytes()
    if damage == "other":
        m.optimal(31)
        (other,) = set(cache.iterdir()) - {path}
        path.write_bytes(other.read_bytes())
    else:
        path.write_bytes(
            {
                "empty": b"",
                "short": content[: len(content) // 2],
                "flipped": content[:900] + bytes([content[900] ^ 1]) + content[901:],
                "text": b"not a cache file",
            }[damage]
        )
    with pytest.warns(CacheNotice, match="damaged"):
        again = m.optimal(30)
    assert again.mean_error() == good.mean_error()
    assert path.read_bytes() == content
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        m.optimal(30)


def test_forged_solution_cannot_weaken_the_guarantee(cache):
    """A well-formed file with other numbers changes the noise, and the sensitivity with it."""
    honest = m.optimal(16)
    (path,) = cache.iterdir()
    with np.load(io.BytesIO(path.read_bytes()[32:])) as stored:
        arrays = {key: stored[key] for key in stored.files}
    name = str(arrays.pop("recipe"))
    solution_cache._write(path, name, arrays | {"feed": arrays["feed"] * 0.1})
    forged = m.optimal(16)
    C = forged.strategy_matrix()
    assert forged.sensitivity() == pytest.approx(np.linalg.norm(C, axis=0).max())
    assert forged.sensitivity() > 5 * honest.sensitivity()


def test_unwritable_directory_only_costs_time(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    monkeypatch.setenv("VEILSTREAM_CACHE", str(blocked / "cache"))
    with pytest.warns(CacheNotice, match="could not write"):
        f = m.optimal(12)
    assert f.duality_gap < 1e-6


def test_failed_write_leaves_nothing_behind(cache, monkeypatch):
    def full_disk(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.warns(CacheNotice, match="No space left"):
        m.optimal(10)
    assert list(cache.iterdir()) == []


def _solve_and_report(T: int) -> float:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return m.optimal(T).mean_error()


def test_concurrent_processes_agree(cache):
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        values = pool.map(_solve_and_report, [50] * 8)
    assert len(set(values)) == 1
    assert len(list(cache.iterdir())) == 1


def test_cache_can_be_left_alone(cache):
    m.optimal(20, cache=False)
    m.buffered(20, cache=False)
    assert not cache.exists()


def test_default_directory_is_the_users(monkeypatch, tmp_path):
    monkeypatch.delenv("VEILSTREAM_CACHE")
    monkeypatch.setattr(platformdirs, "user_cache_path", lambda *_: tmp_path / "of the user")
    assert cache_directory() == tmp_path / "of the user"
    monkeypatch.setenv("VEILSTREAM_CACHE", str(tmp_path / "mine"))
    assert cache_directory() == tmp_path / "mine"


@pytest.mark.skipif(sys.platform != "linux", reason="XDG directories are for Linux")
def test_on_linux_the_directory_follows_xdg(monkeypatch, tmp_path):
    monkeypatch.delenv("VEILSTREAM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory() == tmp_path / "veilstream"


def test_without_platformdirs_the_way_out_is_named(monkeypatch):
    monkeypatch.delenv("VEILSTREAM_CACHE")
    monkeypatch.setitem(sys.modules, "platformdirs", None)
    with pytest.raises(MissingExtra, match=r"VEILSTREAM_CACHE.*platformdirs"):
        cache_directory()


def test_of_several_that_solve_at_once_the_first_to_finish_counts(cache):
    """Learners keep to their program to the last bit: a machine must not have two of one recipe."""
    recipe = {"mechanism": "made-up", "version": 1, "horizon": 3}

    def slow():
        solution_cache.load_or_solve(recipe, {"a": 1}, lambda: {"a": np.array([1.0, 2.0])})
        return {"a": np.array([1.0, 2.0 + 1e-12])}

    found = solution_cache.load_or_solve(recipe, {"a": 1}, slow)
    assert found["a"].tolist() == [1.0, 2.0]


def test_solving_has_one_thread(cache):
    """More would split sums in ways that show in the last bits."""
    from threadpoolctl import threadpool_info

    def threads():
        return {info["num_threads"] for info in threadpool_info() if info["user_api"] == "blas"}

    seen = []
    recipe = {"mechanism": "made-up", "version": 1, "horizon": 4}
    solution_cache.load_or_solve(recipe, {"a": 1}, lambda: seen.append(threads()) or {"a": np.zeros(1)})
    assert seen == [{1}]
