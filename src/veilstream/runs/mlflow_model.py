"""A released model in an MLflow registry, by its pyfunc flavour: data frames of columns in, predictions out."""

from __future__ import annotations

import logging
import os
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from veilstream import __version__
from veilstream.errors import InputError, MissingExtra
from veilstream.records.schema import Numeric

if TYPE_CHECKING:
    from veilstream.runs.model import Model

for _refused in ("MLFLOW_DISABLE_TELEMETRY", "DO_NOT_TRACK"):
    os.environ.setdefault(_refused, "true")  # else MLflow tells its makers what is done here
try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # MLflow warns about its own type hints
        import mlflow
        from mlflow.exceptions import MlflowException
        from mlflow.pyfunc import PythonModel
except ImportError as error:
    raise MissingExtra("mlflow-skinny and pandas", "mlflow", "an MLflow registry") from error


class ReleasedFlavour(PythonModel):  # type: ignore[misc]
    """What MLflow loads: a model's file, and its predictions."""

    def load_context(self, context: Any) -> None:
        """Read the model's file."""
        from veilstream.runs.load import load

        self.model = load(context.artifacts["model"])

    # MLflow reads type hints, and warns of those that it does not know.
    def predict(self, context, model_input, params=None):  # type: ignore[no-untyped-def]
        """A data frame: `prediction`, and a column with the probability of each label; empty for unusable rows."""
        import pandas as pd

        found = self.model.predictions(model_input)
        columns: dict[str, Any] = {"prediction": found.values}
        if found.probabilities is not None:
            for place, label in enumerate(self.model.classes or ()):
                columns[f"probability {label}"] = found.probabilities[:, place]
        return pd.DataFrame(columns)


def to_registry(model: Model, uri: str) -> tuple[str, str]:
    """Register a version of the plan's name in a store; its name and version."""
    if model.needs_code is not None:
        rule = "a model whose plan names no code of your own"
        raise InputError("--to", "mlflow", rule, "MLflow's machines do not have it: export json or npz")
    name = model.plan.name
    try:
        mlflow.set_tracking_uri(uri)
        mlflow.set_registry_uri(uri)
        mlflow.set_experiment(name)
        logging.getLogger("mlflow").setLevel(logging.ERROR)  # it has no input example, and needs none
        name_of_run = f"{model.run}, round {model.round}"
        with tempfile.TemporaryDirectory() as folder, mlflow.start_run(run_name=name_of_run), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about type hints that MLflow does not know
            file = Path(folder) / "model.npz"
            model.save(file)
            mlflow.set_tags({f"veilstream.{key}": value[:500] for key, value in model.facts.items() if key != "plan"})
            made = mlflow.pyfunc.log_model(
                name="model",
                python_model=ReleasedFlavour(),
                artifacts={"model": str(file)},
                registered_model_name=name,
                signature=_signature(model),
                pip_requirements=[f"veilstream=={__version__}", "pandas"],
            )
    except MlflowException as error:
        why = f"{str(error).splitlines()[0]}; try sqlite:///mlflow.db"
        raise InputError("--out", uri, "an MLflow store or server that can be written", why) from error
    return name, str(made.registered_model_version)


def _signature(model: Model) -> Any:
    """Columns and their types, where the plan names them."""
    from mlflow.models import ModelSignature
    from mlflow.types.schema import ColSpec, Schema

    schema = model.schema
    if schema is None:
        return None
    columns = [
        ColSpec("double" if isinstance(feature, Numeric) else "string", feature.name, required=False)
        for feature in schema.features
    ]
    said = [ColSpec("double" if model.classes is None else "string", "prediction")]
    said += [ColSpec("double", f"probability {label}") for label in model.classes or ()]
    return ModelSignature(inputs=Schema(columns), outputs=Schema(said))
