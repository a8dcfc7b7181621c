"""How much privacy the messages really give: statistics of what was sent, and nothing else.

Pure functions of transcripts. Who makes the transcripts: `veilstream.engines.audit`.
"""

from veilstream.privacy.audit.differencing import Differencing, difference
from veilstream.privacy.audit.law import Law, law_of
from veilstream.privacy.audit.levels import CONFIDENCE, FALSE_ALARMS
from veilstream.privacy.audit.many_run import ManyRun, many_run
from veilstream.privacy.audit.one_run import OneRun, one_run

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
