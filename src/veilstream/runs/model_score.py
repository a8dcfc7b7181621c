"""How good a model's predictions are on rows that have the label, beside a prediction that needs no model."""

from __future__ import annotations

from typing import Any

import numpy as np

from veilstream.learning.quality import label_quality, number_quality
from veilstream.runs.model import Model, Predictions


def score(model: Model, found: Predictions) -> dict[str, Any] | None:
    """Figures of the rows that can be used and have a label; None where there are none.

    The baseline knows the file: it names the file's own commonest label, or its mean.
    """
    known = found.rows.targets
    if known is None:
        return None
    truth = known[found.rows.usable]
    labelled = np.isfinite(truth)
    if not labelled.any():
        return None
    truth, said = truth[labelled], found.targets[labelled]
    rows = len(truth)
    if model.classes is None:
        assert model.schema is not None
        in_units = model.schema.label.numbers_in_units
        numbers, mean = in_units(truth), in_units(truth).mean()
        quality = number_quality(numbers, in_units(said))
        baseline = number_quality(numbers, np.full(rows, mean))
        return {
            "rows": rows,
            "label": model.schema.label.name,
            "rmse": quality.rmse,
            "r2": quality.r2,
            "baseline": {"mean": float(mean), "rmse": baseline.rmse},
        }
    classes = model.classes
    places = model.places(truth)
    logits = None if found.logits is None else found.logits[labelled]
    quality_ = label_quality(places, model.places(said), len(classes), logits)
    counts = np.bincount(places, minlength=len(classes))
    assert model.schema is not None
    return {
        "rows": rows,
        "label": model.schema.label.name,
        "accuracy": quality_.accuracy,
        "balanced_accuracy": quality_.balanced_accuracy,
        "auc": quality_.auc,
        "log_loss": quality_.log_loss,
        "recall": dict(zip(classes, quality_.recall, strict=True)),
        "confusion": {"labels": list(classes), "counts": quality_.confusion.tolist()},
        "baseline": {
            "label": classes[int(counts.argmax())],
            "accuracy": float(counts.max() / rows),
            "balanced_accuracy": 1.0 / int((counts > 0).sum()),
        },
    }
