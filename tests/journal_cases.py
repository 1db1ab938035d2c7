"""A coordinator without a network: journals of random schedules emitted event by event, a log store in memory."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from loguru import logger
from schedule_sim import Sim

from subnet.errors import Exists, NotFound
from subnet.protocol.signing import Signer
from subnet.run import events as ev
from subnet.run.config import NO_AUDITS, ModelSection, RunConfig, RunSection
from subnet.timing import Deadline, ManualClock
from subnet.words import GroupShape
from validator.coordinator import Coordinator
from validator.copier import CopyPolicy
from validator.journal_store import JournalStore
from validator.log_publisher import LogPublisher
from validator.tasks import Completion

LEADER = Signer.from_uri("//Leader")
SEEDS = (5, 34, 36, 44, 54, 59)
"""Three steps each; in 36, 44 and 59 another leader takes over."""
OFTEN = CopyPolicy(records=8, size_bytes=1 << 30, records_after_snapshot=4)
"""At each StepSealed, and at each quorum event that is 32 records behind the last copy."""


NEVER = CopyPolicy(records=10**9, size_bytes=1 << 60, records_after_snapshot=10**9)
PLANNED = ev.RunPlanned(
    run_id="r",
    config=RunConfig(audit=NO_AUDITS, run=RunSection(name="r"), model=ModelSection(config={"model_type": "llama"})),
    model_config={},
    unit_tensors=(),
    unit_flops_per_token=(1.0, 1.0, 1.0),
    tied=None,
    cuts=(0,),
    groups=(GroupShape((0,), ((0,),)),),
    data="",
    snapshot="",
    tokenizer="",
    submitter="",
)


@functools.cache
def records_of(seed: int) -> tuple[ev.Record, ...]:
    sim = Sim(seed, checks_all=False)
    sim.run()
    return tuple(sim.coordinator.journal)


class Keys:
    """A store of named keys in memory."""

    def __init__(self) -> None:
        self.keys: dict[str, bytes] = {}

    async def put_named(self, name: str, data: bytes, *, deadline: Deadline) -> None:
        if name in self.keys:
            raise Exists(name)
        self.keys[name] = bytes(data)

    async def get_named(self, name: str, *, deadline: Deadline) -> bytes:
        if name not in self.keys:
            raise NotFound(name)
        return self.keys[name]


class NoTasks:
    """Performs nothing."""

    def bind(self, complete: object) -> None:
        self.complete = complete

    async def stored(self, claim: object, blobs: Sequence[str]) -> list[str]:
        return list(blobs)

    async def probe_store(self) -> str:
        return ""

    async def perform(self, action: object, state: object) -> None:
        self.complete(Completion(action))  # type: ignore[operator]


class Counter:
    """A projection: how many records, and the last number."""

    def __init__(self) -> None:
        self.count, self.last = 0, -1

    def fold(self, record: ev.Record) -> None:
        self.count, self.last = self.count + 1, record.number

    def dump(self) -> bytes:
        return f"{self.count} {self.last}".encode()

    def load(self, data: bytes) -> None:
        self.count, self.last = (int(text) for text in data.split())


class Rig:
    """One validator's journal and coordinator over ``path``; ``emit`` journals events as they come, and publishes."""

    def __init__(self, path: Path, keys: Keys | None = None, copies: CopyPolicy = OFTEN) -> None:
        self.keys, self.clock = keys or Keys(), ManualClock()
        self.journal = JournalStore(path)
        self.counter = Counter()
        self.publisher = LogPublisher("run", self.journal, self.keys, LEADER, self.clock)
        self.coordinator = Coordinator(
            journal=self.journal,
            publisher=self.publisher,
            tasks=NoTasks(),  # type: ignore[arg-type]
            signer=LEADER,
            clock=self.clock,
            on_record=self.counter.fold,
            projection=self.counter,
            copies=copies,
        )

    async def emit(self, records: Sequence[ev.Record], *, publish: bool = True) -> None:
        """Each turn ends with a quorum event."""
        for record in records:
            self.coordinator._emit(record.event)
            self.coordinator.core.term = self.coordinator.state.term
            if isinstance(record.event, ev.QUORUM_EVENTS):
                await self.settle(publish=publish)
        await self.settle(publish=publish)

    async def settle(self, *, publish: bool = True) -> None:
        """What a turn ends with, and what the publisher does."""
        await self.journal.commit()
        self.coordinator._after_commit()
        due = self.coordinator.core.segment_due()
        if due is not None and publish:
            await self.publisher.publish(due, self.coordinator.core)
            self.coordinator._copier.settle(self.coordinator.core.acknowledged)
            await self.journal.commit()
            self.coordinator._after_commit()

    def copy_files(self, to: Path) -> Path:
        """The journal's files as a kill -9 would leave them now."""
        to.mkdir()
        for file in self.journal.path.parent.glob(self.journal.path.name + "*"):
            shutil.copy(file, to / file.name)
        return to / self.journal.path.name

    def close(self) -> None:
        self.journal.close()


@contextmanager
def said() -> Iterator[list[str]]:
    """What is logged meanwhile."""
    lines: list[str] = []
    handler = logger.add(lambda message: lines.append(str(message)), format="{message}", level="INFO")
    try:
        yield lines
    finally:
        logger.remove(handler)
