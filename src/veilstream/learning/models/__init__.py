"""Models of your own: JAX pytrees, PyTorch modules, dictionaries of features."""

from typing import TYPE_CHECKING

from veilstream.lazy import names_from

if TYPE_CHECKING:
    from veilstream.learning.models.linear_dicts import DictEncoder, DictLogistic, DictRegression
    from veilstream.learning.models.pytree import PytreeTask
    from veilstream.learning.models.torch_model import TorchTask

__all__ = ["DictEncoder", "DictLogistic", "DictRegression", "PytreeTask", "TorchTask"]

_LATER = {
    "DictEncoder": "veilstream.learning.models.linear_dicts",
    "DictLogistic": "veilstream.learning.models.linear_dicts",
    "DictRegression": "veilstream.learning.models.linear_dicts",
    "PytreeTask": "veilstream.learning.models.pytree",
    "TorchTask": "veilstream.learning.models.torch_model",
}

__getattr__ = names_from(__name__, _LATER)


def __dir__() -> list[str]:
    return sorted(__all__)
