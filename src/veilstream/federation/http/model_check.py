"""Whether a fetched model is of the plan that one expects, and states its guarantee truly."""

from __future__ import annotations

from veilstream.deployment.terms import Terms
from veilstream.errors import ProtocolError
from veilstream.plans.plan import Plan
from veilstream.runs.folder import OPERATIONAL, changed
from veilstream.runs.released_model import ReleasedModel, plan_digest


def check_plan(model: ReleasedModel, plan: Plan) -> None:
    """Refuse a model of another plan, or one whose stated guarantee is not the plan's."""
    theirs, ours = plan_digest(model.plan), plan_digest(plan)
    if changed(model.plan, plan).keys() - OPERATIONAL:
        raise ProtocolError(
            f"a model of another plan (digest {theirs[:16]}…, expected {ours[:16]}…)",
            "ask the server's operator which plan it is for",
        )
    if not Terms.promises(plan, len(model.model), model.guarantee):
        raise ProtocolError("a model whose stated guarantee is not what its plan gives", "do not trust the server")
