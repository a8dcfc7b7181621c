"""A released model as an ONNX graph: from a table's columns to its prediction.

Inputs are the plan's columns, (rows, 1) each: numbers as doubles (an empty cell is NaN), texts as strings (an empty one
is ""). Where the plan hashes texts or names no columns, the one input is `features`, records that are encoded already.
Outputs are `label` and `probabilities`, or `prediction` in the label's own units and range. A row that the plan
refuses has the label "" and NaN. Sums are in double precision, as `veilstream.load` has them.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from veilstream.errors import InputError, MissingExtra
from veilstream.learning.cnn import Cnn
from veilstream.learning.linear_tasks import Logistic, Poisson
from veilstream.records.cells import MISSING_TEXTS, as_text
from veilstream.records.own_records import OwnRecords
from veilstream.records.schema import Categorical, Hashed, Numeric, RecordSchema

if TYPE_CHECKING:
    from veilstream.runs.model import Model

_OPSETS = {"": 18, "ai.onnx.ml": 3}


def to_onnx(model: Model) -> bytes:
    """The graph as bytes of an .onnx file; an `InputError` for a task that is neither linear nor the CNN."""
    try:
        import onnx
    except ImportError as error:
        raise MissingExtra("onnx", "export", "an ONNX graph") from error
    if not model.linear and not isinstance(model.task, Cnn):
        rule = "a linear model, or the task cnn"
        way_out = "the formats npz, json and safetensors take its numbers; a PyTorch model exports itself"
        raise InputError("--to", "onnx", rule, way_out)
    graph = _Graph()
    features, refused = _records(graph, model)
    if isinstance(model.task, Cnn):
        logits = _cnn(graph, features, model)
    else:
        weights = model.parameters.astype(np.float64).reshape(_rows(model), -1).T
        wide = graph.add("Cast", features, to=onnx.TensorProto.DOUBLE)
        logits = graph.add("MatMul", wide, graph.constant(weights))
    if model.classes is None:
        _number(graph, model, logits, refused)
    else:
        _label(graph, model, logits, refused)
    made = onnx.helper.make_graph(graph.nodes, "veilstream", graph.inputs, graph.outputs, graph.constants)
    opsets = [onnx.helper.make_opsetid(domain, version) for domain, version in _OPSETS.items()]
    whole = onnx.helper.make_model(made, opset_imports=opsets, ir_version=9, producer_name="veilstream")
    onnx.helper.set_model_props(whole, model.facts)
    onnx.checker.check_model(whole, full_check=True)
    return bytes(whole.SerializeToString())


class _Graph:
    """Nodes in order, constants, inputs and outputs."""

    def __init__(self) -> None:
        import onnx

        self._onnx = onnx
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self.inputs: list[Any] = []
        self.outputs: list[Any] = []

    def add(self, kind: str, *inputs: str, name: str | None = None, domain: str = "", **attributes: Any) -> str:
        """A node; returns what its output is called."""
        made = name or f"n{len(self.nodes)}"
        self.nodes.append(self._onnx.helper.make_node(kind, list(inputs), [made], domain=domain, **attributes))
        return made

    def constant(self, value: Any) -> str:
        """A constant, by its NumPy type."""
        name = f"c{len(self.constants)}"
        self.constants.append(self._onnx.numpy_helper.from_array(np.asarray(value), name))
        return name

    def input(self, name: str, kind: int, shape: list[Any]) -> str:
        """What a caller gives."""
        self.inputs.append(self._onnx.helper.make_tensor_value_info(name, kind, shape))
        return name

    def output(self, name: str, kind: int, shape: list[Any]) -> None:
        """What a caller gets."""
        self.outputs.append(self._onnx.helper.make_tensor_value_info(name, kind, shape))


def _records(graph: _Graph, model: Model) -> tuple[str, str | None]:
    """Encoded records, float32 (rows, numbers), and which rows are refused; None where none can be."""
    from onnx import TensorProto

    schema = model.schema
    if schema is None or isinstance(schema, OwnRecords) or any(isinstance(f, Hashed) for f in schema.features):
        shape = model.shape or (len(model.parameters) // _rows(model),)
        return graph.input("features", TensorProto.FLOAT, ["rows", *shape]), None
    parts, refusals = dict[str, str](), list[str]()
    for feature in schema.features:
        if isinstance(feature, Numeric):
            parts[feature.name] = _numeric(graph, feature, refusals)
        elif isinstance(feature, Categorical):
            parts[feature.name] = _categorical(graph, feature, refusals)
    widths = {feature.name: feature.width for feature in schema.features}
    all_parts = list(parts.values())
    for a, b in schema.interactions:
        rows = graph.add("Unsqueeze", parts[a], graph.constant(np.array([2], np.int64)))
        columns = graph.add("Unsqueeze", parts[b], graph.constant(np.array([1], np.int64)))
        products = graph.add("Mul", rows, columns)
        flat = graph.constant(np.array([-1, widths[a] * widths[b]], np.int64))
        all_parts.append(graph.add("Reshape", products, flat))
    if schema.bias:
        first = schema.features[0]
        zeros = graph.add("Mul", parts[first.name], graph.constant(np.zeros((1, first.width), np.float32)))
        zero = graph.add("ReduceMax", zeros, graph.constant(np.array([1], np.int64)), keepdims=1)
        all_parts.append(graph.add("Add", zero, graph.constant(np.float32(1.0))))
    features = _fitted(graph, schema, graph.add("Concat", *all_parts, axis=1))
    refused = None
    for each in refusals:
        refused = each if refused is None else graph.add("Or", refused, each)
    return features, refused


def _numeric(graph: _Graph, feature: Numeric, refusals: list[str]) -> str:
    from onnx import TensorProto

    given = graph.input(feature.name, TensorProto.DOUBLE, ["rows", 1])
    missing = graph.add("IsNaN", given)
    low, high = (graph.constant(np.float64(end)) for end in (feature.low, feature.high))
    known = graph.add("Where", missing, low, given)
    inside = graph.add("Min", graph.add("Max", known, low), high)
    doubled = graph.add("Mul", graph.constant(np.float64(2.0)), graph.add("Sub", inside, low))
    share = graph.add("Div", doubled, graph.constant(np.float64(feature.high - feature.low)))
    moved = graph.add("Cast", graph.add("Sub", share, graph.constant(np.float64(1.0))), to=TensorProto.FLOAT)
    encoded = graph.add("Where", missing, graph.constant(np.float32(0.0)), moved)
    refusals.append(graph.add("IsInf", graph.add("Cast", given, to=TensorProto.FLOAT)))
    if feature.outside == "refuse":
        refusals.append(graph.add("Not", graph.add("Equal", inside, known)))
    if feature.missing == "refuse":
        refusals.append(missing)
    if feature.missing != "flag":
        return encoded
    return graph.add("Concat", encoded, graph.add("Cast", missing, to=TensorProto.FLOAT), axis=1)


def _categorical(graph: _Graph, feature: Categorical, refusals: list[str]) -> str:
    from onnx import TensorProto

    given = graph.input(feature.name, TensorProto.STRING, ["rows", 1])
    count = len(feature.vocabulary)
    places = {as_text(word): place for place, word in enumerate(feature.vocabulary)}
    spelt = {each for word in MISSING_TEXTS for each in (word, word.upper(), word.title(), "NaN")}
    places |= dict.fromkeys(spelt, count + 1)  # a missing cell before all else, as when rows are read
    place = graph.add(
        "LabelEncoder",
        given,
        domain="ai.onnx.ml",
        keys_strings=list(places),
        values_int64s=list(places.values()),
        default_int64=count,
    )
    at = [*range(count)]
    at += [count] if feature.unknown == "other" else []
    at += [count + 1] if feature.missing == "flag" else []
    if feature.unknown == "refuse":
        refusals.append(graph.add("Equal", place, graph.constant(np.int64(count))))
    if feature.missing == "refuse":
        refusals.append(graph.add("Equal", place, graph.constant(np.int64(count + 1))))
    same = graph.add("Equal", place, graph.constant(np.array([at], np.int64)))
    return graph.add("Cast", same, to=TensorProto.FLOAT)


def _fitted(graph: _Graph, schema: RecordSchema, features: str) -> str:
    from onnx import TensorProto

    if schema.fit == "scale":
        return graph.add("Mul", features, graph.constant(np.float32(schema.norm / schema.largest_norm)))
    wide = graph.add("Cast", features, to=TensorProto.DOUBLE)
    squares = graph.add("Mul", wide, wide)
    length = graph.add("Sqrt", graph.add("ReduceSum", squares, graph.constant(np.array([1], np.int64)), keepdims=1))
    norm = graph.constant(np.float64(schema.norm))
    factor = graph.add("Div", norm, graph.add("Max", length, norm))
    return graph.add("Mul", features, graph.add("Cast", factor, to=TensorProto.FLOAT))


def _cnn(graph: _Graph, pixels: str, model: Model) -> str:
    """The network of `veilstream.learning.cnn`: its patches are rows, so kernels are turned round."""
    from onnx import TensorProto

    from veilstream.learning.cnn import _ENDS, _SHAPES

    flat = model.parameters
    w1, b1, w2, b2, w3, b3, w4, b4 = (
        flat[start:end].reshape(shape) for (start, end), shape in zip(pairwise(_ENDS), _SHAPES, strict=True)
    )
    image = graph.add("Reshape", pixels, graph.constant(np.array([-1, 1, 28, 28], np.int64)))
    last = graph.add("Div", image, graph.constant(np.float32(255.0)))
    for weights, bias, channels in ((w1, b1, 1), (w2, b2, 32)):
        kernel = np.ascontiguousarray(weights.reshape(3, 3, channels, 32).transpose(3, 2, 0, 1))
        last = graph.add("Conv", last, graph.constant(kernel), graph.constant(bias), kernel_shape=[3, 3])
        last = graph.add("MaxPool", graph.add("Relu", last), kernel_shape=[2, 2], strides=[2, 2])
    last = graph.add("Transpose", last, perm=[0, 2, 3, 1])
    last = graph.add("Reshape", last, graph.constant(np.array([-1, 800], np.int64)))
    hidden = graph.add("Relu", graph.add("Gemm", last, graph.constant(w3), graph.constant(b3)))
    scores = graph.add("Gemm", hidden, graph.constant(w4), graph.constant(b4))
    return graph.add("Cast", scores, to=TensorProto.DOUBLE)


def _label(graph: _Graph, model: Model, logits: str, refused: str | None) -> None:
    from onnx import TensorProto

    assert model.classes is not None
    count, column = len(model.classes), graph.constant(np.array([1], np.int64))
    if isinstance(model.task, Logistic):
        share = graph.add("Sigmoid", logits)
        shares = graph.add("Concat", graph.add("Sub", graph.constant(np.float64(1.0)), share), share, axis=1)
        zero = graph.constant(np.float64(0.0))
        place = graph.add("Cast", graph.add("GreaterOrEqual", logits, zero), to=TensorProto.INT64)
    else:
        shares = graph.add("Softmax", logits, axis=1)
        place = graph.add("ArgMax", logits, axis=1, keepdims=1)
    if refused is not None:
        shares = graph.add("Where", refused, graph.constant(np.float64(np.nan)), shares)
        place = graph.add("Where", refused, graph.constant(np.int64(count)), place)
    names = graph.constant(np.array([*model.classes, ""], object))
    graph.add("Squeeze", graph.add("Gather", names, place), column, name="label")
    graph.add("Identity", shares, name="probabilities")
    graph.output("label", TensorProto.STRING, ["rows"])
    graph.output("probabilities", TensorProto.DOUBLE, ["rows", count])


def _number(graph: _Graph, model: Model, scores: str, refused: str | None) -> None:
    from onnx import TensorProto

    def number(value: float) -> str:
        return graph.constant(np.float64(value))

    said = scores
    if isinstance(model.task, Poisson):
        said = graph.add("Exp", graph.add("Min", scores, number(model.task.largest_log_rate)))
    if model.schema is not None:
        label = model.schema.label
        low, high = (label.low, label.high) if label.counts else (-1.0, 1.0)
        said = graph.add("Min", graph.add("Max", said, number(low)), number(high))
        if not label.counts:
            share = graph.add("Mul", graph.add("Add", said, number(1.0)), number(0.5 * (label.high - label.low)))
            said = graph.add("Add", share, number(label.low))
    if refused is not None:
        said = graph.add("Where", refused, number(np.nan), said)
    graph.add("Squeeze", said, graph.constant(np.array([1], np.int64)), name="prediction")
    graph.output("prediction", TensorProto.DOUBLE, ["rows"])


def _rows(model: Model) -> int:
    return int(getattr(model.task, "classes", 1))
