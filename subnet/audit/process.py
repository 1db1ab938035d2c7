"""Replays cases in a process of their own: one at a time, killed at its deadline, started again when it has died.

What the worker says is an error of the tree with the worker's code; that it died is :class:`WorkerDied` with the end of what
it wrote to stderr, and says nothing about the case. Nothing outlives :meth:`AuditProcess.close`. No torch.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections import deque
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from loguru import logger

from subnet import errors
from subnet.allocator import with_huge_pages
from subnet.audit.case import Findings
from subnet.audit.messages import DEFAULT_GRAPH_BYTES, LIMIT_MESSAGE_BYTES, OTHER_SETTINGS, ReplayAnswer, ReplayRequest
from subnet.errors import InputError, IotaError, Refusal, Refused
from subnet.protocol import wire
from subnet.timing import Deadline

_KEPT_LINES = 40
_TOLD = 1000
"""Characters of them that an error quotes."""
_LIMIT_LINE_BYTES = 64 << 10
_ROOT = Path(__file__).resolve().parents[2]
COMMAND = (sys.executable, "-m", "subnet.audit.worker")
CLOSE_S = 2.0
"""An idle worker ends by itself when its input ends; then it is killed."""


class WorkerDied(IotaError):
    """The process that replays ended, or said what can't be read."""

    code = "audit_worker"
    retryable = True


class _Worker:
    """One process and the tail of its stderr."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self.process, self._stdin, self._stdout = process, process.stdin, process.stdout
        self._tail: deque[str] = deque(maxlen=_KEPT_LINES)
        self._reader = asyncio.create_task(self._read(process.stderr), name="audit worker's stderr")
        self.used = False

    @classmethod
    async def start(cls) -> _Worker:
        path = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        process = await asyncio.create_subprocess_exec(
            *COMMAND,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=_LIMIT_LINE_BYTES,
            env=with_huge_pages(os.environ) | {"PYTHONPATH": path},
        )
        return cls(process)

    async def ask(self, request: ReplayRequest) -> ReplayAnswer:
        self.used = True
        data = wire.encode(request)
        try:
            self._stdin.write(wire.FRAME_LENGTH.pack(len(data)) + data)
            await self._stdin.drain()
            (size,) = wire.FRAME_LENGTH.unpack(await self._stdout.readexactly(wire.FRAME_LENGTH.size))
            if size > LIMIT_MESSAGE_BYTES:
                raise WorkerDied(f"an answer of {size} bytes")
            answer = await self._stdout.readexactly(size)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            await self.end(CLOSE_S)  # it is ending: killed amid that it would have no status of its own
            raise WorkerDied(f"it ended with status {self.process.returncode}{self._words()}") from error
        try:
            return wire.decode(answer, ReplayAnswer, limit_bytes=LIMIT_MESSAGE_BYTES, what="the worker's answer")
        except InputError as error:
            raise WorkerDied(error.reason) from error

    async def end(self, grace_s: float = 0.0) -> None:
        """Its input ends; if it doesn't end by then it is killed. Everything of it is gone afterwards."""
        self._stdin.close()
        try:
            async with asyncio.timeout(grace_s):
                await self.process.wait()
        except TimeoutError:
            if self.process.returncode is None:
                self.process.kill()
            await self.process.wait()
        await asyncio.wait({self._reader}, timeout=CLOSE_S)
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    def _words(self) -> str:
        return "; stderr ends: " + " | ".join(self._tail)[-_TOLD:] if self._tail else ""

    async def _read(self, stream: asyncio.StreamReader) -> None:
        while True:
            try:
                line = await stream.readuntil(b"\n")
            except asyncio.IncompleteReadError as error:
                line = error.partial
            except asyncio.LimitOverrunError as error:
                line = await stream.read(error.consumed)
            if not line:
                return
            text = line.decode(errors="replace").strip()[:400]
            if text:
                self._tail.append(text)
                logger.debug("audit worker: {}", text)


class AuditProcess:
    """``budget_bytes`` bounds the worker's memory above its libraries: stage states that it keeps, and the work on a case.

    ``tolerant``: on a machine of another hardware class findings say how far apart things are (``other_class``); without it
    such a replay fails with ``other_hardware``.
    """

    def __init__(
        self, budget_bytes: int, *, device: str = "cpu", graph_bytes: int = DEFAULT_GRAPH_BYTES, tolerant: bool = False
    ) -> None:
        self._budget_bytes, self._device, self._graph_bytes = budget_bytes, device, graph_bytes
        self._tolerant = tolerant
        self._worker: _Worker | None = None
        self._turn = asyncio.Lock()
        self._closed = False
        self.held: dict[int, int] = {}
        """By stage: the state that the worker keeps (``held`` of :func:`subnet.audit.bundle.needed_blobs`)."""
        self.started = 0
        """Workers so far."""

    async def run(self, directory: Path, deadline: Deadline, *, fresh: bool = False) -> Findings:
        """Replay the bundle in this directory. ``fresh``: in a process that has done nothing before.

        Waiting for its turn counts; at the deadline, or cancelled, the worker is killed.
        """
        request = ReplayRequest(
            str(directory), self._budget_bytes, self._device, self._graph_bytes, tolerant=self._tolerant
        )
        async with deadline.limit(f"the replay of {directory.name}"), self._turn:
            answer = await self._ask(request, fresh=fresh)
            if answer.code == OTHER_SETTINGS:
                answer = await self._ask(request, fresh=True)
        if answer.findings is None:
            raise _error(answer)
        return answer.findings

    async def _ask(self, request: ReplayRequest, *, fresh: bool) -> ReplayAnswer:
        if self._closed:
            raise WorkerDied("audits are over")
        worker = await self._fit_worker(fresh)
        try:
            answer = await worker.ask(request)
        except BaseException:
            await self._drop()
            raise
        self.held = dict(answer.held)
        return answer

    async def _fit_worker(self, fresh: bool) -> _Worker:
        worker = self._worker
        if worker is not None and (worker.process.returncode is not None or (fresh and worker.used)):
            await self._drop()
            worker = None
        if worker is None:
            worker = self._worker = await _Worker.start()
            self.started += 1
        return worker

    async def _drop(self) -> None:
        worker, self._worker, self.held = self._worker, None, {}
        if worker is not None:
            await _finish(worker.end())

    async def close(self) -> None:
        """End the worker; a replay under way ends with :class:`WorkerDied`."""
        self._closed = True
        worker, self._worker, self.held = self._worker, None, {}
        if worker is not None:
            await _finish(worker.end(0.0 if self._turn.locked() else CLOSE_S))


async def _finish(work: Coroutine[Any, Any, None]) -> None:
    """To its end, even if the caller is cancelled: no process is left behind."""
    task = asyncio.create_task(work, name="end audit worker")
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise


def _error(answer: ReplayAnswer) -> IotaError:
    """The class of the tree with this code; else a refusal that carries it."""
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, IotaError)]
    for kind in kinds:
        if kind.code == answer.code and kind is not Refused and kind is not IotaError:
            return kind(answer.reason, hint=answer.hint)
    retry_after = 1.0 if answer.retryable else None
    return Refused(Refusal(answer.code, answer.reason, retry_after, answer.hint), who="the audit worker")
