"""One run's member: folds directives, derives what it owes, does it; a lost incarnation joins again by itself.

The pump is level-triggered: every change wakes it, it asks :func:`miner.owed.owed` and starts what isn't under way. A thing
that failed is owed again after a growing wait. Nothing here remembers having said or done something but the local view.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from loguru import logger

from miner.context import RunContext, sleep_until
from miner.heartbeat import HeartbeatHandle
from miner.joining import Joiner
from miner.member_evidence import EvidenceWork
from miner.member_items import ItemWork
from miner.member_links import Links
from miner.member_merge import MergeWork
from miner.member_state import StateWork
from miner.member_witness import WitnessWork
from miner.owed import incarnation, may_add, owed
from miner.owed_ahead import owed_ahead
from miner.owed_evidence import openings
from miner.owes import (
    ApplySeal,
    Check,
    Commit,
    Compute,
    Drop,
    DropLane,
    Examine,
    Fetch,
    FetchMerged,
    FetchSlice,
    FetchStored,
    Fingerprint,
    MakeSnapshot,
    Owe,
    Push,
    Reduce,
    Refuse,
    Report,
    Restore,
    RunWitness,
    SendSlice,
    StoreBoundary,
    StoreEvidence,
    StoreSlice,
    StoreUnusable,
)
from miner.reporter import Reporter
from miner.store_links import StoreLinks
from miner.waiting import why_waiting
from subnet.errors import IotaError
from subnet.logs import ReasonLog
from subnet.model.memory import made_bytes
from subnet.net.client import SignedClient
from subnet.protocol.messages import BackwardReceipt, ForwardReceipt
from subnet.run.audits import branch, evidence_steps
from subnet.run.events import Gone, Record, Rewound
from subnet.run.state import members_of
from subnet.timing import TIMEOUTS
from subnet.words import CALIBRATION_STEP, Member

COALESCE_S = 0.002
RETRY_S = 0.5
RETRY_MAX_S = 10.0
SPILL_EVERY_S = 1.0
SAY_IDLE_S = 5.0


class RunMember:
    def __init__(
        self,
        context: RunContext,
        client: SignedClient,
        heartbeat: HeartbeatHandle,
        hardware_class: tuple[str, ...],
        links: Links,
    ) -> None:
        self._context, self._heartbeat = context, heartbeat
        self.links = links
        self._joiner = Joiner(context, client, heartbeat, hardware_class)
        self._items, self._merges = ItemWork(context), MergeWork(context)
        self._states = StateWork(context, self._merges)
        self._store_links, self._evidence = StoreLinks(context), EvidenceWork(context)
        self._witness = WitnessWork(context)
        self._branch = branch(context.run_state)
        if self._branch:  # what the last process kept of earlier branches: how much of it counts can't be told
            context.cache.rewind(CALIBRATION_STEP, self._branch)
        self._reporter = Reporter(context, client)
        self._reasons = ReasonLog()
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._not_before: dict[Owe, tuple[float, float]] = {}
        self._ticks = 0
        self._idle_since_s = asyncio.get_running_loop().time()
        context.wake = self._wake.set
        context.background = lambda work: self._spawn(work, "background")

    async def run(self, peer_port: int) -> None:
        """Until the run is finished; raises what can't be cured by trying again."""
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._context.directives.follow(), name="directives"),
                group.create_task(self._reporter.run(), name="reporter"),
                group.create_task(self._joiner.run(peer_port), name="join"),
                group.create_task(self._tick_forever(), name="ticks"),
                group.create_task(self._spill_forever(), name="spill"),
            ]
            try:
                await self._pump()
            finally:
                for task in tasks:
                    task.cancel()

    def on_took(self, records: Sequence[Record], new_term: bool) -> None:
        """The fold has moved on."""
        for record in records:
            event = record.event
            if isinstance(event, Gone):
                self._context.peer_blobs.gone(event.member)
                if event.member == self._context.member and event.why == "checksum":
                    logger.warning("the state of {} is not what others have: it is restored", event.member)
                    self._states.distrust()
        if branch(self._context.run_state) != self._branch:
            self._rewind([record.event for record in records if isinstance(record.event, Rewound)])
        elif new_term and self._context.member is not None:
            self._renew("a new term began")
        self._wake.set()

    @property
    def context(self) -> RunContext:
        return self._context

    async def leave(self) -> None:
        await self._reporter.leave()

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=TIMEOUTS.shutdown_grace_s)
        await self._context.cache.spill(self._context.run_state.next_step)
        await self._store_links.close()
        await self._evidence.close()
        await self._states.close()
        await self._context.tokens.close()

    def _rewind(self, seen: Sequence[Rewound]) -> None:
        """The run goes on from an earlier state: what is of later steps never was. Where that was missed, all of it goes."""
        context, now = self._context, branch(self._context.run_state)
        whole = [event.branch for event in seen] == list(range(self._branch + 1, now + 1))
        step = min(event.step for event in seen) if whole and seen else CALIBRATION_STEP
        for event in seen:
            why = "its owner's word" if event.owner else f"case {event.case}"
            logger.warning("{}: the run is rewound to step {}, branch {}", why, event.step, event.branch)
        self._branch = now
        context.cache.rewind(step, now)
        context.local.rewind(step)
        self._states.rewind()
        self.links.rewind()
        self._store_links.end_step()
        self._renew(f"the run is on branch {now}")

    # --- incarnation -------------------------------------------------------------------------------------------

    def _renew(self, why: str) -> None:
        logger.info("new incarnation: {}", why)
        self._context.new_incarnation()
        self._joiner.renew()
        self._reporter.forget()
        self._not_before.clear()
        for task in list(self._tasks):
            task.cancel()

    def _sync_incarnation(self) -> None:
        context = self._context
        state = context.run_state
        if state.finished is not None:
            return
        member, used_up = incarnation(state, context.signer.hotkey, self._joiner.boot)
        if used_up or self._reporter.void.is_set():
            self._renew("the last one is gone")
        elif member != context.member:
            context.member = member
            if member is not None:
                logger.info("joined as {} at stage {}", member, state.members[member].stage)
                self._warn_of_evidence(state.members[member].stage)

    def _warn_of_evidence(self, stage: int) -> None:
        """Where the budgets don't hold what audits may want of this miner: what it has lost then counts against it."""
        context, settings = self._context, self._context.settings
        if not context.plan.config.audit.on:
            return
        usual_steps, _ = evidence_steps(context.plan.config)
        replicas = max(1, len(members_of(context.run_state, stage)))
        needed_bytes = usual_steps * made_bytes(context.plan, stage, replicas)
        budget_bytes = settings.boundary_disk_bytes + settings.boundary_memory_bytes
        if needed_bytes > budget_bytes:
            logger.warning(
                "audits of {} steps may want {} bytes of boundaries, the budgets have room for {}: raise "
                "--limit.boundary_disk_gib, what is lost counts against this miner",
                *(usual_steps, needed_bytes, budget_bytes),
            )

    async def _tick_forever(self) -> None:
        while True:
            self._ticks += 1
            self._heartbeat.tick(self._ticks)
            await asyncio.sleep(0.2)

    async def _spill_forever(self) -> None:
        while True:
            await asyncio.sleep(SPILL_EVERY_S)
            step = self._context.run_state.next_step  # of a round there is too much to keep all of it in memory
            await self._context.cache.spill(step + self._context.plan.config.lanes.on, step)

    # --- the pump ----------------------------------------------------------------------------------------------

    async def _pump(self) -> None:
        context = self._context
        while context.run_state.finished is None:
            await sleep_until(self._wake, min(1.0, self._next_retry_s(), self._reporter.next_due_s()))
            self._wake.clear()
            self._sync_incarnation()
            if context.member is not None:
                self.links.admit_early()
                self.links.slices.admit_early()
                self._drop_stale_jobs()
                self._start_owed(context.member)
                self._states.save_when_due()
            else:
                self._open_evidence()
            self._say_why_idle()
            await asyncio.sleep(COALESCE_S)

    def _say_why_idle(self) -> None:
        """After a while with nothing to compute, say what is waited for; again when that changes."""
        now, context = asyncio.get_running_loop().time(), self._context
        if len(context.compute):
            self._idle_since_s = now
        elif now - self._idle_since_s >= SAY_IDLE_S:
            reason = why_waiting(context.run_state, context.member, context.local)
            self._reasons.note("waiting for", reason)

    def _start_owed(self, member: Member) -> None:
        context = self._context
        now = asyncio.get_running_loop().time()
        owes = dict.fromkeys(
            [*owed(context.run_state, member, context.local), *owed_ahead(context.run_state, member, context.local)]
        )
        claims = [owe.claim for owe in owes if isinstance(owe, Report)]
        for claim in claims:
            if isinstance(claim, ForwardReceipt | BackwardReceipt):
                context.local.note_receipt(claim)
        self._reporter.owe(claims, idle=not len(context.compute) or self._store_links.awaited(claims))
        reductions: list[Reduce] = []
        fetches: list[FetchMerged] = []
        for owe in owes:
            if isinstance(owe, Report) or now < self._not_before.get(owe, (0.0, 0.0))[0]:
                continue
            if isinstance(owe, Refuse):
                self._refuse(owe)
            elif isinstance(owe, Drop):
                self._items.drop(owe)
            elif isinstance(owe, Reduce):
                reductions.append(owe)
            elif isinstance(owe, FetchMerged):
                fetches.append(owe)
            elif not (isinstance(owe, Compute) and self._items.held_back(owe)):
                self._start([owe], self._work(owe))
        if reductions:
            self._start(reductions, self._merges.reduce(reductions))
        if fetches:
            self._start(fetches, self._merges.fetch_merged(fetches))

    def _open_evidence(self) -> None:
        """Of who isn't a member, in quarantine perhaps: what audits of others want of it is given all the same."""
        now, local = asyncio.get_running_loop().time(), self._context.local
        for owe in openings(self._context.run_state, local):
            if owe not in local.jobs and now >= self._not_before.get(owe, (0.0, 0.0))[0]:
                self._start([owe], self._work(owe))

    def _work(self, owe: Owe) -> Coroutine[Any, Any, None]:
        match owe:
            case Compute():
                return self._items.run(owe)
            case DropLane():
                return self._items.drop_lane(owe)
            case Push():
                return self.links.push(owe)
            case Fetch():
                return self.links.fetch(owe)
            case FetchStored():
                return self._store_links.fetch_stored(owe)
            case StoreBoundary():
                return self._store_links.store_boundary(owe)
            case StoreEvidence():
                return self._evidence.store(owe)
            case StoreUnusable():
                return self._evidence.denounce(owe)
            case RunWitness():
                return self._witness.run(owe)
            case Commit():
                return self._merges.commit(owe)
            case SendSlice():
                return self.links.slices.send(owe)
            case FetchSlice():
                return self._store_links.fetch_slice(owe) if owe.routed else self.links.slices.fetch(owe)
            case StoreSlice():
                return self._store_links.store_slice(owe)
            case Fingerprint():
                return self._merges.fingerprint(owe)
            case Examine():
                return self._merges.examine(owe)
            case Check():
                return self._merges.check(owe)
            case ApplySeal():
                self.links.end_step(owe.step)
                self._store_links.end_step()
                return self._states.apply_seal(owe)
            case Restore():
                return self._states.restore(owe)
            case MakeSnapshot():
                return self._states.snapshot(owe)
            case Report() | Refuse() | Drop() | Reduce() | FetchMerged():
                raise RuntimeError(f"{type(owe).__name__} is started elsewhere")

    def _start(self, owes: Sequence[Owe], work: Coroutine[Any, Any, None]) -> None:
        self._context.local.jobs.update(owes)
        self._spawn(self._finish(owes, work), type(owes[0]).__name__)

    async def _finish(self, owes: Sequence[Owe], work: Coroutine[Any, Any, None]) -> None:
        """Run it; what failed is owed again after a growing wait, with its reason said once."""
        try:
            await work
            for owe in owes:
                self._not_before.pop(owe, None)
        except IotaError as error:
            now = asyncio.get_running_loop().time()
            wait_s = min(RETRY_MAX_S, 2 * self._not_before.get(owes[0], (0.0, RETRY_S / 2))[1])
            for owe in owes:
                self._not_before[owe] = (now + wait_s, wait_s)
            if len(self._not_before) > 4096:
                self._not_before.clear()
            self._reasons.note(type(owes[0]).__name__, error.code, str(error))
        finally:
            self._context.local.jobs.difference_update(owes)
            self._wake.set()

    def _next_retry_s(self) -> float:
        now = asyncio.get_running_loop().time()
        return max(0.01, min((at - now for at, _ in self._not_before.values() if at > now), default=1.0))

    def _refuse(self, owe: Refuse) -> None:
        """Hand a revoked lease back at once, unless its gradient is being added at this very moment."""
        context, lease = self._context, (owe.step, owe.microbatch, owe.generation)

        def is_it(key: object) -> bool:
            return isinstance(key, Compute) and key.backward and (key.step, key.microbatch, key.generation) == lease

        under_way = [job for job in context.local.jobs if isinstance(job, Compute) and is_it(job)]
        if all([self._items.refuse(job) for job in under_way]):
            context.compute.drop(is_it)
            context.local.refused.add((owe.step, owe.microbatch, owe.generation))
            self._wake.set()
        # else it is added: the end of the job wakes the pump, and the receipt is the answer

    def _drop_stale_jobs(self) -> None:
        """Queued gradients that may no longer be added aren't computed."""
        context = self._context
        member, state = context.member, context.run_state

        def stale(key: object) -> bool:
            if not isinstance(key, Compute) or not key.backward or key.generation is None or member is None:
                return False
            return not may_add(state, member, context.local, key)

        context.compute.drop(stale)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        if isinstance(error, IotaError):
            self._reasons.note(task.get_name(), error.code, str(error))
        else:
            logger.opt(exception=error).error("{} failed", task.get_name())
