"""What the fold can't see of the promises about audits: that the leader redid what its seed drew, and that nobody judges alone.

Pure: :class:`Promises` is told each record before it is folded and says which of them a leader that keeps its promises would
not have written. Whether the leader redid what its own draw names can be said only once the block of the draw is known:
:meth:`Promises.undrawn`.
"""

from __future__ import annotations

import msgspec

from subnet.audit.draw import rate_of, seed, unit
from subnet.audit.ledger import WorkLedger
from subnet.run import audits
from subnet.run import events as ev
from subnet.run import state as st
from subnet.run.audit_parts import SHOWN
from subnet.run.state import RunState
from subnet.words import Member
from validator.follow_checks import Found

KEPT_WINDOWS = 8
"""For so many windows it is remembered what was opened, for another validator's audits that are still going on."""


class Closed(msgspec.Struct, frozen=True, array_like=True):
    """A window as it was closed: who led, and whom the rate of draws was raised for."""

    event: ev.WindowClosed
    branch: int
    leader: str
    marked: frozenset[str]


class _Case(msgspec.Struct, array_like=True):
    hotkey: str
    charge: str
    digest: str
    said: dict[str, str] = {}


class _Data(msgspec.Struct):
    last_block: int = -1
    open: dict[int, Closed] = {}
    """Closed, and not audited."""
    due: dict[int, Closed] = {}
    """Audited; whether all that the draw names was redone isn't known yet."""
    before: dict[int, set[tuple[int, Member]]] = {}
    """By step: (stage, member) redone before the seal."""
    opened: dict[int, set[tuple[int, str, Member]]] = {}
    """By step: (stage, validator, member) whose partial was to be redone after the seal."""
    cases: dict[int, _Case] = {}


_decoder = msgspec.msgpack.Decoder(_Data)


class Promises:
    """``look(state, event)`` before each event is folded; ``dump`` and ``load`` go with copies of the fold."""

    def __init__(self) -> None:
        self._data = _Data()

    def dump(self) -> bytes:
        return msgspec.msgpack.encode(self._data)

    def load(self, data: bytes) -> None:
        self._data = _decoder.decode(data)

    def look(self, state: RunState, event: ev.AnyEvent) -> list[Found]:
        if state.run is None or not st.config(state).audit.on:
            return []
        match event:
            case ev.StageSealed():
                self._sealed(state, event)
            case ev.AuditOpened() if event.number == 0:
                opened = self._data.opened.setdefault(event.step, set())
                opened |= {(event.stage, event.by, member) for member in event.members}
            case ev.WindowClosed():
                return self._closed(state, event)
            case ev.WindowAudited():
                self._audited(event)
            case ev.CaseOpened():
                self._data.cases[event.case] = _Case(event.hotkey, event.charge, event.digest)
            case ev.WitnessSaid() if event.case in self._data.cases:
                self._data.cases[event.case].said[event.hotkey] = event.digest
            case ev.CaseClosed():
                return self._case_closed(state, event)
            case ev.Rewound():
                return self._rewound(state, event)
            case _:
                pass
        return []

    def _sealed(self, state: RunState, event: ev.StageSealed) -> None:
        """Who was redone before the seal (the fold has no seal without it) isn't drawn after it."""
        if state.work is None or not 0 <= event.group < len(state.work.merges):
            return
        passed = state.work.merges[event.group].passed
        before = {(entry.stage, entry.member) for entry in event.entries if entry.member in passed}
        self._data.before.setdefault(event.step, set()).update(before)

    # --- windows -------------------------------------------------------------------------------------------------

    def _closed(self, state: RunState, event: ev.WindowClosed) -> list[Found]:
        data, found = self._data, list[Found]()
        if event.block < data.last_block:
            what = f"window {event.window} is drawn from block {event.block}, one before the last window's {data.last_block}"
            found.append(Found("windows", what))
        marked = frozenset(hotkey for hotkey, count in state.audits.marks.items() if count > 0)
        data.open[event.window] = Closed(event, audits.branch(state), state.leader, marked)
        data.last_block = event.block
        first = min(closed.event.first_step for closed in (*data.open.values(), *data.due.values()))
        oldest = first - KEPT_WINDOWS * st.config(state).audit.window_steps
        for kept in (data.before, data.opened):
            for step in [step for step in kept if step < oldest]:
                del kept[step]
        return found

    def _audited(self, event: ev.WindowAudited) -> None:
        closed = self._data.open.pop(event.window, None)
        if closed is not None:
            self._data.due[event.window] = closed

    def due(self) -> tuple[Closed, ...]:
        """Windows for :meth:`undrawn`, in order: their blocks are needed."""
        return tuple(self._data.due[window] for window in sorted(self._data.due))

    def undrawn(self, state: RunState, ledger: WorkLedger, closed: Closed, block_hash: str) -> list[Found]:
        """Sealed partials that the leader's own draw names and that it didn't redo; the window is done with.

        The rate is the lowest that it may have drawn with: who has been marked since counts as unmarked.
        """
        data, event = self._data, closed.event
        data.due.pop(event.window, None)
        run, missing = st.plan(state), list[str]()
        drawn_by = seed(run.run_id, closed.branch, event.window, block_hash, closed.leader)
        for step in range(event.first_step, event.last_step + 1):
            before, opened = data.before.get(step, set()), data.opened.get(step, set())
            for record in ledger.partials(step):
                member = record.member
                rate = rate_of(run.config.audit, unchecked=record.unchecked, marked=member.hotkey in closed.marked)
                if (record.stage, member) in before or unit(drawn_by, step, record.stage, member.hotkey) >= rate:
                    continue
                if (record.stage, closed.leader, member) not in opened:
                    missing.append(f"{member} at step {step} stage {record.stage}")
        if closed.leader != state.leader or closed.branch != audits.branch(state) or not missing:
            return []  # a later leader draws with its own hotkey
        return [Found("undrawn", f"window {event.window} was audited without {', '.join(missing)}")]

    def was_opened(self, step: int, stage: int, by: str) -> set[Member]:
        """Whose partials the leader journaled to be redone after their seal, for this validator."""
        return {member for s, hotkey, member in self._data.opened.get(step, ()) if (s, hotkey) == (stage, by)}

    # --- cases and rewinds ---------------------------------------------------------------------------------------

    def _case_closed(self, state: RunState, event: ev.CaseClosed) -> list[Found]:
        """Nobody is convicted of wrong work on one validator's word."""
        case = self._data.cases.get(event.case)
        if case is None:
            return [Found("case", f"case {event.case} is closed, which was never opened")]
        thirds = [hotkey for hotkey in case.said if hotkey not in (state.leader, case.hotkey)]
        agreeing = [hotkey for hotkey in thirds if case.said[hotkey] == case.digest]
        if event.outcome != "convicted" or case.charge in SHOWN or agreeing:
            return []
        return [
            Found("convicted_alone", f"case {event.case}: {case.hotkey} is convicted without a third party's replay")
        ]

    def _rewound(self, state: RunState, event: ev.Rewound) -> list[Found]:
        """Only for somebody who is convicted and whose sealed work hasn't been undone yet."""
        self._forget_from(event.step)
        if event.owner or state.convicted - state.audits.settled:
            return []  # that its owner has asked for it is the fold's to check
        return [Found("rewound", f"the run is rewound to step {event.step}, though no convict's work is left in it")]

    def _forget_from(self, step: int) -> None:
        """What is said of steps that are done again."""
        data = self._data
        for kept in (data.before, data.opened):
            for later in [k for k in kept if k >= step]:
                del kept[later]
        for windows in (data.open, data.due):
            for window in [w for w, closed in windows.items() if closed.event.last_step >= step]:
                del windows[window]
