"""Online federated learning under local differential privacy with temporally correlated noise.

import veilstream as vs

mechanism = vs.mechanisms.toeplitz(4096)
std, guarantee = vs.calibrate(vs.Budget(2.0, 1e-3), mechanism, clip_norm=1.0)
for increment in mechanism.noise(std=std, dim=100):
    ...
"""

from veilstream import errors, mechanisms, privacy
from veilstream.errors import VeilstreamError
from veilstream.mechanisms import Factorization, Participation
from veilstream.privacy import Budget, Guarantee, calibrate, clip, privacy_of

__version__ = "0.1.0"

__all__ = [
    "Budget",
    "Factorization",
    "Guarantee",
    "Participation",
    "VeilstreamError",
    "__version__",
    "calibrate",
    "clip",
    "errors",
    "mechanisms",
    "privacy",
    "privacy_of",
]
