"""The index by step: every client once, in its step, and readable with the epoch's secret alone."""

from __future__ import annotations

import stat
import tracemalloc

import numpy as np
import pytest

from veilstream.deployment.step_index import (
    PAGE_RECORDS,
    Contents,
    IndexWriter,
    Rows,
    StepIndex,
    index_folder,
    remove_index,
)
from veilstream.errors import LedgerError

SECRET = bytes(range(32))


def rows_of(generator: np.random.Generator, count: int, shape: tuple[int, ...]) -> Rows:
    features = generator.normal(size=(count, *shape)).astype(np.float32)
    return Rows(features, generator.normal(size=count), generator.random(count) < 0.9)


def written(store, count: int, steps: int, *, shape=(3,), at_once: int = 700, twice: int = 0):
    """An index of random records, and what each step should hold: by tag, the first row."""
    generator = np.random.default_rng(count + steps)
    tags = [generator.bytes(32) for _ in range(count)]
    chosen = generator.integers(steps, size=count)
    places = [*range(count), *generator.integers(count, size=twice).tolist()]
    rows = rows_of(generator, len(places), shape)
    expected: dict[int, dict[bytes, int]] = {step: {} for step in range(steps)}
    writer = IndexWriter(store, SECRET, steps, shape)
    for first in range(0, len(places), at_once):
        some = places[first : first + at_once]
        part = slice(first, first + len(some))
        writer.add([tags[place] for place in some], chosen[some], Rows(*(array[part] for array in rows)))
    for row, place in enumerate(places):
        expected[int(chosen[place])].setdefault(tags[place], row)
    index = writer.finish(Contents(epoch=0, steps=steps, shape=shape))
    return index, rows, expected


@pytest.mark.parametrize(
    ("count", "steps", "twice"), [(1, 1, 0), (5, 40, 3), (3000, 7, 500), (20_000, 300, 1000), (PAGE_RECORDS, 1, 0)]
)
def test_each_step_has_its_clients_once_with_their_first_rows(count, steps, twice, tmp_path):
    index, rows, expected = written(tmp_path / "s.db", count, steps, twice=twice)
    assert index.contents.records == count
    assert index.contents.again == twice
    unusable = 0
    for step in range(steps):
        pieces = list(index.pieces(step))
        wanted = [expected[step][tag] for tag in sorted(expected[step])]
        assert sum(len(piece.targets) for piece in pieces) == len(wanted)
        if wanted:
            features, targets, usable = (np.concatenate(each) for each in zip(*pieces, strict=True))
            np.testing.assert_array_equal(features, rows.features[wanted])
            np.testing.assert_array_equal(targets, rows.targets[wanted])
            np.testing.assert_array_equal(usable, rows.usable[wanted])
            unusable += int((~usable).sum())
    assert index.contents.unusable == unusable
    assert [tag for some in index.tags() for tag in some] == sorted(tag for each in expected.values() for tag in each)
    index.close()


def test_records_of_any_shape_come_back(tmp_path):
    index, rows, expected = written(tmp_path / "s.db", 60, 2, shape=(4, 5))
    (piece,) = index.pieces(1)
    np.testing.assert_array_equal(piece.features, rows.features[[expected[1][tag] for tag in sorted(expected[1])]])


def test_only_its_owner_and_only_the_secret_can_read_it(tmp_path):
    store = tmp_path / "s.db"
    index, rows, _ = written(store, 2000, 50)
    index.close()
    folder = index_folder(store)
    assert [path.name for path in folder.iterdir()] == ["records"]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "records").stat().st_mode) == 0o600
    content = (folder / "records").read_bytes()
    assert not any(row.tobytes() in content for row in rows.features[:200])
    assert b"steps" not in content
    with pytest.raises(LedgerError, match="damaged, or belongs to another epoch"):
        StepIndex(store, bytes(32))


def test_two_indexes_of_one_secret_share_no_key(tmp_path):
    """Else the difference of two of them would be the difference of their records."""
    one, *_ = written(tmp_path / "one.db", 500, 5)
    other, *_ = written(tmp_path / "other.db", 500, 5)
    contents = [np.frombuffer(index.path.read_bytes()[40:], np.uint8) for index in (one, other)]
    same = float((contents[0] == contents[1]).mean())
    assert same < 0.01  # 1/256 by chance, of some 24,000 bytes: 0.01 is beyond 15 deviations


@pytest.mark.parametrize("place", [3, 45, -30, -5])
def test_a_flipped_bit_is_found(place, tmp_path):
    store = tmp_path / "s.db"
    index, *_ = written(store, 3000, 4)
    index.close()
    content = bytearray(index.path.read_bytes())
    content[place] ^= 4
    index.path.write_bytes(content)
    with pytest.raises(LedgerError, match="damaged"):
        list(StepIndex(store, SECRET).pieces(0))


def test_what_an_interruption_left_goes_and_a_link_is_refused(tmp_path):
    store = tmp_path / "s.db"
    generator = np.random.default_rng(0)
    writer = IndexWriter(store, SECRET, 5, (200,))
    for _ in range(40):  # never finished, as after a kill
        writer.add([generator.bytes(32) for _ in range(700)], np.zeros(700, np.int64), rows_of(generator, 700, (200,)))
    assert any(path.name.startswith("part-") for path in index_folder(store).iterdir())
    index, *_ = written(store, 20, 5)
    assert [path.name for path in index_folder(store).iterdir()] == ["records"]
    index.close()
    remove_index(store)
    assert not index_folder(store).exists()
    index_folder(store).symlink_to(tmp_path)
    with pytest.raises(LedgerError, match="symbolic link"):
        IndexWriter(store, SECRET, 5, (3,))
    remove_index(store)
    assert tmp_path.exists()


@pytest.mark.slow
def test_memory_does_not_grow_with_the_records(tmp_path):
    """Ten times as many records, and less than twice the memory: parts and buffers, not the file."""
    peaks = []
    for count in (60_000, 600_000):
        store, generator = tmp_path / f"{count}.db", np.random.default_rng(1)
        tracemalloc.start()
        writer = IndexWriter(store, SECRET, 500, (20,))
        for _ in range(count // 1000):
            writer.add(
                [generator.bytes(32) for _ in range(1000)],
                generator.integers(500, size=1000),
                rows_of(generator, 1000, (20,)),
            )
        writer.finish(Contents(epoch=0, steps=500, shape=(20,))).close()
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 2 * peaks[0]
