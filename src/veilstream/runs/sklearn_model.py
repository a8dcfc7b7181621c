"""A released model as a scikit-learn estimator: fitted, and frozen as in `sklearn.frozen.FrozenEstimator`.

Records are data frames by column, or arrays whose columns are in the order of `feature_names_in_`: values as they
are, which the plan encodes. Where a plan names no columns, arrays are of encoded numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from veilstream.errors import InputError, MissingExtra
from veilstream.records.own_records import OwnRecords

if TYPE_CHECKING:
    from veilstream.runs.model import Model

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.utils.validation import check_array, validate_data
except ImportError as error:
    raise MissingExtra("scikit-learn", "export", "a scikit-learn estimator") from error


class SklearnModel(BaseEstimator):  # type: ignore[misc]
    """What classifiers and regressors share.

    Args:
        model: as `veilstream.load` gives it.

    """

    def __init__(self, model: Model) -> None:
        self.model = model

    def __sklearn_is_fitted__(self) -> bool:
        return True

    def __sklearn_clone__(self) -> Self:
        return self

    def fit(self, X: Any, y: Any = None, **_: Any) -> Self:
        """Return itself: a released model is frozen, so that pipelines and searches leave it as it is."""
        return self

    @property
    def feature_names_in_(self) -> NDArray[np.object_]:
        """Columns that it predicts from."""
        columns = _columns(self.model)
        if columns is None:
            raise AttributeError("this plan names no columns")
        return np.array(columns, object)

    @property
    def n_features_in_(self) -> int:
        """How many they are; of a plan without columns, how many numbers a record has."""
        columns = _columns(self.model)
        if columns is not None:
            return len(columns)
        return int(np.prod(self.model.shape or (len(self.model.parameters),)))

    def _rows(self, X: Any) -> Any:
        columns = _columns(self.model)
        if columns is None:
            return validate_data(self, X, reset=False).astype(np.float32).reshape(-1, *(self.model.shape or ()))
        if hasattr(X, "columns"):
            return X
        given = check_array(X, dtype=None, ensure_all_finite=False)
        if given.shape[1] != len(columns):
            rule = f"{len(columns)} columns, in the order of feature_names_in_"
            raise InputError("X", f"{given.shape[1]} columns", rule, "a data frame's are found by name")
        return [dict(zip(columns, row, strict=True)) for row in given.tolist()]

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = _columns(self.model) is not None
        tags.input_tags.string = tags.input_tags.categorical = tags.input_tags.allow_nan
        tags.requires_fit = False
        tags.no_validation = False
        return tags


class SklearnClassifier(ClassifierMixin, SklearnModel):  # type: ignore[misc]
    """A model that tells labels apart."""

    @property
    def classes_(self) -> NDArray[np.str_]:
        """Its labels, in order."""
        return np.array(self.model.classes)

    def predict(self, X: Any) -> NDArray[np.str_]:
        """The label of each record."""
        return np.asarray(self.model.predict(self._rows(X)), self.classes_.dtype)

    def predict_proba(self, X: Any) -> NDArray[np.float64]:
        """Probability of each label, in the order of `classes_`."""
        return self.model.predict_proba(self._rows(X))


class SklearnRegressor(RegressorMixin, SklearnModel):  # type: ignore[misc]
    """A model that predicts a number, in the label's own units."""

    def predict(self, X: Any) -> NDArray[np.float64]:
        """The number of each record."""
        return np.asarray(self.model.predict(self._rows(X)), np.float64)


def sklearn_model(model: Model) -> SklearnModel:
    """The estimator of a model's kind."""
    return SklearnRegressor(model) if model.classes is None else SklearnClassifier(model)


def _columns(model: Model) -> tuple[str, ...] | None:
    schema = model.schema
    if schema is None or isinstance(schema, OwnRecords):
        return None
    return tuple(feature.name for feature in schema.features)
