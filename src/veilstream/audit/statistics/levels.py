"""How sure an audit is: two levels, kept apart.

Figures are lower bounds at `CONFIDENCE`: one audit of correct code in a hundred reports a bound
above the truth. An *alarm* is another matter, since an audit that cries wolf is switched off: all
tests of one audit together raise one with probability at most `FALSE_ALARMS` if the code is
correct. A bound above the claim at the first level alone is therefore not yet an alarm.
"""

from __future__ import annotations

CONFIDENCE = 0.99
FALSE_ALARMS = 1e-6
