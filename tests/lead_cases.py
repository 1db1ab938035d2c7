"""A run as the log store has it: a submission, a journal cut into signed segments, and a store that a test can spoil."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from model_cases import tiny_plan

from subnet.errors import Exists, NotFound, Unreachable
from subnet.protocol import wire
from subnet.protocol.api import RunSubmission
from subnet.protocol.signing import Signer, sign_statement
from subnet.run import events as ev
from subnet.run.chain_hash import GENESIS_HEAD, fold_heads, next_head
from subnet.store.base import NamedKey
from subnet.timing import Deadline
from subnet.words import PROTOCOL_VERSION, Member
from validator.log_publisher import SegmentFile, segment_key
from validator.run_archive import run_key
from validator.run_registry import RunEntry, StoredRun, plan_submission, run_planned

FIRST, SECOND = Signer.from_uri("//Alice"), Signer.from_uri("//Bob")
HEX = "ab" * 32


class Keys:
    """Named keys, as strict as the real store's."""

    def __init__(self) -> None:
        self.keys: dict[str, bytes] = {}
        self.down = False

    async def put_named(self, name: str, data: bytes, *, deadline: Deadline) -> None:
        self._answers()
        if name in self.keys and self.keys[name] != bytes(data):
            raise Exists(name)
        self.keys[name] = bytes(data)

    async def get_named(self, name: str, *, deadline: Deadline) -> bytes:
        self._answers()
        if name not in self.keys:
            raise NotFound(name)
        return self.keys[name]

    async def list_named(self, prefix: str, *, deadline: Deadline) -> Sequence[NamedKey]:
        self._answers()
        return [NamedKey(name, len(data)) for name, data in sorted(self.keys.items()) if name.startswith(prefix)]

    def _answers(self) -> None:
        if self.down:
            raise Unreachable("the store is down")


def submission(name: str) -> RunSubmission:
    plan = tiny_plan((0, 2))
    config = msgspec.structs.replace(plan.config, run=msgspec.structs.replace(plan.config.run, name=name))
    return RunSubmission(
        version=PROTOCOL_VERSION,
        config=wire.encode(config),
        model_config=dict(plan.model_config),
        unit_tensors=plan.units.units,
        unit_flops_per_token=plan.units.unit_flops_per_token,
        unit_costs=tuple(1.0 for _ in plan.units.units),
        tied=plan.units.tied,
        data=HEX,
        snapshot=HEX,
        tokenizer=HEX,
        cuts=plan.cuts,
    )


@dataclass
class Run:
    """A run's journal, put into ``keys`` segment by segment."""

    keys: Keys
    name: str = "tiny"
    run_id: str = ""
    start_ns: int = 1_000
    records: list[bytes] = field(default_factory=list)
    segments: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.run_id = self.run_id or f"{self.name}-00000001"
        self.stored = StoredRun(self.run_id, self.name, 0, FIRST.hotkey, submission(self.name))
        self.keys.keys[run_key(self.run_id)] = wire.encode(self.stored)

    @property
    def planned(self) -> ev.RunPlanned:
        config, plan = plan_submission(self.stored.submission)
        return run_planned(RunEntry(self.stored, config, plan, Path()))

    def say(self, *events: ev.AnyEvent) -> None:
        for event in events:
            number = len(self.records)
            self.records.append(wire.encode(ev.Record(number, self.start_ns + number, event)))

    def segment(self, signer: Signer = FIRST) -> SegmentFile:
        """Everything said since the last one."""
        first = self.segments[-1][1] if self.segments else 0
        records = tuple(self.records[first:])
        head = fold_heads(GENESIS_HEAD, self.records)
        signature = sign_statement(signer, "journal-head", head.encode())
        return SegmentFile(self.run_id, len(self.segments), first, records, head, signer.hotkey, signature)

    def put(self, *events: ev.AnyEvent, signer: Signer = FIRST) -> None:
        self.say(*events)
        segment = self.segment(signer)
        self.keys.keys[segment_key(self.run_id, segment.number)] = wire.encode(segment)
        self.segments.append((segment.first, len(self.records)))

    def begin(self) -> Run:
        """Three segments of one leader: the start, two members, a step."""
        self.put(self.planned, ev.TermStarted(1, FIRST.hotkey, "n1"))
        members = [Member(f"miner-{stage}", 1, stage + 1) for stage in range(2)]
        self.put(*(ev.Joined(member, "cold", s, "boot", "127.0.0.1", 1) for s, member in enumerate(members)))
        self.put(ev.Updated(members[0], -1, ""), ev.StepPlanned(-1, 4, 0, None))
        return self

    def finish(self) -> Run:
        """As if it had ended; only its last segment is looked at."""
        self.put(ev.RunFinished(4, "root"))
        return self

    def spoil(self, number: int, **changes: object) -> None:
        """Put a segment that says something else; its head and signature fit unless they are among the changes."""
        key = segment_key(self.run_id, number)
        segment = msgspec.structs.replace(
            wire.decode(self.keys.keys[key], SegmentFile, limit_bytes=1 << 20, what=key), **changes
        )
        if "records" in changes and "head" not in changes:
            before = fold_heads(GENESIS_HEAD, self.records[: segment.first])
            head = before
            for data in segment.records:
                head = next_head(head, data)
            signature = sign_statement(FIRST, "journal-head", head.encode())
            segment = msgspec.structs.replace(segment, head=head, signature=signature)
        self.keys.keys[key] = wire.encode(segment)
