"""Online federated learning under local differential privacy with temporally correlated noise.

import veilstream as vs

mechanism = vs.mechanisms.toeplitz(4096)
std, guarantee = vs.calibrate(vs.Budget(2.0, 1e-3), mechanism, clip_norm=1.0)
for increment in mechanism.noise(std=std, dim=100):
    ...
"""

from typing import TYPE_CHECKING, Any

from veilstream import errors, mechanisms, privacy
from veilstream.errors import VeilstreamError
from veilstream.mechanisms import Factorization, Participation
from veilstream.privacy import Budget, Guarantee, calibrate, clip, privacy_of

if TYPE_CHECKING:
    from veilstream.engines.plan import Plan
    from veilstream.engines.run_folder import Run
    from veilstream.engines.runner import run

__version__ = "0.2.0"

__all__ = [
    "Budget",
    "Factorization",
    "Guarantee",
    "Participation",
    "Plan",
    "Run",
    "VeilstreamError",
    "__version__",
    "calibrate",
    "clip",
    "errors",
    "mechanisms",
    "privacy",
    "privacy_of",
    "run",
]

_LATER = {
    "Plan": "veilstream.engines.plan",
    "Run": "veilstream.engines.run_folder",
    "run": "veilstream.engines.runner",
}


def __getattr__(name: str) -> Any:
    """Load what runs plans only when it is asked for."""
    if name in _LATER:
        from importlib import import_module

        return getattr(import_module(_LATER[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
