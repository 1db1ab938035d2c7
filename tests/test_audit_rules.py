"""Each rule of audits: a schedule ends right with it, and fails without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from audit_rules import RULES, hunt, schedule
from test_decide_audits import (
    test_what_was_redone_for_one_manifest_says_nothing_of_the_next as what_was_redone_for_one_manifest,
)

FOUND: dict[str, tuple[str, str, int, dict[str, Any]]] = {
    "passed": ("all", "sum", 0, {}),
    "everywhere": ("all", "fwd", 0, {}),
    "accused": ("all", "sum", 0, {}),
    "back": ("rewind", "sum", 3, {}),
    "before": ("rewind", "sum", 3, {}),
    "stale": ("all", "false", 0, {}),
    "compared": ("all", "sender", 0, {}),
    "fickle": ("all", "fickle", 7, {}),
    "again": ("all", "fickle", 10, {}),
    "answers": ("probation", "sum", 0, {"losses": 0.3, "num_liars": 0}),
    "held": ("all", "root", 4, {"num_liars": 1}),
    "shown": ("all", "nan", 0, {}),
    "differs": ("all", "deaf", 8, {}),
}
"""By rule: mode, lie and seed of a schedule that fails without the rule, and its options; ``python tests/audit_rules.py`` finds
new ones."""

ELSEWHERE: dict[str, Callable[[], None]] = {"version": what_was_redone_for_one_manifest}
"""Rules that none of many schedules needs: by the direct test that fails without it."""

HUNTED = 60


@pytest.mark.parametrize("rule", sorted(FOUND))
def test_without_a_rule_a_schedule_fails(rule: str) -> None:
    mode, lie, seed, options = FOUND[rule]
    schedule(seed, mode, lie, options).run()
    found = hunt(rule, mode, lie, [seed, *range(HUNTED)], options)
    assert found is not None, "no schedule fails without the rule"
    assert found[1].partition(":")[0] in ("Bad", "InvariantBroken")


@pytest.mark.parametrize("rule", sorted(ELSEWHERE))
def test_without_a_rule_its_own_test_fails(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    RULES[rule](monkeypatch)
    with pytest.raises(AssertionError):
        ELSEWHERE[rule]()


def test_every_rule_is_tried() -> None:
    assert {*FOUND, *ELSEWHERE} == set(RULES)
