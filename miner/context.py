"""What the parts of a run's member share: the fold, its own data, and the ways to compute and to move bytes."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from miner.blobs import Blobs
from miner.boundaries import BoundaryCache
from miner.compute import ComputeThread
from miner.directives import Directives
from miner.local_view import BoundaryKey, LocalView
from miner.owes import Compute
from miner.peer_blobs import NodeView, PeerBlobs
from miner.settings import MinerSettings
from miner.sources import Holdings, Sources
from miner.tokens import TokenSource
from subnet.engine.stage_executor import PartialKey, StageExecutor, StagePartial
from subnet.engine.stage_merge import StageMerge
from subnet.engine.stage_state import StageState
from subnet.errors import Refusal
from subnet.model.plan import ModelPlan
from subnet.net.base import PeerAddress
from subnet.protocol.signing import Signer
from subnet.protocol.wire import Buffer
from subnet.run.events import RunPlanned
from subnet.run.state import RunState
from subnet.store.disk import BlobCache
from subnet.words import Member

MAX_UNUSABLE = 4
"""Boundaries that can't be computed with are kept until they are shown; of more, others have been shown."""


class StageWork:
    """State, executor and merge of the stage that this process holds."""

    def __init__(self, plan: ModelPlan, stage: int, device: str, graph_budget_bytes: int) -> None:
        self.plan, self.stage = plan, stage
        self.state = StageState(plan, stage, device=device)
        self.executor = StageExecutor(plan, stage, self.state, graph_budget_bytes=graph_budget_bytes)
        self._merge: StageMerge | None = None

    def merge(self) -> StageMerge:
        """The merge work of the step that this state is to be updated by, with the scales that its sums are in."""
        if self._merge is None or self._merge.step != self.state.next_step:
            self._merge = StageMerge(self.plan, self.stage, self.state)
        return self._merge

    def drop_work(self, up_to: int | None = None) -> None:
        """Sums, graphs and lanes: all, or those of steps up to this one."""
        self.drop_partials(up_to)
        self.executor.drop_graphs(up_to)
        self.executor.drop_lanes(up_to)

    def forget_merge(self) -> None:
        """The state was loaded anew: its scales may be others, at the same step."""
        self._merge = None

    def drop_partials(self, up_to: int | None = None) -> None:
        """All of them, or those of steps up to this one."""
        for key in list(self.executor.partials):
            if up_to is None or key.step <= up_to:
                self.executor.drop_partial(key)


@dataclass
class RunContext:
    """One per run; ``member`` is this process's live incarnation, ``stage`` what it holds."""

    settings: MinerSettings
    signer: Signer
    planned: RunPlanned
    plan: ModelPlan
    directives: Directives
    blobs: Blobs
    tokens: TokenSource
    cache: BoundaryCache
    compute: ComputeThread
    device: str
    chunk_cache: BlobCache
    """Snapshot chunks and row groups on disk."""
    local: LocalView = field(default_factory=LocalView)
    member: Member | None = None
    reachable: bool = True
    """Whether other miners can connect to this one: else all that travels to or from it goes through the store."""
    stage: StageWork | None = None
    peak_flops_per_s: float = 0.0
    """Of the device, by matrix products in the run's precision; 0: not measured."""
    on_refused: Callable[[Refusal], None] = lambda refusal: None
    """The validator doesn't let this miner in (yet)."""
    on_let_in: Callable[[], None] = lambda: None
    wake: Callable[[], None] = lambda: None
    background: Callable[[Coroutine[Any, Any, None]], None] = lambda work: work.close()
    """Run something beside the pump; its failure is logged."""
    slices: dict[str, memoryview] = field(default_factory=dict[str, memoryview])
    """Canonical bytes of slices, mine and others', by hash; of the open step only."""
    unusable: OrderedDict[str, memoryview] = field(default_factory=OrderedDict[str, memoryview])
    """Boundaries that can't be computed with, by hash; only the last few."""
    merged: dict[str, memoryview] = field(default_factory=dict[str, memoryview])
    """Canonical bytes of merged partitions, by hash; of the open step only."""
    peer_blobs: PeerBlobs = field(init=False)
    sources: Sources = field(init=False)
    """Blobs of the run's snapshots and log, from disk, replicas or store."""

    def __post_init__(self) -> None:
        holdings = Holdings(self.chunk_cache, lambda: self.run_state)
        node = NodeView(
            run_id=self.run_id,
            state=lambda: self.run_state,
            member=lambda: self.member,
            address=self.address,
            background=lambda work: self.background(work),
        )
        self.peer_blobs = PeerBlobs(node, holdings)
        self.sources = Sources(holdings, self.blobs, self.peer_blobs)
        self.local.kept = self.cache.kept

    @property
    def run_state(self) -> RunState:
        return self.directives.state

    @property
    def run_id(self) -> str:
        return self.planned.run_id

    def held_stage(self) -> StageWork:
        if self.stage is None:
            raise RuntimeError("no stage is held")
        return self.stage

    def me(self) -> Member:
        if self.member is None:
            raise RuntimeError("not a member")
        return self.member

    def partial_key(self, step: int, epoch: int) -> PartialKey:
        member = self.me()
        return PartialKey(step, member.term, member.number, epoch)

    def partial(self, step: int, epoch: int) -> StagePartial | None:
        return self.held_stage().executor.partials.get(self.partial_key(step, epoch))

    def address(self, member: Member) -> PeerAddress | None:
        info = self.run_state.members.get(member)
        return PeerAddress(member.hotkey, info.host, info.port) if info else None

    def keep_unusable(self, key: BoundaryKey, hash_: str, data: Buffer) -> None:
        """A boundary that can't be computed with: kept, so that it can be shown if it is what was receipted."""
        self.unusable[hash_] = memoryview(data)
        self.local.unusable[key] = hash_
        while len(self.unusable) > MAX_UNUSABLE:
            self.unusable.popitem(last=False)

    def new_incarnation(self) -> None:
        """Accumulators and graphs never survive an incarnation, nor does what it got from others."""
        for key in self.local.new_incarnation():
            self.cache.drop(key)
        self.slices.clear()
        self.merged.clear()
        self.member = None
        self.compute.drop(lambda key: isinstance(key, Compute))
        if self.stage is not None:
            stage = self.stage
            self.compute.submit("drop", (0,), lambda: stage.drop_work())


async def sleep_until(event: asyncio.Event, seconds: float) -> None:
    """Until the event is set, or so long."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
