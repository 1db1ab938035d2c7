"""Each rule of audits, and how to remove it: named small functions of the production code, replaced in a test.

As :mod:`schedule_rules`: ``RULES[name](patch)`` removes the rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from schedule_rules import always

from miner import owed, owed_merges, owed_mismatch
from miner.local_view import LocalView
from subnet.audit import build, ledger
from subnet.protocol.messages import BackwardReceipt, ForwardReceipt
from subnet.run import apply, audits, merges, work
from subnet.run import events as ev
from subnet.run import state as st
from subnet.words import Member
from validator import close_audits, decide, decide_audits, decide_cases
from validator.audit_watch import AuditWatch
from validator.decision import Decision

if TYPE_CHECKING:
    from audit_sim import AuditSim

Remove = Callable[[Any], None]
NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})


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


def stale(patch: Any) -> None:
    """A sum with an input that was made again otherwise stands."""

    def gone_alone(state: st.RunState) -> list[Decision]:
        return [one for one in decide_audits.decide_stale(state) if isinstance(one.what, ev.Gone)]

    patch.setattr(decide, "decide_stale", gone_alone)


def compared(patch: Any) -> None:
    """Members work with what they were sent, whatever is receipted."""
    for module in (owed, owed_merges, owed_mismatch):
        patch.setattr(module, "wrong_input", always(None))


def again(patch: Any) -> None:
    """A sum that is void because of its inputs is dealt to anybody."""
    real = work.void_partial

    def void_partial(state: st.RunState, open_work: st.StepWork, member: Member, *, again: bool = False) -> None:
        real(state, open_work, member)

    patch.setattr(work, "void_partial", void_partial)


def fickle(patch: Any) -> None:
    """Who contradicts itself goes on."""
    patch.setattr(work, "MOST_CONTRADICTIONS", 10**9)


def version(patch: Any) -> None:
    """What was redone for one manifest counts for the next."""
    patch.setattr(close_audits, "_is_of_this_version", always(True))


def before(patch: Any) -> None:
    """Steps begin while their windows wait for audits."""
    patch.setattr(audits, "may_plan", always(True))
    patch.setattr(apply, "may_plan", always(True))


def answers(patch: Any) -> None:
    """A member says nothing of what it has receipted and has lost since."""
    real = LocalView.note_receipt

    def note_receipt(local: LocalView, claim: ForwardReceipt | BackwardReceipt) -> None:
        real(local, claim)
        local.produced.clear()

    patch.setattr(LocalView, "note_receipt", note_receipt)


def held(patch: Any) -> None:
    """Of equally many coldkeys that differ about a root the first goes on."""

    def first(state: st.RunState, stage: int) -> str | None:
        reported = state.roots.get(stage)
        return max(reported, key=lambda root: len(reported[root])) if reported else None

    for module in (st, build, ledger):
        patch.setattr(module, "agreed_root", first)


def shown(patch: Any) -> None:
    """Who receives what is no numbers only says that it has nothing."""
    patch.setattr(decide, "decide_unusable", always([]))


def differs(patch: Any) -> None:
    """Who differs with others about boundaries again and again only loses its sum each time."""
    patch.setattr(AuditWatch, "differ", always((0, (1, 1))))


RULES: dict[str, Remove] = {
    rule.__name__: rule
    for rule in (
        passed,
        everywhere,
        accused,
        back,
        stale,
        compared,
        again,
        fickle,
        version,
        before,
        answers,
        held,
        shown,
        differs,
    )
}


def schedule(seed: int, mode: str, lie: str, options: Mapping[str, Any]) -> AuditSim:
    """One that rules are tried on: an audit takes its time."""
    from audit_sim import AuditSim

    chosen: dict[str, Any] = {"audit_ticks": 4, **options}
    return AuditSim(seed, mode=mode, lie=lie, checks_all=False, **chosen)


def hunt(
    rule: str, mode: str, lie: str, seeds: Iterable[int], options: Mapping[str, Any] = NO_OPTIONS
) -> tuple[int, str] | None:
    """The first schedule that fails without the rule."""
    import pytest

    for seed in seeds:
        with pytest.MonkeyPatch.context() as patch:
            sim = schedule(seed, mode, lie, options)
            RULES[rule](patch)
            try:
                sim.run()
            except Exception as error:  # noqa: BLE001  any failure will do
                return seed, f"{type(error).__name__}: {error}"
    return None


if __name__ == "__main__":
    from test_audit_rules import FOUND

    for name, (mode, lie, _, options) in FOUND.items():
        print(f'    "{name}": ("{mode}", "{lie}", {hunt(name, mode, lie, range(200), options)})', flush=True)
