"""Secrets that a test chooses, for learners that must do the same twice or must do wrong.

The guard that looks at where secrets come from (`veilstream.privacy.seeds`) would refuse most of
them before any noise is made; it is taken away with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

from veilstream.deployment import learner as learner_module


def unguarded(draw: Callable[[], bytes]) -> None:
    """In place of the guard."""


@contextmanager
def known_secrets(draw: Callable[[], bytes]) -> Iterator[None]:
    """Every learner draws its steps' secrets here."""
    with (
        patch.object(learner_module, "fresh_secret", draw),
        patch.object(learner_module, "check_generator_once", unguarded),
    ):
        yield
