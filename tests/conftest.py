"""Shared by all tests: a cache directory of their own, JAX on the CPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory):
    """Solutions are solved and cached once a session, never read from the user's directory."""
    os.environ["VEILSTREAM_CACHE"] = str(tmp_path_factory.mktemp("cache"))
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
