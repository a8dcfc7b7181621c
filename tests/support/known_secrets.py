"""Secrets that a test chooses, for learners that must do the same twice or must do wrong.

The guard that looks at where secrets come from (`veilstream.privacy.seeds`) would refuse most of
them before any noise is made; it is taken away with them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

from veilstream.deployment import learner_epochs as learner_module
from veilstream.deployment.epochs import LearnerParts
from veilstream.deployment.learner import Learner
from veilstream.deployment.local_rounds import LocalRounds
from veilstream.mechanisms.keystream import Row


class NamedRounds(LocalRounds):
    """Whose draws follow from a name, the epoch and the step; secrets are stored and not used."""

    def __init__(self, terms, epoch: int, name: str) -> None:
        super().__init__(terms, epoch)
        self.name = name

    def row(self, step: int, secret: bytes) -> Row:
        text = f"{self.name}/{self.epoch}/{step}"
        return Row(hashlib.sha256(text.encode()).digest(), step)


class NamedLearner(Learner):
    """Whose noise follows from the step, so that two of them can be compared."""

    def __init__(self, *given, **more):
        super().__init__(*given, parts=LearnerParts(rounds=partial(NamedRounds, name="same")), **more)


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
