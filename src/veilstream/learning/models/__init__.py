"""Models of your own: JAX pytrees, PyTorch modules, dictionaries of features."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from veilstream.learning.models.linear_dicts import DictEncoder, DictLogistic, DictRegression
    from veilstream.learning.models.pytree import PytreeTask
    from veilstream.learning.models.torch_model import TorchTask

__all__ = [
    "DictEncoder",
    "DictLogistic",
    "DictRegression",
    "PytreeTask",
    "TorchTask",
]

_LATER = {
    "DictEncoder": "veilstream.learning.models.linear_dicts",
    "DictLogistic": "veilstream.learning.models.linear_dicts",
    "DictRegression": "veilstream.learning.models.linear_dicts",
    "PytreeTask": "veilstream.learning.models.pytree",
    "TorchTask": "veilstream.learning.models.torch_model",
}


def __getattr__(name: str) -> Any:
    """Load a module when one of its names is asked for."""
    if name in _LATER:
        return getattr(import_module(_LATER[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
