"""From what a ledger holds back to where a learner stood in memory, to the bit."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from veilstream.deployment.ledger.store import Ledger
from veilstream.deployment.local_rounds import LocalRounds, unpack_step
from veilstream.privacy.seeds import SEED_BYTES

OPEN_ROUND = "open-round"
"""Under which the ledger keeps what the open round has come to after a group of steps."""


@dataclass(frozen=True)
class Recovered:
    """What a learner knows besides its rounds."""

    model: NDArray[np.float32] | None
    """The newest that the server sent."""
    snapshot_step: int
    """Where the noise was last kept whole."""


def recover(ledger: Ledger, local: LocalRounds) -> Recovered:
    """Bring the fresh rounds of the ledger's epoch to where the ledger stands.

    The noise of an epoch that is over is not restored: its secrets are destroyed, or about to be.
    """
    standing, model = ledger.chain.standing, None
    if ledger.names("x"):
        model = np.frombuffer(ledger.blob("x"), "<f4").astype(np.float32)
    if standing.rounds:
        local.resume(ledger.blob("message"), standing.sealed_model)
    if standing.ended:
        local.end()
    if local.over:
        return Recovered(model, 0)
    snapshot_step = _restore_noise(ledger, local, standing.steps)
    if standing.pinned is not None:
        assert model is not None
        local.pin(model, standing.pinned)
        if ledger.names(OPEN_ROUND):
            local.restore_open(ledger.blob(OPEN_ROUND))
        for t in range(local.taken, local.taken + standing.steps - local.step):
            local.apply(unpack_step(ledger.blob(f"noisy/{t}")))
    return Recovered(model, snapshot_step)


def _restore_noise(ledger: Ledger, local: LocalRounds, steps: int) -> int:
    """From the last snapshot, and the secrets of the steps since."""
    if ledger.names("snapshot"):
        local.noise.restore(ledger.blob("snapshot"))
    snapshot_step = local.noise.position
    while local.noise.position < steps:
        together = ledger.blob(secret_name(local.epoch, local.noise.position))
        for at in range(0, len(together), SEED_BYTES):
            local.replay(together[at : at + SEED_BYTES])
    return snapshot_step


def secret_name(epoch: int, step: int) -> str:
    """Under which the ledger keeps a step's secret until it is destroyed.

    Those of steps that were stored together are one after the other, under the first one's name.
    """
    return f"seed/{epoch}/{step:010d}"
