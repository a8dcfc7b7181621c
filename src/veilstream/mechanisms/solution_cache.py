"""Solutions that took long to find, one file per recipe in the user's cache directory, or `VEILSTREAM_CACHE`.

Files are written whole. Loading checks digest, recipe and shapes, and rebuilds a file that fails, with
a notice. Privacy does not rest on them: sensitivity is computed from the program that runs.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import warnings
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from veilstream.directories import user_directory
from veilstream.errors import MissingExtra
from veilstream.files import write_file
from veilstream.mechanisms.blas import one_blas_thread

Floats = NDArray[np.float64]
Recipe = Mapping[str, object]

_DIGEST_BYTES = 32


class CacheNotice(UserWarning):
    """The cache could not be used; the result is still right."""


def cache_directory() -> Path:
    """Directory of the solutions."""
    return user_directory("cache")


def load_or_solve(
    recipe: Recipe, dimensions: Mapping[str, int], solve: Callable[[], dict[str, Floats]], *, use: bool = True
) -> dict[str, Floats]:
    """The arrays of this recipe, from disk or freshly solved and then stored.

    A learner's store keeps to the numbers of its program to the last bit, so all processes of a
    machine must get the same: BLAS works with one thread (how it splits a sum shows in the last
    bits, and a minimiser makes that larger), and of several that solve at once the first to finish
    counts.
    """
    if not use:
        with _one_thread_if_possible():
            return solve()
    name = json.dumps(recipe, sort_keys=True)
    digest = hashlib.sha256(name.encode()).hexdigest()[:16]
    path = cache_directory() / f"{recipe['mechanism']}-{recipe['horizon']}-{digest}.npz"
    if os.path.exists(path):  # noqa: PTH110 - False, not an error, where the way is barred
        try:
            return _read(path, name, dimensions)
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            warnings.warn(f"cache file {path} is damaged ({error}); rebuilding it", CacheNotice, stacklevel=3)
    with _one_thread_if_possible():
        arrays = solve()
    with contextlib.suppress(OSError, ValueError, KeyError, zipfile.BadZipFile):
        return _read(path, name, dimensions)  # someone else was faster
    try:
        _write(path, name, arrays)
    except OSError as error:
        warnings.warn(f"could not write cache file {path} ({error}); going on without it", CacheNotice, stacklevel=3)
    return arrays


def _one_thread_if_possible() -> contextlib.AbstractContextManager[object]:
    try:
        return one_blas_thread()
    except MissingExtra:
        return contextlib.nullcontext()


def _read(path: Path, name: str, dimensions: Mapping[str, int]) -> dict[str, Floats]:
    content = path.read_bytes()
    digest, payload = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    if hashlib.sha256(payload).digest() != digest:
        raise ValueError("digest does not match")
    with np.load(io.BytesIO(payload), allow_pickle=False) as stored:
        if str(stored["recipe"]) != name:
            raise ValueError("made for another recipe")
        arrays = {key: np.asarray(stored[key], dtype=np.float64) for key in dimensions}
    for key, dimension in dimensions.items():
        if arrays[key].ndim != dimension or not np.isfinite(arrays[key]).all():
            raise ValueError(f"{key} is malformed")
    return arrays


def _write(path: Path, name: str, arrays: Mapping[str, Floats]) -> None:
    buffer = io.BytesIO()
    contents = {"recipe": np.array(name), **arrays}
    np.savez(buffer, **contents)  # type: ignore[arg-type]
    payload = buffer.getvalue()
    write_file(path, hashlib.sha256(payload).digest() + payload)
