"""One run's member: folds directives, derives what it owes, does it; a lost incarnation joins again by itself.

The pump is level-triggered: every change wakes it, it asks :func:`miner.owed.owed` and starts what isn't under way. A thing
that failed is owed again after a growing wait. Nothing here remembers having said or done something but the local view.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Coroutine, Sequence
from typing import Any

from loguru import logger

from miner.context import RunContext, sleep_until
from miner.heartbeat import HeartbeatHandle, Target
from miner.member_items import ItemWork
from miner.member_links import Links
from miner.member_merge import MergeWork
from miner.member_state import StateWork
from miner.owed import incarnation, may_add, owed
from miner.owed_ahead import owed_ahead
from miner.owes import (
    ApplySeal,
    Check,
    Commit,
    Compute,
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
    SendSlice,
    StoreBoundary,
    StoreSlice,
)
from miner.reporter import Reporter
from miner.store_links import StoreLinks
from miner.waiting import why_waiting
from subnet.errors import IotaError, Refused
from subnet.logs import ReasonLog
from subnet.net.client import SignedClient
from subnet.protocol.messages import JoinAnswer, JoinRequest
from subnet.run.events import Gone, Record
from subnet.timing import TIMEOUTS, Backoff, Deadline
from subnet.words import PROTOCOL_VERSION, Member

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
        self._context, self._client, self._heartbeat = context, client, heartbeat
        self._hardware_class, self.links = hardware_class, links
        self._items, self._merges = ItemWork(context), MergeWork(context)
        self._states = StateWork(context, self._merges)
        self._store_links = StoreLinks(context)
        self._reporter = Reporter(context, client)
        self._reasons = ReasonLog()
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._not_before: dict[Owe, tuple[float, float]] = {}
        self._boot = secrets.token_hex(8)
        self._peer_port = 0
        self._ticks = 0
        self._idle_since_s = asyncio.get_running_loop().time()
        context.wake = self._wake.set
        context.background = lambda work: self._spawn(work, "background")

    async def run(self, peer_port: int) -> None:
        """Until the run is finished; raises what can't be cured by trying again."""
        self._peer_port = peer_port
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._context.directives.follow(), name="directives"),
                group.create_task(self._reporter.run(), name="reporter"),
                group.create_task(self._join_forever(), name="join"),
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
        if new_term and self._context.member is not None:
            self._renew("a new term began")
        self._wake.set()

    async def leave(self) -> None:
        await self._reporter.leave()

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=TIMEOUTS.shutdown_grace_s)
        await self._store_links.close()
        await self._states.close()
        await self._context.tokens.close()

    # --- incarnation -------------------------------------------------------------------------------------------

    def _renew(self, why: str) -> None:
        logger.info("new incarnation: {}", why)
        self._context.new_incarnation()
        self._boot = secrets.token_hex(8)
        self._reporter.forget()
        self._not_before.clear()
        for task in list(self._tasks):
            task.cancel()

    def _sync_incarnation(self) -> None:
        context = self._context
        state = context.run_state
        if state.finished is not None:
            return
        member, used_up = incarnation(state, context.signer.hotkey, self._boot)
        if used_up or self._reporter.void.is_set():
            self._renew("the last one is gone")
        elif member != context.member:
            context.member = member
            if member is not None:
                logger.info("joined as {} at stage {}", member, state.members[member].stage)

    async def _join_forever(self) -> None:
        backoff = Backoff(0.1, 2.0)
        while True:
            context = self._context
            if context.member is not None or context.run_state.finished is not None:
                backoff.reset()
                await asyncio.sleep(0.1)
                continue
            wait_s = backoff.next_s()
            target = Target(self._client.base_url, self._client.receiver, self._boot, self._client.offset_ns)
            self._heartbeat.aim(target)
            request = JoinRequest(
                version=PROTOCOL_VERSION,
                run=context.run_id,
                boot=self._boot,
                host=context.settings.host,
                port=context.settings.announce_port or self._peer_port,
                hardware_class=self._hardware_class,
                seen=context.directives.cursor,
                reachable=context.reachable,
            )
            try:
                answer = await self._client.request(
                    "POST", "/v1/join", request, JoinAnswer, deadline=Deadline.after(TIMEOUTS.http_request_s)
                )
                wait_s = max(wait_s, self._joining(answer))
            except Refused as refused:
                self._reasons.note("join", refused.code, str(refused))
            except IotaError as error:
                self._reasons.note("join", error.code, str(error))
            await sleep_until_member(context, wait_s)

    def _joining(self, answer: JoinAnswer) -> float:
        """Seconds to wait before asking again; raises where waiting can't help."""
        refusal = answer.refusal
        if refusal is None:
            return 0.5
        self._reasons.note("join", refusal.code, refusal.reason)
        if refusal.code == "boot_seen":
            self._boot = secrets.token_hex(8)
            return 0.0
        if refusal.retry_after is None and refusal.code not in ("run_finished", "run_mismatch"):
            raise Refused(refusal, who="the validator")
        return refusal.retry_after or 1.0

    async def _tick_forever(self) -> None:
        while True:
            self._ticks += 1
            self._heartbeat.tick(self._ticks)
            await asyncio.sleep(0.2)

    async def _spill_forever(self) -> None:
        while True:
            await asyncio.sleep(SPILL_EVERY_S)
            await self._context.cache.spill(self._context.run_state.next_step)

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
        self._reporter.owe(claims, idle=not len(context.compute) or self._store_links.awaited(claims))
        reductions: list[Reduce] = []
        fetches: list[FetchMerged] = []
        for owe in owes:
            if isinstance(owe, Report) or now < self._not_before.get(owe, (0.0, 0.0))[0]:
                continue
            if isinstance(owe, Refuse):
                self._refuse(owe)
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

    def _work(self, owe: Owe) -> Coroutine[Any, Any, None]:
        match owe:
            case Compute():
                return self._items.run(owe)
            case Push():
                return self.links.push(owe)
            case Fetch():
                return self.links.fetch(owe)
            case FetchStored():
                return self._store_links.fetch_stored(owe)
            case StoreBoundary():
                return self._store_links.store_boundary(owe)
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
            case Report() | Refuse() | Reduce() | FetchMerged():
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
        context = self._context

        def is_it(key: object) -> bool:
            return (
                isinstance(key, Compute)
                and (key.step, key.microbatch, key.generation) == (owe.step, owe.microbatch, owe.generation)
                and key.backward
            )

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


async def sleep_until_member(context: RunContext, seconds: float) -> None:
    """So long, or until this process is a member."""
    end = asyncio.get_running_loop().time() + seconds
    while asyncio.get_running_loop().time() < end and context.member is None:
        await asyncio.sleep(min(0.05, seconds))
