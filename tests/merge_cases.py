"""Members of one stage with a sum each and a merge that can be driven by hand, on the fold that they share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from join_cases import NUM_STEPS, Miner, TrainedRun, joined
from model_cases import tokens_of

from miner.member_merge import MergeWork
from miner.member_slices import Slices
from miner.owed_ahead import owed_ahead
from miner.owed_merges import owed_merges
from miner.owes import Commit, FetchMerged, Owe, Reduce, Report, SendSlice
from subnet.errors import IotaError
from subnet.net.base import PeerAddress
from subnet.protocol import messages as msg
from subnet.run import state as st
from subnet.timing import Deadline
from subnet.words import ItemKey, Member

STEP = NUM_STEPS
SEED = "07" * 32


@dataclass
class Wire:
    """Carries slices between the members; ``lost`` says which don't arrive, ``sent`` what was sent."""

    swarm: MergeSwarm
    sent: list[tuple[msg.SliceFrame, bytes, str]] = field(default_factory=list)
    lost: Callable[[msg.SliceFrame], bool] = lambda frame: False

    async def send(self, to: PeerAddress, header: Any, body: Any, *, priority: Any = None, deadline: Deadline) -> None:
        target = next(seat for seat in self.swarm.seats if seat.member.hotkey == to.hotkey)
        if isinstance(header, msg.NeedSliceFrame):
            await target.slices.give(header)
            return
        self.sent.append((header, bytes(body), to.hotkey))
        if not self.lost(header):
            await target.slices.take(header, bytearray(body))


class Seat:
    """One member: its miner, its part in the merge, its slices."""

    def __init__(self, swarm: MergeSwarm, miner: Miner, member: Member) -> None:
        self.miner, self.member, self.context = miner, member, miner.context
        self.merges, self.slices = MergeWork(miner.context), Slices(miner.context)
        self.slices.use(swarm.wire)  # type: ignore[arg-type]

    @property
    def local(self) -> Any:
        return self.context.local

    def ahead(self) -> list[Owe]:
        return owed_ahead(self.context.run_state, self.member, self.local)

    def owed(self) -> list[Owe]:
        state, owes = self.context.run_state, list[Owe]()
        assert state.work is not None
        owed_merges(state, state.work, self.member, 0, self.local, owes)
        return owes

    async def do(self, owes: list[Owe]) -> None:
        """Those that make or move something, once each."""
        reductions = [owe for owe in owes if isinstance(owe, Reduce)]
        fetches = [owe for owe in owes if isinstance(owe, FetchMerged)]
        for owe in owes:
            if isinstance(owe, Commit):
                await self.merges.commit(owe)
            elif isinstance(owe, SendSlice):
                await self.slices.send(owe)
        if reductions:
            await self.merges.reduce(reductions)
        if fetches:
            await self.merges.fetch_merged(fetches)

    def entry(self) -> Any:
        return next(iter(self.local.commitments.values()))

    def claims(self, kind: type) -> list[Any]:
        return [owe.claim for owe in self.owed() if isinstance(owe, Report) and isinstance(owe.claim, kind)]


class MergeSwarm:
    """``shares``: the microbatches that each member adds."""

    def __init__(self, run: TrainedRun, directory: Path, shares: list[list[int]]) -> None:
        self.run, self.state, self.directory, self.shares = run, run.state, directory, shares
        self.wire = Wire(self)
        self.seats: list[Seat] = []

    async def open(self) -> MergeSwarm:
        """Everybody is at the step's state and has added its share, which the fold shows as leased."""
        root = self.run.roots[STEP]
        for number in range(len(self.shares)):
            member = joined(self.state, f"c{number}", number + 1, version=STEP)
            self.state.members[member].root = root
            miner = Miner(self.run, self.directory / f"miner{number}", member, state_every_steps=1000)
            self.seats.append(Seat(self, miner, member))
            await miner.catch_up()
        self.state.roots = {0: {root: [f"cold-c{number}" for number in range(len(self.shares))]}}
        count = self.run.plan.config.pipeline.microbatches
        items = {m: st.Item() for m in range(count)}
        self.state.work = st.StepWork(
            step=STEP,
            num_training=count,
            num_evaluation=0,
            scalars=None,
            items=[items],
            undealt=[set()],
            live=[set(range(count))],
            done=[0],
            evaluated=[0],
            merges=[st.Merge()],
            held={seat.member: set(share) for seat, share in zip(self.seats, self.shares, strict=True) if share},
        )
        for seat, share in zip(self.seats, self.shares, strict=True):
            for m in share:
                items[m] = st.Item(status=st.LIVE, member=seat.member, generation=1)
                self.add(seat, m)
        return self

    @property
    def work(self) -> st.StepWork:
        assert self.state.work is not None
        return self.state.work

    @property
    def merge(self) -> st.Merge:
        return self.work.merges[0]

    def add(self, seat: Seat, microbatch: int) -> None:
        executor = seat.context.held_stage().executor
        epoch = st.epoch(self.state, seat.member)
        key = seat.context.partial_key(STEP, epoch)
        item, rows = ItemKey(STEP, microbatch, 0), tokens_of(500 + microbatch)
        executor.forward(item, None, rows, keep_graph=True)
        executor.backward(item, None, None, rows, partial=key)
        seat.local.added[STEP, microbatch, epoch] = self.work.items[0][microbatch].generation

    async def commit_ahead(self) -> None:
        for seat in self.seats:
            await seat.do([owe for owe in seat.ahead() if isinstance(owe, Commit)])

    async def send_ahead(self) -> None:
        for seat in self.seats:
            await seat.do([owe for owe in seat.ahead() if isinstance(owe, SendSlice)])

    def order(self, owners: tuple[Member, ...]) -> None:
        """The manifest of what is committed, as ``ReduceOrdered`` would have it."""
        for item in self.work.items[0].values():
            item.status = st.DONE
        merge = self.merge
        merge.phase, merge.version = st.REDUCING, merge.version + 1
        merge.entries = tuple(seat.entry() for seat in self.seats if seat.local.commitments)
        merge.owners = owners
        merge.merged, merge.fingerprints, merge.checks = {}, {}, {}
        self.settle()

    def settle(self) -> None:
        for seat in self.seats:
            seat.slices.admit_early()

    async def reduce(self) -> None:
        for seat in self.seats:
            await seat.do([owe for owe in seat.owed() if isinstance(owe, Reduce)])
        for seat in self.seats:
            for claim in seat.claims(msg.MergedClaim):
                told = st.MergedPartition(claim.hash, claim.blob, claim.size_bytes, claim.squares)
                self.merge.merged[claim.partition] = told

    def reveal(self) -> None:
        self.merge.phase, self.merge.seed = st.REVEALED, SEED

    async def close(self) -> None:
        for seat in self.seats:
            await seat.miner.close()
        await asyncio.sleep(0)


async def refused(work: Any) -> IotaError | None:
    """The error of the tree that it ends with."""
    try:
        await work
    except IotaError as error:
        return error
    return None
