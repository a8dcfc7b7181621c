"""A released model for other programs: JSON with names, safetensors, ONNX, or an MLflow registry."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from veilstream.errors import InputError, MissingExtra
from veilstream.files import write_file
from veilstream.learning.linear_tasks import Logistic, Poisson, Softmax
from veilstream.records.own_records import OwnRecords

if TYPE_CHECKING:
    from veilstream.runs.model import Model

SUFFIXES = {"npz": ".npz", "json": ".json", "safetensors": ".safetensors", "onnx": ".onnx"}


def export(model: Model, to: str, out: Path) -> None:
    """Write a model's file of this kind, one of `SUFFIXES`."""
    if to not in SUFFIXES:
        raise InputError("--to", to, f"one of {', '.join(SUFFIXES)}", "try json")
    if to == "npz":
        content: bytes | str = model.released.to_bytes()
    elif to == "json":
        content = json.dumps(as_json(model), indent=2, allow_nan=False) + "\n"
    elif to == "safetensors":
        content = _safetensors(model)
    else:
        from veilstream.runs.onnx_export import to_onnx

        content = to_onnx(model)
    write_file(out, content, shared=True)  # a released model is public


def as_json(model: Model) -> dict[str, Any]:
    """All that another program needs to predict with a linear model; of others, the numbers.

    A record's score is the sum of coefficients times features: each column of `encoding` becomes numbers (its `names`),
    then interactions are their products, then `bias` is 1, and all of them are multiplied by `scale`.
    """
    schema = model.schema
    told: dict[str, Any] = {**model.facts, "guarantee": model.released.guarantee, "predicts": _predicts(model)}
    if schema is not None and not isinstance(schema, OwnRecords):
        told["encoding"] = {
            "columns": [
                {"kind": type(feature).__name__.lower(), **dataclasses.asdict(feature), "names": list(feature.names)}
                for feature in schema.features
            ],
            "interactions": [list(pair) for pair in schema.interactions],
            "bias": schema.bias,
            "fit": schema.fit,
            "norm": schema.norm,
            "scale": schema.norm / schema.largest_norm if schema.fit == "scale" else None,
        }
    if model.linear:
        told["coefficients"] = model.coefficients
        told["coefficients_per_unit"] = model.coefficients_per_unit
    else:
        told["parameters"] = model.parameters.tolist()
    return told


def _predicts(model: Model) -> dict[str, Any]:
    """What a score means."""
    task, schema = model.task, model.schema
    label = None if schema is None else schema.label
    said: dict[str, Any] = {"column": None if label is None else label.name}
    if model.classes is not None:
        link = "logistic" if isinstance(task, Logistic) else "softmax" if isinstance(task, Softmax) else "own"
        return {**said, "labels": list(model.classes), "link": link}
    link = "exp" if isinstance(task, Poisson) else "linear" if model.linear else "own"
    if label is None:
        return {**said, "link": link}
    # A linear score from -1 to 1 lies in the range: low + (score + 1) / 2 * (high - low), cut to it.
    return {**said, "link": link, "low": label.low, "high": label.high}


def _safetensors(model: Model) -> bytes:
    try:
        from safetensors.numpy import save
    except ImportError as error:
        raise MissingExtra("safetensors", "export", "a file of safetensors") from error
    arrays = {"parameters": np.ascontiguousarray(model.parameters)}
    if model.linear:
        rows = int(getattr(model.task, "classes", 1))
        arrays["weights"] = np.ascontiguousarray(model.parameters.reshape(rows, -1))
    about = model.facts | {"guarantee": json.dumps(model.released.guarantee, allow_nan=False)}
    if model.feature_names is not None:
        about["feature_names"] = json.dumps(model.feature_names)
    if model.classes is not None:
        about["classes"] = json.dumps(model.classes)
    return bytes(save(arrays, metadata=about))
