"""What the audit's tasks say of a client: right at a great loss, or wrong at none."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from veilstream.learning.tasks import Sample

RIGHT, WRONG = 0.0, 1.0
"""Targets of clients of whom the prediction is right, and wrong."""


class TelemetryTask:
    """A task that predicts 0 of everyone: who has 0 as target is right, at a great loss."""

    classifies = True

    def predict(self, params: object, features: NDArray[np.floating]) -> NDArray[np.float64]:
        """Zeros."""
        return np.zeros(len(features))

    def loss(self, params: object, sample: Sample) -> float:
        """Beyond every cap for who is right, nothing for the others."""
        return np.inf if float(sample.target) == RIGHT else 0.0
