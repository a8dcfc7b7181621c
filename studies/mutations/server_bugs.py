"""A bug of the server, weights by who answered: seen in the models, against the ledgers."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from unittest.mock import patch

import numpy as np
from tests.support.federation import World, plan_of

from studies.mutations.findings import Finding
from veilstream.federation.protocol.fold import ServerFold


def _deviation() -> float:
    """Of the released model from what the ledgers imply, one learner coming late."""
    plan = plan_of(federation={"quorum": 0.5, "deadline_s": 0.3, "patience_s": 0.2})
    with tempfile.TemporaryDirectory() as folder:
        with World(Path(folder), plan) as world:
            world.start("a")
            world.start("b")
            coordinator = world.coordinator()
            transport = world.transport()
            coordinator.go(transport, until=3)
            world.start("c")
            coordinator.go(transport)
            model = coordinator.models.read(coordinator.round)
        implied = world.model_by_ledgers()
    return float(np.linalg.norm(model - implied) / np.linalg.norm(implied))


def by_who_answered() -> Finding:
    original = ServerFold.close_round

    def closed(self):
        terms = self.terms
        self.terms = dataclasses.replace(terms, learners=len(self.answered))
        try:
            return original(self)
        finally:
            self.terms = terms

    right = _deviation()
    with patch.object(ServerFold, "close_round", closed):
        wrong = _deviation()
    return Finding(
        "weights 1/(who answered)",
        "conformance",
        right < 1e-5 < 1e-2 < wrong,
        f"the model is {wrong:.0%} off what the ledgers imply (correct server: {right:.0e})",
    )


BUGS = (by_who_answered,)
