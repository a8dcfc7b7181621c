"""How many learners each step of the protocol needs, and why one sum a round can be opened at most.

n learners, at most c of them colluding with the server, at least h honest ones in what is opened.

    t = floor((n + c) / 2) + 1     learners that agree on what is opened, and the least size of a set
    q = n + c - t + 1              voids that prove that an attempt can never be opened

In an attempt learner i adds to its increment a mask with each of its neighbours and one of its own. When a set U is
named it seals for U: shares of its own mask, each under a pad that i and the share's holder can work out, bound to U;
and, under its own mask's secret, the masks that it shares with neighbours outside U. Then learners agree on U, and tell
the pads of its members' shares: at once where all pairs are neighbours and t shares give a mask, and else with the
agreement of t learners in hand.

**Claim:** of one round at most one set has honest learners' pads so that a sum of it can be opened. *Proof:*
(1) Where t learners agree on a set, at least t - c of them are honest. Two sets of one attempt share 2t - n > c of
those who agree, so an honest one, who agrees on one set of a round until a certificate shows that its attempt is void.
(2) A void certificate of attempt a has q signers, at least q - c of them honest; each had agreed on no attempt up to a
(or had seen an earlier certificate of it) and never will. So no more than n - (q - c) = t - 1 learners agree on such an
attempt. (3) An honest learner masks attempt a only with a certificate of attempt a - 1, and moves on to round r + 1
only with the signatures of t who agreed in round r. Hence an attempt on which t agreed has no certificate, and no later
attempt of its round has a message of an honest learner. (4) Pads of fewer than t learners open no own mask where t
shares are needed; with fewer neighbours nobody honest tells one before t agree. ∎

**Claim:** what the server then knows of U is the sum over all honest learners of U, or nothing. *Proof:* an own mask is
opened only for the set that its learner has sealed for, so only if that is U. Masks with neighbours come out with it,
and only those with learners outside U. So none between two honest learners of U is known, and they are connected: all
pairs are, and a graph by `mask_graph`, whose rules of U every honest learner checks before it agrees. Whoever of them
has not sealed for U keeps its own mask shut, and the sum with it. ∎
"""

from __future__ import annotations

from dataclasses import dataclass

from veilstream.federation.masking.links import Links, Set


@dataclass(frozen=True)
class Rules:
    """Of one run."""

    learners: int
    """n: all of the plan, whether they gave a key or not."""
    honest: int
    """h"""
    colluding: int
    """c"""
    links: Links | None = None
    """Who shares masks with whom; None before a list is agreed on."""

    @property
    def threshold(self) -> int:
        """t: as many must agree on what is opened."""
        return (self.learners + self.colluding) // 2 + 1

    @property
    def voids(self) -> int:
        """q: as many voids prove that an attempt can never be opened."""
        return self.learners + self.colluding - self.threshold + 1

    @property
    def least(self) -> int:
        """Least size of a set."""
        allowed = 0 if self.links is None else self.links.least
        return max(self.threshold, self.honest + self.colluding, allowed)

    @property
    def two_steps(self) -> bool:
        """Whether pads are told only when t have agreed."""
        return self.links is not None and self.links.graph is not None

    @property
    def shares_needed(self) -> int:
        """As many shares give a learner's own mask."""
        graph = None if self.links is None else self.links.graph
        return self.threshold if graph is None else graph.shares_needed

    def joined(self, members: Set) -> bool:
        """Whether everybody in a set has neighbours enough in it."""
        return self.links is None or self.links.joined(members)

    def enough_core(self, core: int) -> bool:
        """Whether a core of so many still has h honest ones, whoever colludes."""
        return core - self.colluding >= self.honest
