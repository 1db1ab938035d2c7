"""Rewinds and new terms in the fold: where a run can go back to, what ends with it, and that any copy folds on to the same."""

from __future__ import annotations

import pytest
from audit_fold_cases import PROBATION, REWIND, A, B, C, Fold, refused

from subnet.run import audits as au
from subnet.run import events as ev
from subnet.run import state as st
from subnet.run.apply import apply, fold
from subnet.run.events import Record
from subnet.run.state_codec import dump_state, load_state, state_bytes
from subnet.words import Member


def rewound(steps: int = 3) -> tuple[Fold, int]:
    run = Fold(REWIND)
    for _ in range(steps):
        run.whole_step()
    return run, run.convict(A, C)


def test_a_rewind_takes_the_run_back_and_ends_every_incarnation():
    run, case = rewound()
    run.audit_windows()
    assert (run.state.next_step, run.state.audits.next_window) == (2, 2)
    run.emit(ev.Rewound(0, 1, case))
    state = run.state
    assert (state.next_step, sorted(state.sealed), state.work, state.members) == (0, [-1], None, {})
    assert (au.branch(state), state.audits.next_window, state.audits.audited_to) == (1, 0, 0)
    assert state.audits.settled == {"a"}
    assert state.convicted == {"a"}
    refused(run, ev.WindowClosed(0, -1, 0, 1), "has steps")
    members = (Member("b", 1, 11), Member("c", 1, 12), Member("d", 1, 13))
    for member, stage in zip(members, (0, 1, 1), strict=True):
        run.join(member, stage)
    step = run.plan()
    assert step == 0
    run.update()
    run.work(step, ((members[0], members[0]), (members[1], members[2])))
    run.merged(step)
    run.pass_all(step)
    run.seal_step(step)
    run.emit(ev.WindowClosed(0, 0, 0, 9))
    assert run.state.audits.windows[0].first_step == 0, "what was audited before the rewind stays so"


REWINDS: dict[str, tuple[ev.AnyEvent, str]] = {
    "the same branch": (ev.Rewound(0, 0, 1), "branch 0 follows 0"),
    "a branch left out": (ev.Rewound(0, 2, 1), "branch 2 follows 0"),
    "no conviction": (ev.Rewound(0, 1, 7), "is no conviction"),
    "forward": (ev.Rewound(3, 1, 1), "can't be gone back to"),
    "before the run": (ev.Rewound(-2, 1, 1), "can't be gone back to"),
}


@pytest.mark.parametrize("what", sorted(REWINDS))
def test_a_rewind_that_is_refused(what: str):
    event, match = REWINDS[what]
    refused(rewound()[0], event, match)


def test_a_run_without_rewinds_is_never_rewound():
    run = Fold(PROBATION)
    run.whole_step()
    case = run.convict(A, C)
    refused(run, ev.Rewound(-1, 1, case), "without rewinds")


def test_nobody_goes_back_behind_what_can_be_restored():
    run, case = rewound()
    state = run.state
    assert au.oldest_restorable(state) == -1
    del state.sealed[-1]
    assert au.oldest_restorable(state) == state.next_step, "no snapshot, and the log doesn't reach back"
    for stage in (0, 1):
        state.snapshots[stage] = [st.StoredSnapshot(0, f"m{stage}", "r", "b", "cold-b", verified=True)]
    assert au.oldest_restorable(state) == 0
    state.snapshots[1] = [st.StoredSnapshot(0, "m1", "r", "b", "cold-b", verified=False)]
    assert au.oldest_restorable(state) == state.next_step, "nobody else has that state"
    refused(run, ev.Rewound(0, 1, case), "can't be gone back to")


def test_a_rewind_drops_unverified_snapshots_of_the_convicted():
    run, case = rewound()
    of = {"a": False, "b": False, "c": True}
    run.state.snapshots[0] = [
        st.StoredSnapshot(1, hotkey, "r", hotkey, f"cold-{hotkey}", verified=verified)
        for hotkey, verified in of.items()
    ]
    run.emit(ev.Rewound(1, 1, case))
    assert [snapshot.hotkey for snapshot in run.state.snapshots[0]] == ["b", "c"]


def test_an_audit_of_what_is_undone_ends_with_it():
    run, case = rewound()
    old = run.open(-1, 0, (B,))
    run.open(1, 0, (B,))
    run.open(1, 1, (C,), by="follower")
    run.emit(ev.Rewound(0, 1, case))
    assert list(run.state.audits.open) == [old]


# --- terms, and the fold as a whole ----------------------------------------------------------------------------------


def test_a_new_term_ends_audits_of_what_isnt_sealed_and_takes_over_the_others():
    run = Fold(PROBATION)
    sealed = run.whole_step()
    run.audit_windows()
    step = run.plan()
    run.update()
    run.work(step)
    run.merged(step)
    mine = run.open(sealed, 0, (A,))
    others = run.open(sealed, 0, (A,), by="follower")
    run.open(step, 0, (A, B), number=1)
    case = run.accuse(B)
    run.emit(ev.TermStarted(2, "next", "m"))
    found = run.state.audits.open
    assert {number: audit.by for number, audit in found.items()} == {mine: "next", others: "follower"}
    assert run.state.audits.quarantined == {"b": case}, "a case outlives a leader"


def test_copies_at_every_event_fold_on_to_the_same_bytes():
    run, case = rewound()
    run.open(0, 0, (B,))
    run.emit(ev.Rewound(0, 1, case))
    run.join(Member("b", 1, 20), 0)
    whole = [Record(number, 0, event) for number, event in enumerate(run.events)]
    assert state_bytes(fold(whole)) == state_bytes(run.state)
    for cut in range(1, len(whole), 7):
        state = load_state(dump_state(fold(whole[:cut])))
        for record in whole[cut:]:
            apply(state, record.event)
        assert state_bytes(state) == state_bytes(run.state), cut
