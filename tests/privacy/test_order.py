"""Who knows at which step a record is used: a key of a plan, and a fact of a guarantee."""

from veilstream import Budget, calibrate
from veilstream.mechanisms import independent
from veilstream.plans.experiments import experiment_path
from veilstream.plans.plan import Plan
from veilstream.privacy import Guarantee, Order


def test_a_known_order_leaves_no_trace_in_terms_and_guarantees():
    _, guarantee = calibrate(Budget(1.0, 1e-6), independent(8), clip_norm=1.0)
    assert guarantee.order is Order.KNOWN
    assert "order" not in guarantee.as_dict()
    assert Guarantee.from_dict(guarantee.as_dict()) == guarantee


def test_a_secret_order_is_part_of_a_guarantee():
    _, secret = calibrate(Budget(1.0, 1e-3), independent(8), clip_norm=1.0, order="secret")
    assert secret.order is Order.SECRET
    assert secret.as_dict()["order"] == "secret"
    assert secret.as_dict()["secret"]["among"] == 8
    assert "rests on a secret" in str(secret)
    assert Guarantee.from_dict(secret.as_dict()) == secret


def test_only_a_secret_order_is_compared_between_server_and_learner():
    plan = Plan.load(experiment_path("mnist_private"))
    secret = Plan.load(experiment_path("mnist_private"), {"privacy.order": "secret"})
    assert plan.privacy
    assert "order" not in plan.privacy.agreed_values()
    assert secret.privacy
    assert secret.privacy.agreed_values()["order"] == "secret"
