"""Shared by all tests: a cache directory of their own, JAX on the CPU."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory):
    """Solutions are solved and cached once a session, never read from the user's directory."""
    os.environ["VEILSTREAM_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    return os.environ["VEILSTREAM_CACHE"]
