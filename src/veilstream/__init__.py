"""Online federated learning under local differential privacy with temporally correlated noise.

import veilstream as vs

mechanism = vs.mechanisms.toeplitz(4096)
private = vs.PrivateSum(mechanism, vs.Budget(2.0, 1e-3), clip_norm=1.0, dim=100)
payload = private.add(gradient)  # bytes that may leave
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from veilstream import audit, errors, mechanisms, privacy, streams
    from veilstream.deployment import optax_training as optax
    from veilstream.deployment import torch_training as torch
    from veilstream.deployment.learner import Learner
    from veilstream.deployment.private_model import PrivateModel
    from veilstream.deployment.private_sum import PrivateSum
    from veilstream.deployment.release import Release, decode
    from veilstream.errors import VeilstreamError
    from veilstream.federation.keys.new_keys import make_keys
    from veilstream.federation.learner.site import Site
    from veilstream.federation.server.server import Server
    from veilstream.learning import models, tasks
    from veilstream.learning.tasks import Sample
    from veilstream.mechanisms import Factorization, Participation, Workload
    from veilstream.plans.plan import Plan
    from veilstream.privacy import Budget, Guarantee, calibrate, clip, privacy_of
    from veilstream.records.admission import Answer
    from veilstream.reports.reported_run import run
    from veilstream.research import theory
    from veilstream.runs.folder import Run
    from veilstream.runs.load import load

__version__ = "0.7.0"

__all__ = [
    "Answer",
    "Budget",
    "Factorization",
    "Guarantee",
    "Learner",
    "Participation",
    "Plan",
    "PrivateModel",
    "PrivateSum",
    "Release",
    "Run",
    "Sample",
    "Server",
    "Site",
    "VeilstreamError",
    "Workload",
    "__version__",
    "audit",
    "calibrate",
    "clip",
    "decode",
    "errors",
    "load",
    "make_keys",
    "mechanisms",
    "models",
    "optax",
    "privacy",
    "privacy_of",
    "run",
    "streams",
    "tasks",
    "theory",
    "torch",
]

_MODULES = {
    "audit": "veilstream.audit",
    "errors": "veilstream.errors",
    "mechanisms": "veilstream.mechanisms",
    "models": "veilstream.learning.models",
    "optax": "veilstream.deployment.optax_training",
    "privacy": "veilstream.privacy",
    "streams": "veilstream.streams",
    "tasks": "veilstream.learning.tasks",
    "theory": "veilstream.research.theory",
    "torch": "veilstream.deployment.torch_training",
}
_NAMES = {
    "veilstream.deployment.learner": ("Learner",),
    "veilstream.deployment.private_model": ("PrivateModel",),
    "veilstream.deployment.private_sum": ("PrivateSum",),
    "veilstream.deployment.release": ("Release", "decode"),
    "veilstream.errors": ("VeilstreamError",),
    "veilstream.federation.keys.new_keys": ("make_keys",),
    "veilstream.federation.learner.site": ("Site",),
    "veilstream.federation.server.server": ("Server",),
    "veilstream.learning.tasks": ("Sample",),
    "veilstream.mechanisms": ("Factorization", "Participation", "Workload"),
    "veilstream.plans.plan": ("Plan",),
    "veilstream.privacy": ("Budget", "Guarantee", "calibrate", "clip", "privacy_of"),
    "veilstream.records.admission": ("Answer",),
    "veilstream.reports.reported_run": ("run",),
    "veilstream.runs.folder": ("Run",),
    "veilstream.runs.load": ("load",),
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Load a room when one of its names is first asked for: `import veilstream` itself is free."""
    if name in _MODULES:
        found: Any = import_module(_MODULES[name])
    elif name in _MODULE_OF:
        found = getattr(import_module(_MODULE_OF[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
