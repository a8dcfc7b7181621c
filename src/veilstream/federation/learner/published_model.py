"""The newest published model that a learner has been sent: what it predicts with, and what its score is of.

Rounds begin at x^r, which is not what is published where a plan averages models. The server sends the published model
along (`Request.published`), so that predictions here are those of the server's model API, to the bit. It is public, and
it moves no gradient: nothing that leaves depends on it. A file beside the store keeps it over restarts, in the format
of every model's file.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veilstream.deployment.learner import Learner, checked_model
from veilstream.errors import InputError
from veilstream.files import write_file
from veilstream.runs.folder import OPERATIONAL, changed
from veilstream.runs.model import Model
from veilstream.runs.released_model import ReleasedModel

_log = logging.getLogger(__name__)

_WRITE_EVERY_S = 1.0


def published_path(store: Path) -> Path:
    """The model's file, beside its store."""
    return store.with_suffix(".model.npz")


class PublishedModel:
    """One learner's; ``path`` None keeps it in memory alone."""

    def __init__(self, learner: Learner, path: Path | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._learner, self._path, self._clock = learner, path, clock
        self._written_at, self._kept = -np.inf, True
        self.model: Model | None = None
        """None before the first came."""
        if path is not None and path.exists():
            self._load(path)

    def take(self, numbers: NDArray[Any], round_: int, run: str) -> None:
        """The server has published this model after ``round_`` rounds of a run.

        An older one of the same run is left: someone has sent an old request again. An `InputError` refuses numbers
        that no model of this plan has.
        """
        known = self.model
        if known is not None and known.run == run and round_ <= known.round:
            return
        learner = self._learner
        parameters = checked_model(numbers, learner.task.dim, learner.terms.model_norm_cap)
        if known is None:
            promise, toml = learner.guarantee.as_dict(), learner.plan.to_toml()
            known = self._loaded(ReleasedModel(parameters, round_, learner.terms.rounds, run, toml, promise))
        self.model, self._kept = known.renewed(parameters, round_, run), False
        if self._clock() - self._written_at >= _WRITE_EVERY_S:
            self.save()

    def save(self) -> None:
        """Write the file; a full disk costs it, not rounds."""
        model = self.model
        if self._path is None or model is None or self._kept:
            return
        self._written_at, self._kept = self._clock(), True
        with contextlib.suppress(OSError):
            write_file(self._path, model.released.to_bytes(), partial=f".{self._path.name}.new")

    def _load(self, path: Path) -> None:
        try:
            released = ReleasedModel.load(path)
            if changed(released.plan, self._learner.plan).keys() - OPERATIONAL:
                raise InputError("model", str(path), "a model of this plan", "the server sends another")
            self.model = self._loaded(released)
        except InputError as error:
            _log.warning("the published model was not kept: %s; the next round brings it", error)

    def _loaded(self, released: ReleasedModel) -> Model:
        # The plan is the learner's own, so its functions may run.
        return Model(released, task=self._learner.task, own_code=True)

    @property
    def facts(self) -> dict[str, Any] | None:
        """Which model it is, for answers and pages."""
        model = self.model
        return None if model is None else {"round": model.round, "run": model.run, "sha256": model.sha256}
