"""A third party's run of a case: its bundle is fetched, checked and replayed in a process of its own, and the digest is the answer.

The witness isn't told what was found or claimed to be wrong, and needs none of it: it does the work again. What doesn't belong
to this run, is damaged, or is too large for this machine's budgets is declined with the reason, so that somebody else is asked
at once. The process exists only while it replays, at a low priority beside this miner's own work, which goes on; nothing of a
bundle stays on the disk.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from loguru import logger

from miner.context import RunContext
from miner.hardware import free_memory
from miner.owes import RunWitness
from subnet.audit.bundle import BLOBS_NAME, Needed, decode_case, needed_blobs, put_blob, write_bundle
from subnet.audit.case import LIMIT_CASE_BYTES, Case, Findings
from subnet.audit.messages import DEFAULT_GRAPH_BYTES
from subnet.audit.process import AuditProcess
from subnet.errors import InputError, IotaError, OutOfSpace
from subnet.model.memory import Budgets, stage_memory
from subnet.protocol.claims import LIMIT_REASON_CHARS
from subnet.run.audits import branch
from subnet.store.together import all_of
from subnet.timing import TIMEOUTS, Deadline
from subnet.words import BlobHash, short

MAX_PARALLEL = 4
MAX_ROUNDS = 16
"""Manifests name chunks, and those nothing: a case that names more and more is none."""
TRIES = 3
"""After so many failures that might have been cured, the case is left to others."""


class Replayer(Protocol):
    """What replays a bundle's directory; :class:`AuditProcess`."""

    async def run(self, directory: Path, deadline: Deadline, *, fresh: bool = False) -> Findings: ...

    async def close(self) -> None: ...


class WitnessWork:
    """One case at a time, under a directory that is this object's alone."""

    def __init__(self, context: RunContext, make_process: Callable[[int], Replayer] | None = None) -> None:
        self._context = context
        self._directory = context.settings.directory.expanduser() / "witness"
        self._make = make_process or self._process
        self._turn = asyncio.Lock()
        self._tries: dict[int, int] = {}
        shutil.rmtree(self._directory, ignore_errors=True)

    async def run(self, owe: RunWitness) -> None:
        """Notes the digest, or that there will be none; raises what a later try may cure."""
        local = self._context.local
        async with self._turn:
            if owe.case in local.witnessed or owe.case in local.unwitnessed:
                return
            try:
                local.witnessed[owe.case] = await self._replayed(owe)
            except IotaError as error:
                self._tries[owe.case] = self._tries.get(owe.case, 0) + 1
                if error.retryable and self._tries[owe.case] < TRIES:
                    raise
                logger.warning("case {} can't be run here, somebody else is asked: {}", owe.case, error)
                local.unwitnessed[owe.case] = f"{error.code}: {error.reason}"[:LIMIT_REASON_CHARS]
            finally:
                await asyncio.to_thread(shutil.rmtree, self._directory, ignore_errors=True)
        self._context.wake()

    async def _replayed(self, owe: RunWitness) -> str:
        deadline = Deadline.after(TIMEOUTS.audit_run_s)
        case = await self._case(owe, deadline)
        directory = self._directory / str(owe.case)
        await asyncio.to_thread(write_bundle, directory, case, {})
        await self._fill(directory, case, deadline)
        process = self._make(self._spare_bytes(case))
        try:
            findings = await process.run(directory, deadline, fresh=True)
        finally:
            await process.close()
        if any(version <= case.state.version for version, _ in findings.wrong_roots):
            raise InputError("the snapshot that the state is made from isn't the agreed one here")
        member = case.roots[0][0] if case.roots else case.partials[0].member
        logger.info(
            "case {}: step {} stage {} of {} done again in {:.1f} s (state {:.1f} s): {}",
            *(owe.case, case.step, case.stage, member, findings.compute_s, findings.state_s),
            short(findings.digest),
        )
        return findings.digest

    # --- the case ----------------------------------------------------------------------------------------------

    async def _case(self, owe: RunWitness, deadline: Deadline) -> Case:
        """The case, if it is one of this run as it is known here, and of a size that this machine can replay."""
        (size_bytes,) = await self._context.blobs.sizes([owe.bundle], deadline)
        if size_bytes > LIMIT_CASE_BYTES:
            raise InputError(f"a case of {size_bytes} bytes")
        data = await self._context.blobs.get((owe.bundle, size_bytes), deadline)
        case = await asyncio.to_thread(decode_case, data)
        state = self._context.run_state
        told = state.audits.cases.get(owe.case)
        if told is None or case.planned != state.run or case.branch > branch(state):
            raise InputError("the case is of another run than this one")
        known = tuple(terms for terms in state.terms if terms.first_step <= case.step)
        if case.branch == branch(state) and case.terms != known:
            raise InputError("the case is of other terms than the run's owner has said")
        named = (case.step, case.stage) == (told.step, told.stage)
        if not named or not 0 <= case.stage < self._context.plan.num_stages:
            raise InputError(f"the case is of step {case.step} stage {case.stage}, which the journal doesn't say")
        self._spare_bytes(case)
        return case

    def _spare_bytes(self, case: Case) -> int:
        """What the budget leaves beside the stage's replay, for graphs that needn't be computed again."""
        budgets = Budgets(kept_steps=0, graph_memory_bytes=0, boundary_memory_bytes=0)
        needed_bytes = stage_memory(self._context.plan, case.stage, budgets).peak_bytes
        settings = self._context.settings
        limit_bytes = min(settings.witness_memory_bytes, free_memory(self._context.device, settings.vram_bytes))
        if needed_bytes > limit_bytes:
            raise OutOfSpace(f"stage {case.stage} takes {needed_bytes} bytes of memory, there are {limit_bytes} for it")
        return limit_bytes - needed_bytes

    def _process(self, spare_bytes: int) -> Replayer:
        settings, graph_bytes = self._context.settings, min(DEFAULT_GRAPH_BYTES, spare_bytes)
        return AuditProcess(settings.witness_memory_bytes, device=self._context.device, graph_bytes=graph_bytes)

    # --- its blobs ---------------------------------------------------------------------------------------------

    async def _fill(self, directory: Path, case: Case, deadline: Deadline) -> None:
        """In rounds, until nothing is lacking; what it takes in all is known before any of it is fetched."""
        used, there, slots = 0, set[str](), asyncio.Semaphore(MAX_PARALLEL)

        def manifest(hash_: str) -> bytes | None:
            return (directory / BLOBS_NAME / hash_).read_bytes() if hash_ in there else None

        for _ in range(MAX_ROUNDS):
            lacking = await asyncio.to_thread(needed_blobs, case, manifest, has=there.__contains__)
            if not lacking:
                return
            sizes = await self._sizes(lacking, deadline)
            used += sum(sizes)
            if used > self._context.settings.witness_disk_bytes:
                limit = self._context.settings.witness_disk_bytes
                raise OutOfSpace(f"the bundle takes {used} bytes on disk, the budget is {limit}")
            needs = zip(lacking, sizes, strict=True)
            await all_of([self._have(directory, need, size_bytes, slots, deadline) for need, size_bytes in needs])
            there |= {need.hash for need in lacking}
        raise InputError("the case names blobs without end")

    async def _sizes(self, lacking: list[Needed], deadline: Deadline) -> list[int]:
        unknown = [need.hash for need in lacking if need.size_bytes <= 0]
        found = dict(zip(unknown, await self._context.blobs.sizes(unknown, deadline), strict=True))
        return [need.size_bytes if need.size_bytes > 0 else found[need.hash] for need in lacking]

    async def _have(
        self, directory: Path, need: Needed, size_bytes: int, slots: asyncio.Semaphore, deadline: Deadline
    ) -> None:
        """One blob: this machine may have it on disk already; what comes is checked against its hash."""
        async with slots:
            data = await asyncio.to_thread(self._context.chunk_cache.get, BlobHash(need.hash))
            if data is None and need.shard:
                shard = (need.shard, need.shard_bytes)
                data = await self._context.blobs.get_range(shard, need.start, size_bytes, deadline)
            elif data is None:
                data = await self._context.blobs.get((need.hash, size_bytes), deadline)
            await asyncio.to_thread(put_blob, directory, need.hash, data)
