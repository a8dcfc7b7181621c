"""How many learners each step of the protocol needs, and why one sum a round can be opened at most.

n learners, at most c of them colluding with the server, at least h honest ones in what is opened.

    t = floor((n + c) / 2) + 1     shares that open a sum, and the least size of a set
    q = n + c - t + 1              voids that prove that an attempt can never be opened

**Claim:** of one round at most one set is ever opened. *Proof:* (1) A set counts when all of it have signed it. Two
sets of one attempt, of at least t learners each, share 2t - n > c of them, so an honest one, who signs one set an
attempt. (2) A sum is opened by t shares, at least t - c of them from honest learners, who share only for a set that
counts. (3) A void certificate of attempt a has q signers, at least q - c of them honest; each had shared for no
attempt up to a (or had seen an earlier certificate of it) and never will. So shares for such an attempt can come
from the others alone, n - (q - c) = t - 1 learners at most. (4) An honest learner masks attempt a only with a
certificate of attempt a - 1, and moves on to round r + 1 only with the signatures of t openers of round r. Hence an
attempt that was opened has no certificate, and no later attempt of its round has a message of an honest learner. ∎
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rules:
    """Of one run."""

    learners: int
    """n: all of the plan, whether they gave a key or not."""
    honest: int
    """h"""
    colluding: int
    """c"""

    @property
    def threshold(self) -> int:
        """t: as many openers give the sum, fewer give nothing."""
        return (self.learners + self.colluding) // 2 + 1

    @property
    def voids(self) -> int:
        """q: as many voids prove that an attempt can never be opened."""
        return self.learners + self.colluding - self.threshold + 1

    @property
    def least(self) -> int:
        """Least size of a set."""
        return max(self.threshold, self.honest + self.colluding)

    def enough_core(self, core: int) -> bool:
        """Whether a core of so many still has h honest ones, whoever colludes."""
        return core - self.colluding >= self.honest
