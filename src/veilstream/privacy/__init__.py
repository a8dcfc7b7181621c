"""How much noise: budgets, guarantees, accounting, clipping."""

from veilstream.mechanisms.participation import ONCE, Participation, Sensitivity
from veilstream.privacy.calibration import calibrate, privacy_of
from veilstream.privacy.clipping import Clipped, clip
from veilstream.privacy.gaussian import GaussianCurve
from veilstream.privacy.guarantee import Accounting, Budget, Guarantee, Neighbours, Order
from veilstream.privacy.telemetry import Telemetry
from veilstream.privacy.zcdp import ZcdpCurve

__all__ = [
    "ONCE",
    "Accounting",
    "Budget",
    "Clipped",
    "GaussianCurve",
    "Guarantee",
    "Neighbours",
    "Order",
    "Participation",
    "Sensitivity",
    "Telemetry",
    "ZcdpCurve",
    "calibrate",
    "clip",
    "privacy_of",
]
