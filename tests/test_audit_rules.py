"""Each rule of audits: a schedule ends right with it, and fails without it."""

from __future__ import annotations

import pytest
from audit_rules import RULES, hunt
from audit_sim import AuditSim

FOUND: dict[str, tuple[str, str, int]] = {
    "passed": ("all", "sum", 0),
    "everywhere": ("all", "fwd", 0),
    "accused": ("all", "sum", 0),
    "back": ("rewind", "sum", 3),
}
"""By rule: mode, lie and seed of a schedule that fails without the rule; ``python tests/audit_rules.py`` finds new ones."""

HUNTED = 60


@pytest.mark.parametrize("rule", sorted(FOUND))
def test_without_a_rule_a_schedule_fails(rule: str) -> None:
    mode, lie, seed = FOUND[rule]
    AuditSim(seed, mode=mode, lie=lie, audit_ticks=4, checks_all=False).run()
    found = hunt(rule, mode, lie, [seed, *range(HUNTED)])
    assert found is not None, "no schedule fails without the rule"
    assert found[1].partition(":")[0] in ("Bad", "InvariantBroken")


def test_every_rule_is_tried() -> None:
    assert set(FOUND) == set(RULES)
