"""Acting on telemetry: which step a server takes next, from estimates alone.

Post-processing of what was released, so it costs no privacy. A rule looks once a window, at the
newest window and at the one before it, which share no round. A metric has got worse when it is
worse by more than both error bars together, each of noise *and* of sampling (`Estimate.bar`): less
than that, chance alone would often do.

* ``stop``: when the metric has got worse, the model stays as it is.
* ``reduce_step``: when the metric has got worse, the step is multiplied with ``factor``.
* ``choose_step``: two steps, the method's own and ``factor`` times as large. The larger one is
  taken when the metric has got worse, the world having changed; the method's own again when the
  larger one no longer makes it better, for which no bar is asked: it is the way back to the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from veilstream.learning.telemetry_estimates import Estimate

Act = Literal["stop", "reduce_step", "choose_step"]

_DEFAULT = {"stop": 0.0, "reduce_step": 0.5, "choose_step": 4.0}


@dataclass
class StepControl:
    """What the plan's step sizes are multiplied with, in one run."""

    act: Act
    given_factor: float | None = None
    current: float = 1.0
    """The multiplier now; all that there is to remember."""

    @property
    def factor(self) -> float:
        """Of one change."""
        return _DEFAULT[self.act] if self.given_factor is None else self.given_factor

    def look(self, before: Sequence[Estimate], newest: Sequence[Estimate]) -> float:
        """The multiplier from now on, from two windows' estimates; the first metric decides."""
        if not before or not newest:
            return self.current
        old, new = before[0], newest[0]
        sign = -1.0 if new.metric == "loss" else 1.0
        rise = sign * (new.estimate - old.estimate)
        worse = rise < -(new.bar + old.bar)
        if self.act == "choose_step":
            if worse:
                self.current = self.factor
            elif rise <= 0.0:
                self.current = 1.0
        elif worse:  # once stopped, it stays so: 0 times anything
            self.current *= self.factor
        return self.current
