"""Online federated learning under local differential privacy with temporally correlated noise.

import veilstream as vs

mechanism = vs.mechanisms.toeplitz(4096)
private = vs.PrivateSum(mechanism, vs.Budget(2.0, 1e-3), clip_norm=1.0, dim=100)
payload = private.add(gradient)  # bytes that may leave
"""

from typing import TYPE_CHECKING, Any

from veilstream import errors, mechanisms, privacy
from veilstream.errors import VeilstreamError
from veilstream.mechanisms import Factorization, Participation
from veilstream.privacy import Budget, Guarantee, calibrate, clip, privacy_of

if TYPE_CHECKING:
    from veilstream.engines.learner import Answer, Learner
    from veilstream.engines.plan import Plan
    from veilstream.engines.private_sum import PrivateSum
    from veilstream.engines.release import Release, decode
    from veilstream.engines.run_folder import Run
    from veilstream.engines.runner import run
    from veilstream.learning.tasks import Sample

__version__ = "0.3.0"

__all__ = [
    "Answer",
    "Budget",
    "Factorization",
    "Guarantee",
    "Learner",
    "Participation",
    "Plan",
    "PrivateSum",
    "Release",
    "Run",
    "Sample",
    "VeilstreamError",
    "__version__",
    "calibrate",
    "clip",
    "decode",
    "errors",
    "mechanisms",
    "privacy",
    "privacy_of",
    "run",
]

_LATER = {
    "Answer": "veilstream.engines.learner",
    "Learner": "veilstream.engines.learner",
    "Plan": "veilstream.engines.plan",
    "PrivateSum": "veilstream.engines.private_sum",
    "Release": "veilstream.engines.release",
    "Run": "veilstream.engines.run_folder",
    "Sample": "veilstream.learning.tasks",
    "decode": "veilstream.engines.release",
    "run": "veilstream.engines.runner",
}


def __getattr__(name: str) -> Any:
    """Load what runs plans only when it is asked for."""
    if name in _LATER:
        from importlib import import_module

        return getattr(import_module(_LATER[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
