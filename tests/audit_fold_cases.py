"""A small run with audits, event by event: two stages of two microbatches, members of which each has half of a stage."""

from __future__ import annotations

import pytest
import schedule_toy as toy

from subnet.run import audit_parts
from subnet.run import audits as au
from subnet.run import events as ev
from subnet.run import state as st
from subnet.run.apply import apply
from subnet.run.config import NO_AUDITS, AuditSection
from subnet.run.invariants import InvariantBroken, check
from subnet.run.schedule import step_scalars
from subnet.run.state_codec import dump_state, load_state
from subnet.words import Commitment, Member, Want

PROBATION = AuditSection(rate=0.5, before_seal="probation", probation_items=2, window_steps=1, open_windows=1)
REWIND = AuditSection(rate=0.5, before_seal="probation", probation_items=2, window_steps=1, open_windows=1, rewind=True)
ALL = AuditSection(rate=0.0, before_seal="all", window_steps=1, open_windows=1)
OFF = NO_AUDITS

A, B, C, D = (Member(hotkey, 1, number) for number, hotkey in enumerate("abcd", 1))
"""A and B serve stage 0, C and D stage 1."""
WANT = Want(0, 0, False, "x")


class Fold:
    """A state that is checked after each event; ``everybody`` joins at once unless told otherwise."""

    def __init__(self, audit: AuditSection = PROBATION, *, members: bool = True, **options: object) -> None:
        self.state = st.new_state()
        self.events: list[ev.AnyEvent] = []
        self.emit(
            toy.plan_run(2, 2, 4, audit=audit, snapshot_every=1, **options),  # type: ignore[arg-type]
            ev.TermStarted(1, "leader", "n"),
            ev.HardwareClassSet(("golden",), "operator"),
        )
        if members:
            self.join(A, 0), self.join(B, 0), self.join(C, 1), self.join(D, 1)

    def emit(self, *events: ev.AnyEvent) -> None:
        for event in events:
            apply(self.state, event)
            check(self.state)
            self.events.append(event)

    def join(self, member: Member, stage: int, coldkey: str = "") -> Member:
        boot = f"{member}"
        self.emit(ev.Joined(member, coldkey or f"cold-{member.hotkey}", stage, boot, "127.0.0.1", 1))
        return member

    # --- a step, as honest members do it

    def plan(self) -> int:
        step, run = self.state.next_step, st.config(self.state)
        scalars = step_scalars(run, step) if step >= 0 else None
        self.emit(ev.StepPlanned(step, 2, 0, scalars))
        return step

    def update(self) -> None:
        step = self.state.next_step
        for member, info in sorted(self.state.members.items()):
            if info.version != step:
                self.emit(ev.Updated(member, step, "" if step < 0 else f"root{info.stage}"))

    def work(self, step: int, holders: tuple[tuple[Member, Member], ...] = ((A, B), (C, D))) -> None:
        """Microbatch m of stage s by ``holders[s][m]``."""
        for stage, members in enumerate(holders):
            for m, member in enumerate(members):
                found = st.item(self.state, step, m, stage)
                assert found is not None
                generation = found.generation + 1
                forward = f"f{step}.{m}.{stage}" if stage == 0 else ""
                self.emit(ev.Leased(step, m, stage, member, generation))
                if stage == 0:
                    self.emit(ev.Forwarded(step, m, stage, generation, forward))
        for stage in (1, 0):
            for m in range(2):
                found = st.item(self.state, step, m, stage)
                assert found is not None
                output = f"b{step}.{m}.{stage}" if stage else ""
                loss = 0x3F800000 if stage else None
                self.emit(ev.Backwarded(step, m, stage, found.generation, output, loss))

    def freeze(self, step: int, group: int) -> int:
        work = self.state.work
        assert work is not None
        number = work.merges[group].number + 1
        self.emit(ev.Frozen(step, group, number))
        for member in sorted(st.holders(self.state, group)):
            hashes = tuple((p, f"{member.hotkey}{step}.{p}") for p in (0, 1))
            commitment = Commitment(member, group, st.done_set(self.state, member), hashes)
            self.emit(ev.Committed(step, group, number, commitment))
        return number

    def reduce(self, step: int, group: int) -> int:
        work = self.state.work
        assert work is not None
        merge = work.merges[group]
        entries = tuple(merge.commitments[member] for member in sorted(merge.commitments))
        entries = entries or merge.entries
        owners = (entries[0].member, entries[-1].member)
        version = merge.version + 1
        self.emit(ev.ReduceOrdered(step, group, version, entries, owners))
        return version

    def reveal(self, step: int, group: int, version: int) -> None:
        for p in (0, 1):
            self.emit(
                ev.PartitionMerged(step, group, version, p, f"h{step}.{group}.{p}", f"h{step}.{group}.{p}", 8, "1")
            )
        self.emit(ev.SeedRevealed(step, group, version, f"seed{version}"))
        work = self.state.work
        assert work is not None
        for entry in work.merges[group].entries:
            values = tuple((p, (1,)) for p in (0, 1))
            self.emit(ev.Fingerprinted(step, group, version, entry.member, group, values))
        for member in st.ready(self.state, group):
            self.emit(ev.Checked(step, group, version, member, True))

    def merged(self, step: int) -> None:
        """Both groups up to the point where only the audits are to be heard."""
        for group in (0, 1):
            self.freeze(step, group)
            self.reveal(step, group, self.reduce(step, group))

    def seal(self, step: int, group: int) -> None:
        work = self.state.work
        assert work is not None
        merge = work.merges[group]
        parts = [merge.merged[p] for p in range(len(merge.owners))]
        self.emit(
            ev.StageSealed(
                step,
                group,
                merge.version,
                merge.entries,
                tuple(part.hash for part in parts),
                tuple((part.blob, part.size_bytes) for part in parts),
                "2",
            )
        )

    def seal_step(self, step: int) -> None:
        for group in (0, 1):
            self.seal(step, group)
        self.emit(ev.StepSealed(step, 2, 0, 0, 0, 1))

    # --- audits

    def open(self, step: int, stage: int, members: tuple[Member, ...], *, number: int = 0, by: str = "leader") -> int:
        audit = self.state.audits.num_opened + 1
        work = self.state.work
        counts = tuple(1 for _ in members)
        if number and work is not None:
            held = {entry.member: len(entry.microbatches) for entry in work.merges[stage].entries}
            counts = tuple(held.get(member, -1) for member in members)
        self.emit(ev.AuditOpened(audit, step, stage, number, members, by, (WANT,), counts))
        return audit

    def pass_all(self, step: int) -> None:
        """What must be redone before its seal is, and is right."""
        work = self.state.work
        assert work is not None
        for group, merge in enumerate(work.merges):
            members = tuple(entry.member for entry in merge.entries)
            audit = self.open(step, group, members, number=merge.number)
            self.emit(ev.AuditClosed(audit, passed=members))

    def whole_step(self) -> int:
        self.audit_windows()
        step = self.plan()
        self.update()
        self.work(step)
        self.merged(step)
        if st.config(self.state).audit.on:
            self.pass_all(step)
        self.seal_step(step)
        return step

    def audit_windows(self) -> None:
        """Closes and ends every window whose steps are sealed."""
        run, audits = st.config(self.state), self.state.audits
        while run.audit.on and audits.next_window < au.num_windows(run):
            window = audits.next_window
            if self.state.next_step <= au.last_of(run, window):
                break
            first = max(au.first_of(run, window), audits.audited_to)
            self.emit(ev.WindowClosed(window, first, au.last_of(run, window), 5))
        for window in sorted(audits.windows):
            self.emit(ev.WindowAudited(window))

    def accuse(self, member: Member, *, charge: str = "partial", digest: str = "true", claimed: str = "claim") -> int:
        case = self.state.audits.num_cases + 1
        bundle = "" if charge in audit_parts.SHOWN else "bundle"
        step = self.state.next_step
        self.emit(ev.CaseOpened(case, member.hotkey, member, step, 0, charge, bundle, digest, False, claimed))
        if member in self.state.members:
            self.emit(ev.Gone(member, "accused"))
        return case

    def witness(self, case: int, member: Member, digest: str) -> None:
        self.emit(ev.WitnessAsked(case, member), ev.WitnessSaid(case, member.hotkey, digest))

    def convict(self, member: Member, witness: Member) -> int:
        case = self.accuse(member)
        self.witness(case, witness, "true")
        self.emit(ev.CaseClosed(case, "convicted"))
        return case


def refused(run: Fold, event: ev.AnyEvent, match: str) -> None:
    """The event can't follow; the fold it was tried on is thrown away."""
    tried = load_state(dump_state(run.state))
    with pytest.raises(InvariantBroken, match=match):
        apply(tried, event)
