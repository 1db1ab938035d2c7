"""Whose items of the open steps are done, and what is owed for those that a lie of somebody else made void.

An item counts as done from its receipt to whatever opens it again. Work is void for another's lie when the fold voids it because
an input was made again (``inputs``), and in the same step and branch a lie of another hotkey is established, before or after.
"""

from __future__ import annotations

import msgspec

from subnet.words import Member

MAX_WAITING = 1024
"""Voids that wait for a lie to be established: the last ones."""
MAX_LIES = 1024


class Void(msgspec.Struct, frozen=True, array_like=True):
    """Items of a member that were done and have to be done again."""

    step: int
    stage: int
    member: Member
    time_s: float
    items: int


class OpenStep(msgspec.Struct):
    held: dict[tuple[int, int], Member] = {}
    """By (microbatch, stage): who has the lease, or had it last."""
    done: dict[int, dict[int, Member]] = {}
    """By stage and microbatch: training items that are done and not sealed."""


class Steps(msgspec.Struct):
    open: dict[int, OpenStep] = {}
    waiting: list[Void] = []
    lies: dict[int, list[str]] = {}
    """By step of the present branch: hotkeys whose lie is established."""

    def leased(self, step: int, microbatch: int, stage: int, member: Member) -> None:
        work = self.open.get(step)
        if work is None:
            work = self.open[step] = OpenStep()
        work.held[microbatch, stage] = member
        if stage in work.done:
            work.done[stage].pop(microbatch, None)

    def holder(self, step: int, microbatch: int, stage: int) -> Member | None:
        work = self.open.get(step)
        return work.held.get((microbatch, stage)) if work is not None else None

    def done(self, step: int, microbatch: int, stage: int, member: Member) -> None:
        self.open[step].done.setdefault(stage, {})[microbatch] = member

    def void(self, step: int, stage: int, member: Member) -> int:
        """The member's items of (step, stage) are open again; how many of them were done."""
        done = self.open[step].done.get(stage, {}) if step in self.open else {}
        lost = [m for m, holder in done.items() if holder == member]
        for m in lost:
            del done[m]
        return len(lost)

    def skip(self, step: int, microbatch: int) -> None:
        """The partials of all who hold or held the microbatch are void."""
        work = self.open.get(step)
        for (m, stage), member in list(work.held.items()) if work is not None else ():
            if m == microbatch:
                self.void(step, stage, member)

    def drop(self, member: Member) -> None:
        """The incarnation is gone: what isn't sealed of it is void."""
        for step, work in self.open.items():
            for stage in work.done:
                self.void(step, stage, member)

    def stage_sealed(self, step: int, stage: int) -> None:
        if step in self.open:
            self.open[step].done.pop(stage, None)

    def step_sealed(self, step: int) -> None:
        for old in [old for old in self.open if old <= step]:
            del self.open[old]

    def all_done(self, now_s: float) -> list[Void]:
        """Everything that is done and not sealed, by (step, stage, member)."""
        counts: dict[tuple[int, int, Member], int] = {}
        for step, work in self.open.items():
            for stage, done in work.done.items():
                for member in done.values():
                    counts[step, stage, member] = counts.get((step, stage, member), 0) + 1
        return [Void(step, stage, member, now_s, n) for (step, stage, member), n in sorted(counts.items())]

    def void_for_inputs(self, void: Void) -> bool:
        """Whether it is to be paid now; else it is kept, in case that a lie is established."""
        if any(hotkey != void.member.hotkey for hotkey in self.lies.get(void.step, ())):
            return True
        self.waiting = [*self.waiting, void][-MAX_WAITING:]
        return False

    def lied(self, step: int, hotkey: str) -> list[Void]:
        """It is established that the hotkey's work of the step was a lie: what others are owed for it."""
        known = self.lies.setdefault(step, [])
        if hotkey not in known:
            known.append(hotkey)
        for old in sorted(self.lies)[:-MAX_LIES]:
            del self.lies[old]
        owed = [void for void in self.waiting if void.step == step and void.member.hotkey != hotkey]
        self.waiting = [void for void in self.waiting if void not in owed]
        return owed

    def rewound(self, step: int) -> None:
        """Steps from ``step`` on begin anew; nothing is open."""
        self.open = {}
        self.waiting = [void for void in self.waiting if void.step < step]
        self.lies = {old: hotkeys for old, hotkeys in self.lies.items() if old < step}
