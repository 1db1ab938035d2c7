"""What the coordinator asks of the store, beside its main task: which blobs are there, traces, the run root.

Each task ends with a :class:`Completion`: the main task journals its events against the state as it is then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from loguru import logger

from subnet.errors import ConfigError, IotaError, NotFound
from subnet.model.boundary_check import is_unusable
from subnet.model.memory import boundary_bytes
from subnet.model.plan import ModelPlan
from subnet.model.snapshots import SnapshotManifest, decode_manifest, join_manifests
from subnet.numerics.roots import run_root
from subnet.protocol.messages import AnyClaim, MergedClaim
from subnet.protocol.wire import is_blob_hash
from subnet.run.audits import all_audited
from subnet.run.events import AnyEvent, RunFinished
from subnet.run.state import RunState
from subnet.store.base import OwnerStore
from subnet.timing import TIMEOUTS, Deadline
from subnet.words import BlobHash
from validator.audit_runner import AuditRunner
from validator.decision import (
    Action,
    AuditResult,
    FinishRun,
    JudgeBoundary,
    ProbeSlices,
    RootResult,
    RunAppeal,
    RunAudit,
    RunRoots,
    TraceVerdict,
)
from validator.trace_io import TraceReader

AGAIN_S = 1.0
"""Pause before a failed action may be tried again."""


@dataclass(frozen=True)
class Completion:
    """``events`` is asked with the current state; ``confirmed`` are blobs seen in the store.

    ``failed``: the store couldn't be asked, so that nothing was found out about anybody. ``found``: what a replay
    gave, or whether a boundary's bytes are unusable.
    """

    action: Action
    events: Callable[[RunState], Iterable[AnyEvent]] = lambda _: ()
    confirmed: Sequence[str] = field(default=())
    failed: bool = False
    found: AuditResult | RootResult | bool | None = None


class RunTasks:
    def __init__(self, plan: ModelPlan, store: OwnerStore, audits: AuditRunner | None = None) -> None:
        self._plan, self._store, self._audits = plan, store, audits
        self._complete: Callable[[Completion], None] = lambda _: None
        self._trace = TraceReader(plan, store)
        self.store_bytes = 0
        self.store_budget_bytes = 0
        """0: none, or not known yet."""

    def bind(self, complete: Callable[[Completion], None]) -> None:
        self._complete = complete

    async def stored(self, claim: AnyClaim, blobs: Sequence[str]) -> list[str]:
        """Those of ``blobs`` that the store has; where a claim states the size, of that size."""
        try:
            sizes = await self._sizes(blobs)
        except IotaError as error:
            logger.warning("store: {}", error)
            return []
        expected = claim.size_bytes if isinstance(claim, MergedClaim) else None
        return [blob for blob in blobs if blob in sizes and expected in (None, sizes[blob])]

    async def _sizes(self, blobs: Sequence[str]) -> dict[str, int]:
        """Of those that are there; what is no hash at all, as a liar may commit to, is nowhere."""
        deadline = Deadline.after(TIMEOUTS.store_request_s)
        found = await self._store.sizes([BlobHash(blob) for blob in blobs if is_blob_hash(blob)], deadline=deadline)
        return {**found}

    async def expire(self, retention: str, label: str, below: int) -> None:
        """End the run's holds of a class whose horizon is below ``below``."""
        freed = await self._store.expire(retention, label, below, deadline=Deadline.after(TIMEOUTS.store_request_s))
        if freed.num_blobs:
            logger.info("store: {} {} blobs freed, {:.1f} MB", freed.num_blobs, retention, freed.freed_bytes / 1e6)

    async def look(self) -> None:
        """How much the store holds."""
        usage = await self._store.usage(deadline=Deadline.after(TIMEOUTS.store_request_s))
        self.store_bytes, self.store_budget_bytes = usage.used_bytes, usage.budget_bytes

    async def probe_store(self) -> str:
        """What is wrong with the store, in words; empty when it answers and has room for what was asked of it."""
        try:
            usage = await self._store.usage(deadline=Deadline.after(TIMEOUTS.store_probe_s))
        except IotaError as error:
            return f"{error.code}: {error.reason}"
        self.store_bytes = usage.used_bytes
        if not usage.lacks_bytes:
            return ""
        return (
            f"full: an upload of {usage.lacks_bytes} bytes was refused, "
            f"{usage.used_bytes} of {usage.budget_bytes} bytes are used"
        )

    async def perform(self, action: Action, state: RunState) -> None:
        """Carry the action out; after a failure, and a pause, it completes as failed and will be asked for again."""
        completion = Completion(action, failed=True)
        try:
            match action:
                case ProbeSlices():
                    completion = Completion(action, confirmed=tuple(await self._sizes(action.hashes)))
                case TraceVerdict():
                    completion = Completion(action, await self._trace.verdict(action, state))
                case FinishRun():
                    finished = RunFinished(action.step, await self._run_root(action), action.evaluation)
                    completion = Completion(action, lambda state: _finish(finished, state))
                case RunAudit():
                    completion = await self._audit(action, state)
                case RunRoots():
                    completion = Completion(action, found=await self._auditor().roots(action, state))
                case JudgeBoundary():
                    completion = Completion(action, found=await self._is_unusable(action.hash))
                case RunAppeal():
                    completion = Completion(action, await self._auditor().appeal(action.case, state))
        except IotaError as error:
            if not isinstance(action, RunAudit):  # the auditor says it itself, once a reason
                logger.warning("{}: {}", type(action).__name__, error)
            await asyncio.sleep(AGAIN_S)
        self._complete(completion)

    async def _audit(self, action: RunAudit, state: RunState) -> Completion:
        result = await self._auditor().run(action.audit, state)
        if result is not None:
            return Completion(action, found=result)
        await asyncio.sleep(AGAIN_S)  # its inputs are still to be receipted, or it is closed
        return Completion(action, failed=True)

    async def _is_unusable(self, blob: str) -> bool:
        """Whether the bytes with this hash are no boundary of the run. Errors where they can't be had, or have another hash."""
        deadline = Deadline.after(TIMEOUTS.store_request_s)
        size_bytes = (await self._sizes([blob])).get(blob)
        if size_bytes is None:
            raise NotFound(f"boundary {blob[:16]} is not in the store")
        if size_bytes != boundary_bytes(self._plan):
            return False  # who was sent that many bytes hasn't taken them
        data = await self._store.get_blob(BlobHash(blob), size_bytes, deadline=deadline)
        return await asyncio.to_thread(is_unusable, self._plan, blob, data)

    def _auditor(self) -> AuditRunner:
        if self._audits is None:
            raise ConfigError("this validator does no audits of the run")
        return self._audits

    async def _run_root(self, action: FinishRun) -> str:
        manifests = [await self._manifest(blob) for blob in action.manifests]
        whole = join_manifests(self._plan, manifests)
        return run_root(action.step, [entry.leaf for entry in whole.entries]).hex()

    async def _manifest(self, blob: str) -> SnapshotManifest:
        deadline = Deadline.after(TIMEOUTS.store_request_s)
        size = (await self._sizes([blob])).get(blob)
        if size is None:
            raise NotFound(f"snapshot manifest {blob[:16]} is not in the store")
        return decode_manifest(memoryview(await self._store.get_blob(BlobHash(blob), size, deadline=deadline)))


def _finish(finished: RunFinished, state: RunState) -> tuple[AnyEvent, ...]:
    """A rewind or an accusation may have come between."""
    due = state.finished is None and state.next_step == finished.step and all_audited(state)
    return (finished,) if due else ()
