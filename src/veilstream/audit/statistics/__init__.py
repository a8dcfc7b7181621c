"""How much privacy the messages really give: pure functions of transcripts."""

from veilstream.audit.statistics.check import CONFIDENCE, FALSE_ALARMS
from veilstream.audit.statistics.differencing import Differencing, difference
from veilstream.audit.statistics.law import Law, law_of
from veilstream.audit.statistics.many_run import ManyRun, many_run
from veilstream.audit.statistics.one_run import OneRun, one_run

__all__ = [
    "CONFIDENCE",
    "FALSE_ALARMS",
    "Differencing",
    "Law",
    "ManyRun",
    "OneRun",
    "difference",
    "law_of",
    "many_run",
    "one_run",
]
