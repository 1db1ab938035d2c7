"""Audits and cases of a simulated run, by the very folds and rules of a real one.

Who is on probation, whose work is redone before its seal, how often a partial is drawn, when a quarantine ends in a conviction
and when in a fault: :mod:`subnet.run.audits`, :mod:`subnet.run.audit_folds`, :mod:`subnet.audit.draw` over a
:class:`~subnet.run.state.RunState` that holds nothing else. The leader's verdict is passed in (:class:`Rules`). Aggregated: audits
of many members are closed in one event; a third party is asked and answers at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from subnet.audit.draw import rate_of
from subnet.chain.base import Hyperparameters, Metagraph
from subnet.run import audit_folds, audits
from subnet.run import events as ev
from subnet.run.config import AuditSection, ModelSection, RunConfig, RunSection
from subnet.run.state import MemberInfo, RunState, new_state
from subnet.score.score import Score
from subnet.words import GroupShape, Member

LEADER = "leader"
NUM_WITNESSES = 4
AT_ONCE = 16
"""Members of one audit event."""
RIGHT, CLAIMED = "right", "claimed"
"""Digests."""
CaseEvent = ev.WitnessAsked | ev.CaseClosed


@dataclass(frozen=True)
class Rules:
    """The parts of a validator that decide: given in, since this package knows no validator."""

    next_of_case: Callable[[RunState], CaseEvent | None]
    """What the leader does about the oldest open case."""
    weigh: Callable[[Metagraph, Mapping[str, Score], str, float, Hyperparameters], dict[int, float]]
    """Weights from scores, by uid: (metagraph, scores, own hotkey, burn share, rules of the subnet); {} where none can be set."""


class Court:
    def __init__(self, audit: AuditSection, rules: Rules) -> None:
        self.audit, self._rules = audit, rules
        self.state = new_state()
        self.state.run, self.state.leader, self.state.term = _planned(audit), LEADER, 1
        for number in range(NUM_WITNESSES):
            member = Member(f"witness-{number}", 1, number + 1)
            self.state.members[member] = MemberInfo(f"coldkey-{number}", 0, "", "", 0)
            self.state.audits.clean[member.hotkey] = audit.probation_items

    def in_probation(self, hotkey: str) -> bool:
        return audits.must_audit(self.state, hotkey) and audits.in_probation(self.state, hotkey)

    def must_audit(self, hotkey: str) -> bool:
        """Before the seal."""
        return self.audit.on and audits.must_audit(self.state, hotkey)

    def rate(self, hotkey: str, *, unchecked: bool = False) -> float:
        """Probability that a sealed partial of it is drawn."""
        return rate_of(self.audit, unchecked=unchecked, marked=self.state.audits.marks.get(hotkey, 0) > 0)

    def passed(self, redone: list[tuple[Member, int]]) -> None:
        """(member, items): redone, and right."""
        for first in range(0, len(redone), AT_ONCE):
            some = redone[first : first + AT_ONCE]
            members = tuple(member for member, _ in some)
            number = self.state.audits.num_opened + 1
            audit_folds.note_audit_opened(
                self.state, ev.AuditOpened(number, -1, 0, 0, members, LEADER, (), tuple(items for _, items in some))
            )
            audit_folds.apply_audit_closed(self.state, ev.AuditClosed(number, passed=members))

    def accuse(self, member: Member, coldkey: str, *, sealed: bool) -> tuple[int, str]:
        """A sum that isn't that of its items: the number of the case and its outcome."""
        state = self.state
        state.audits.coldkeys[member.hotkey] = coldkey
        number = state.audits.num_cases + 1
        opened = ev.CaseOpened(
            number, member.hotkey, member, -1, 0, audits.PARTIAL, "bundle", RIGHT, sealed, claimed=CLAIMED
        )
        audit_folds.apply_case_opened(state, opened)
        while True:
            event = self._rules.next_of_case(state)
            match event:
                case ev.WitnessAsked():
                    audit_folds.apply_witness_asked(state, event)
                    audit_folds.apply_witness_said(state, ev.WitnessSaid(number, event.member.hotkey, RIGHT))
                case ev.CaseClosed():
                    audit_folds.apply_case_closed(state, event)
                    return number, event.outcome
                case None:
                    raise RuntimeError(f"case {number} comes to no end")

    def forget(self, hotkey: str) -> None:
        """It is out for good: nobody asks for its record again."""
        for record in (self.state.audits.clean, self.state.audits.marks, self.state.audits.coldkeys):
            record.pop(hotkey, None)


def _planned(audit: AuditSection) -> ev.RunPlanned:
    config = RunConfig(run=RunSection(name="incentives", steps=10_000_000), model=ModelSection(config={}), audit=audit)
    group = GroupShape(stages=(0,), partitions=((0,),))
    return ev.RunPlanned(
        run_id="incentives",
        config=config,
        model_config={},
        unit_tensors=(),
        unit_flops_per_token=(),
        tied=None,
        cuts=(0,),
        groups=(group,),
        data="",
        snapshot="",
        tokenizer="",
        submitter="",
    )
