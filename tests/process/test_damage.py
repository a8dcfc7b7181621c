"""Damaged and outdated stores are refused, or know exactly what they knew."""

from __future__ import annotations

import pytest
from studies.damage import OLD_COPIES, OUTCOMES, VIOLATIONS, damage_study, old_copies_study


def check(cases: int, seed: int) -> None:
    findings = damage_study(cases, seed)
    assert findings.total(*VIOLATIONS) == 0, "\n".join(findings.examples[:10])
    assert findings.total(*OUTCOMES) == cases
    assert findings.total("refused") > cases // 4
    assert findings.total("nothing changed") > cases // 10  # a learner that refuses all is no use


def check_old(copies: int, seed: int) -> None:
    findings = old_copies_study(copies, seed)
    assert findings.total(OLD_COPIES[2]) == 0
    assert min(findings.total(name) for name in OLD_COPIES[:2]) > copies // 4


def test_no_damage_is_taken_for_the_truth():
    check(500, seed=0)


def test_every_old_copy_is_noticed():
    check_old(150, seed=0)


@pytest.mark.slow
def test_no_damage_is_taken_for_the_truth_in_ten_thousand_cases():
    check(10_000, seed=1)


@pytest.mark.slow
def test_every_old_copy_is_noticed_in_thousands():
    check_old(4_000, seed=1)
