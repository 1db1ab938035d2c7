"""Whoever follows sees from the journal alone which of the audits that the run file promises weren't done."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from follow_cases import AUDIT, Audited, block_hash
from lead_cases import FIRST, SECOND

from subnet.audit.ledger import WorkLedger
from subnet.run import events as ev
from subnet.run.apply import apply
from subnet.run.invariants import InvariantBroken
from subnet.run.state import new_state
from subnet.words import Member
from validator.follow_promises import Promises

SEEDS = (5, 36, 44, 54)
"""Three steps each; in 36 and 44 another leader takes over."""


def found_in(events: Sequence[ev.AnyEvent], *, restart: int = -1) -> list[str]:
    """Codes of the breaches, in order; draws are looked at as soon as their windows are audited."""
    state, ledger, promises, found = new_state(), WorkLedger(), Promises(), list[str]()
    for number, event in enumerate(events):
        if number == restart:
            again = Promises()
            again.load(promises.dump())
            promises = again
        found += [f.code for f in promises.look(state, event)]
        ledger.note(state, event)
        apply(state, event)
        for closed in promises.due():
            found += [f.code for f in promises.undrawn(state, ledger, closed, block_hash(closed.event.block))]
    assert promises.due() == ()
    return found


@pytest.mark.parametrize("seed", SEEDS)
def test_a_leader_that_keeps_its_promises(seed: int) -> None:
    events = Audited(seed).events
    assert sum(isinstance(event, ev.AuditOpened) and event.number > 0 for event in events) > 0
    assert sum(isinstance(event, ev.WindowAudited) for event in events) > 0
    assert found_in(events) == []
    assert found_in(events, restart=len(events) // 2) == []


def test_draws_after_the_seal_are_seen_at_all() -> None:
    """A test of the test: in some of these journals the leader's seed draws somebody."""
    opened = [event for seed in SEEDS for event in Audited(seed).events if isinstance(event, ev.AuditOpened)]
    assert any(event.number == 0 for event in opened)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_sum_that_is_sealed_without_its_audit_cannot_be_folded(seed: int) -> None:
    with pytest.raises(InvariantBroken, match="passed their audit"):
        Audited(seed, omit="before")


def test_a_drawn_partial_that_is_not_redone() -> None:
    found = [found_in(Audited(seed, omit="drawn").events) for seed in SEEDS]
    assert ["undrawn"] in found
    assert all(codes in ([], ["undrawn"]) for codes in found)


def test_a_run_that_ends_before_its_last_window_is_audited_cannot_be_folded() -> None:
    with pytest.raises(InvariantBroken, match="before it is audited"):
        Audited(5, omit="window")


def test_a_run_that_runs_away_from_its_audits_cannot_be_folded() -> None:
    kept = Audited(5, msgspec.structs.replace(AUDIT, open_windows=1), delay=1)
    assert found_in(kept.events) == []
    late = [event for event in kept.events if not isinstance(event, ev.WindowAudited)]
    with pytest.raises(InvariantBroken, match="kept up"):
        found_in(late)


def test_windows_that_are_drawn_from_an_older_block() -> None:
    events = [
        msgspec.structs.replace(event, block=200 - event.window) if isinstance(event, ev.WindowClosed) else event
        for event in Audited(5, msgspec.structs.replace(AUDIT, rate=0.0, before_seal="all")).events
    ]
    assert set(found_in(events)) == {"windows"}


# --- cases ---------------------------------------------------------------------------------------------------------


def case_of(*said: tuple[str, str], outcome: str = "convicted", charge: str = "partial") -> list[str]:
    """A case against a member that has left, closed after these words of third parties."""
    journal = Audited(5)
    del journal.events[-1]  # the end
    member = Member("liar", 1, 77)
    journal.events.append(ev.CaseOpened(1, "liar", member, 0, 0, charge, "ab" * 32, "right", True))
    journal.events += [ev.WitnessSaid(1, hotkey, digest) for hotkey, digest in said]
    journal.events.append(ev.CaseClosed(1, outcome))
    return found_in(journal.events)


def test_nobody_is_convicted_on_one_word() -> None:
    for said in ([], [("somebody", "another digest")]):
        with pytest.raises(InvariantBroken, match="no third party"):
            case_of(*said)
    assert case_of((FIRST.hotkey, "right")) == ["convicted_alone"]  # it leads
    assert case_of(("somebody", "right")) == []
    assert case_of(("somebody", "no"), (SECOND.hotkey, "right")) == []
    assert case_of(charge="unopened") == []
    assert case_of(outcome="unconfirmed") == []


def test_a_rewind_needs_a_convict_whose_work_is_left() -> None:
    promises, state = Promises(), new_state()
    for event in Audited(5, msgspec.structs.replace(AUDIT, rewind=True)).events[:-1]:
        apply(state, event)
    assert [f.code for f in promises.look(state, ev.Rewound(0, 1, 0))] == ["rewound"]
    state.convicted.add("liar")
    assert promises.look(state, ev.Rewound(0, 1, 0)) == []
    state.audits.settled.add("liar")
    assert [f.code for f in promises.look(state, ev.Rewound(0, 1, 0))] == ["rewound"]
