"""A run without surprises as a journal of any length: every event a calm run has, in order, in sizes like a real one's."""

from __future__ import annotations

from collections.abc import Iterator

from blake3 import blake3
from schedule_toy import plan_run

from subnet.run import events as ev
from subnet.run.schedule import step_scalars
from subnet.words import Commitment, GroupShape, Member

SECOND_NS = 1_000_000_000


def name(*parts: object) -> str:
    return blake3(repr(parts).encode()).hexdigest()


class LongRun:
    """``records(n)``: the first n records, each call the same; a step has about ``3 * stages * microbatches`` of them."""

    def __init__(
        self, *, members: int = 4, stages: int = 2, microbatches: int = 4, steps: int = 1000, snapshot_every: int = 5
    ) -> None:
        self.stages, self.microbatches, self.steps, self.snapshot_every = stages, microbatches, steps, snapshot_every
        self.members = [[self._member(i, stage) for i in range(stage, members, stages)] for stage in range(stages)]
        planned = plan_run(stages, microbatches, steps, snapshot_every=snapshot_every)
        partitions = [len(replicas) for replicas in self.members]
        self.groups = tuple(GroupShape((s,), ((s,),) * partitions[s]) for s in range(stages))
        self.planned = ev.RunPlanned(
            **{field: getattr(planned, field) for field in planned.__struct_fields__} | {"groups": self.groups}
        )

    def _member(self, index: int, stage: int) -> Member:
        return Member(f"5{name('hotkey', index)[:47]}", 1, index)

    def records(self, count: int) -> tuple[ev.Record, ...]:
        return tuple(self.stream(count))

    def stream(self, count: int) -> Iterator[ev.Record]:
        for number, event in zip(range(count), self._events(), strict=False):
            yield ev.Record(number, (1_700_000_000 + number) * SECOND_NS, event)

    def _events(self) -> Iterator[ev.AnyEvent]:
        yield self.planned
        yield ev.TermStarted(1, f"5{name('leader')[:47]}", "nonce")
        yield ev.HardwareClassSet(("class",), "operator")
        for stage, replicas in enumerate(self.members):
            for member in replicas:
                yield ev.Joined(member, f"cold{member.number}", stage, name("boot", member)[:16], "10.0.0.1", 8091)
        for step in range(-1, self.steps):
            yield from self._updates(step)
            yield from self._step(step)

    def _updates(self, step: int) -> Iterator[ev.AnyEvent]:
        due = step > 0 and step % self.snapshot_every == 0
        for stage, replicas in enumerate(self.members):
            root = name("root", step, stage)
            for member in replicas:
                yield ev.Updated(member, step, root)
            if due:
                yield ev.SnapshotOrdered(step, stage, replicas[0])
                yield ev.SnapshotStored(step, stage, replicas[0], name("manifest", step, stage), root)

    def _step(self, step: int) -> Iterator[ev.AnyEvent]:
        scalars = None if step < 0 else step_scalars(self.planned.config, step)
        yield ev.StepPlanned(step, self.microbatches, 0, scalars)
        for m in range(self.microbatches):
            for stage, replicas in enumerate(self.members):
                yield ev.Leased(step, m, stage, replicas[m % len(replicas)], 1)
            for stage in range(self.stages):
                yield ev.Forwarded(step, m, stage, 1, name("f", step, m, stage))
            for stage in reversed(range(self.stages)):
                loss = 1_000 if stage == self.stages - 1 else None
                yield ev.Backwarded(step, m, stage, 1, name("b", step, m, stage), loss)
        for group in range(self.stages):
            yield from self._merge(step, group)
        yield ev.StepSealed(
            step, self.microbatches, 4_607_182_418_800_017_408, 1_065_353_216, 0, self.microbatches * 256
        )

    def _merge(self, step: int, group: int) -> Iterator[ev.AnyEvent]:
        yield ev.Frozen(step, group, 1)
        replicas = self.members[group]
        partitions = range(len(replicas))
        entries: list[Commitment] = []
        for index, member in enumerate(replicas[: self.microbatches]):
            sums = tuple(range(index, self.microbatches, len(replicas)))
            hashes = tuple((p, name("slice", step, group, p, index)) for p in partitions)
            entries.append(Commitment(member, group, sums, hashes))
            yield ev.Committed(step, group, 1, entries[-1])
        yield ev.ReduceOrdered(step, group, 1, tuple(entries), tuple(replicas))
        merged = [(name("merged", step, group, p), name("blob", step, group, p), 1_000_000) for p in partitions]
        for p, (digest, blob, size_bytes) in enumerate(merged):
            yield ev.PartitionMerged(step, group, 1, p, digest, blob, size_bytes, "ffff")
        yield ev.SeedRevealed(step, group, 1, name("seed", step, group)[:16])
        for entry in entries:
            yield ev.Fingerprinted(step, group, 1, entry.member, group, tuple((p, (2**60,)) for p in partitions))
        for member in replicas:
            yield ev.Checked(step, group, 1, member, True)
        blobs = tuple((blob, size_bytes) for _, blob, size_bytes in merged)
        hashes = tuple(digest for digest, _, _ in merged)
        yield ev.StageSealed(step, group, 1, tuple(entries), hashes, blobs, "ffff")
