"""Each rule of audits, and how to remove it: named small functions of the production code, replaced in a test.

As :mod:`schedule_rules`: ``RULES[name](patch)`` removes the rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from schedule_rules import always

from subnet.run import audits, merges
from subnet.run import state as st
from validator import decide, decide_cases

Remove = Callable[[Any], None]


def passed(patch: Any) -> None:
    """A seal waits for nobody's audit."""
    patch.setattr(audits, "is_audited", always(True))
    patch.setattr(merges, "must_audit", always(False))


def everywhere(patch: Any) -> None:
    """A seal waits for the audits of its own group alone."""

    def own_passed(state: st.RunState, work: st.StepWork) -> bool:
        return any(
            merge.phase == st.REVEALED and all(entry.member in merge.passed for entry in merge.entries)
            for merge in work.merges
        )

    patch.setattr(audits, "is_audited", own_passed)
    patch.setattr(merges, "must_audit", always(False))


def accused(patch: Any) -> None:
    """Who stands accused stays a member."""
    patch.setattr(decide_cases, "_out", always([]))


def back(patch: Any) -> None:
    """A sealed lie stays."""
    patch.setattr(decide, "decide_rewind", always([]))


RULES: dict[str, Remove] = {rule.__name__: rule for rule in (passed, everywhere, accused, back)}


def hunt(rule: str, mode: str, lie: str, seeds: Iterable[int]) -> tuple[int, str] | None:
    """The first schedule that fails without the rule."""
    import pytest
    from audit_sim import AuditSim

    for seed in seeds:
        with pytest.MonkeyPatch.context() as patch:
            sim = AuditSim(seed, mode=mode, lie=lie, audit_ticks=4, checks_all=False)
            RULES[rule](patch)
            try:
                sim.run()
            except Exception as error:  # noqa: BLE001  any failure will do
                return seed, f"{type(error).__name__}: {error}"
    return None


if __name__ == "__main__":
    from test_audit_rules import FOUND

    for name, (mode, lie, _) in FOUND.items():
        print(f'    "{name}": ("{mode}", "{lie}", {hunt(name, mode, lie, range(200))})', flush=True)
