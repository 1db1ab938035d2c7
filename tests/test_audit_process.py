"""The worker survives what it is asked, is replaced when it dies or is late, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from audit_cases import LiveRun, a_plan, edit_item, other_hash
from test_audit_bundle import bundle_at

from subnet.audit import process as process_module
from subnet.audit.bundle import BLOBS_NAME, write_bundle
from subnet.audit.process import AuditProcess, WorkerDied
from subnet.audit.redo import redo
from subnet.errors import DeadlinePassed, HashMismatch, NotFound, OutOfSpace
from subnet.model.stage import prepare_torch
from subnet.timing import Deadline

prepare_torch(1)

PRETENDER = """
import sys, os, time, pathlib
sys.path.insert(0, {root!r})
from subnet.audit.case import Findings
from subnet.audit.messages import ReplayAnswer, ReplayRequest
from subnet.protocol import wire
source, sink = sys.stdin.buffer, sys.stdout.buffer
while len(head := source.read(4)) == 4:
    request = wire.decode(source.read(wire.FRAME_LENGTH.unpack(head)[0]), ReplayRequest, limit_bytes=1 << 20, what="")
    what = pathlib.Path(request.directory).name
    if what == "die":
        print("about to fall over", file=sys.stderr, flush=True)
        os._exit(7)
    if what == "hang":
        time.sleep(600)
    if what == "babble":
        sink.write(b"\\xff\\xff\\xff\\xff"); sink.flush(); time.sleep(600)
    if what == "chatter":
        sys.stderr.write("x" * 300_000); sys.stderr.flush()
    found = Findings(str(os.getpid()), (), None, (), 0.0, 0.0, 0)
    data = wire.encode(ReplayAnswer(findings=found, held=((0, 3),)))
    sink.write(wire.FRAME_LENGTH.pack(len(data)) + data); sink.flush()
"""


def soon() -> Deadline:
    return Deadline.after(100.0)


@pytest.fixture
async def pretended(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[AuditProcess]:
    """A supervisor whose workers do as they are named."""
    root = str(Path(process_module.__file__).parents[2])
    monkeypatch.setattr(process_module, "COMMAND", (sys.executable, "-c", PRETENDER.format(root=root)))
    supervisor = AuditProcess(1 << 30)
    yield supervisor
    await supervisor.close()


async def pid(supervisor: AuditProcess, name: str = "a", *, fresh: bool = False) -> int:
    return int((await supervisor.run(Path(name), soon(), fresh=fresh)).digest)


async def test_one_process_does_all_until_a_fresh_one_is_asked_for(pretended: AuditProcess) -> None:
    first = await pid(pretended)
    assert pretended.held == {0: 3}
    assert await pid(pretended, "chatter") == first
    second = await pid(pretended, fresh=True)
    assert second != first
    assert await pid(pretended) == second
    assert not alive(first)
    assert pretended.started == 2


async def test_a_fresh_process_that_has_done_nothing_is_fresh_enough(pretended: AuditProcess) -> None:
    await pid(pretended, fresh=True)
    assert pretended.started == 1


async def test_a_worker_that_dies_is_replaced_and_its_last_words_are_told(pretended: AuditProcess) -> None:
    first = await pid(pretended)
    with pytest.raises(WorkerDied, match=r"status 7.*about to fall over") as caught:
        await pretended.run(Path("die"), soon())
    assert caught.value.retryable
    assert pretended.held == {}
    assert await pid(pretended) != first


async def test_a_worker_killed_between_two_cases_is_not_noticed(pretended: AuditProcess) -> None:
    first = await pid(pretended)
    os.kill(first, signal.SIGKILL)
    while alive(first):
        await asyncio.sleep(0.01)
    try:
        second = await pid(pretended)
    except WorkerDied:  # its end was seen only when it was asked
        second = await pid(pretended)
    assert second != first


async def test_the_deadline_kills_and_the_next_case_goes_on(pretended: AuditProcess) -> None:
    first = await pid(pretended)
    with pytest.raises(DeadlinePassed, match="hang"):
        await pretended.run(Path("hang"), Deadline.after(0.2))
    assert not alive(first)
    assert await pid(pretended) != first


async def test_cases_take_turns(pretended: AuditProcess) -> None:
    pids = await asyncio.gather(*[pid(pretended, str(number)) for number in range(8)])
    assert len(set(pids)) == 1


async def test_a_cancelled_replay_leaves_no_process(pretended: AuditProcess) -> None:
    first = await pid(pretended)
    task = asyncio.create_task(pretended.run(Path("hang"), soon()))
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not alive(first)


async def test_an_answer_that_cannot_be_one_ends_the_worker(pretended: AuditProcess) -> None:
    with pytest.raises(WorkerDied, match="bytes"):
        await pretended.run(Path("babble"), soon())
    assert await pid(pretended)


async def test_closing_ends_a_replay_under_way_and_what_comes_after(pretended: AuditProcess) -> None:
    first = await pid(pretended)
    task = asyncio.create_task(pretended.run(Path("hang"), soon()))
    await asyncio.sleep(0.1)
    await pretended.close()
    with pytest.raises(WorkerDied):
        await task
    with pytest.raises(WorkerDied):
        await pretended.run(Path("a"), soon())
    assert not alive(first)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def test_the_real_worker_replays_survives_errors_and_other_threads(tmp_path: Path) -> None:
    live, threads = LiveRun(a_plan((0, 2))).run(2), LiveRun(a_plan((0, 2), threads=2)).run(1)
    case = live.case(1, 0)
    right = bundle_at(tmp_path / "right", live, case)
    lie = bundle_at(tmp_path / "lie", live, edit_item(case, 0, backward="", forward=other_hash("x")))
    damaged = bundle_at(tmp_path / "damaged", live, case)
    blob = damaged / BLOBS_NAME / case.partials[0].items[0].gradient
    blob.write_bytes(blob.read_bytes()[::-1])
    lacking = tmp_path / "lacking"
    write_bundle(lacking, live.case(1, 1), {})
    two = bundle_at(tmp_path / "two", threads, threads.case(0, 0))
    supervisor = AuditProcess(1 << 30)
    try:
        expected = redo(case, live.pool(), live.read, live.rows)
        found = await supervisor.run(right, soon())
        assert found.digest == expected.digest
        assert not any(partial.wrong for partial in found.partials)
        assert supervisor.held == {0: 2}
        with pytest.raises(HashMismatch, match="damaged"):
            await supervisor.run(damaged, soon())
        with pytest.raises(NotFound, match="lacks"):
            await supervisor.run(lacking, soon())
        with pytest.raises(NotFound):
            await supervisor.run(tmp_path / "nowhere", soon())
        lied = await supervisor.run(lie, soon())
        assert (lied.digest, len(lied.partials[0].wrong)) == (found.digest, 1)
        assert supervisor.started == 1
        assert not any(partial.wrong for partial in (await supervisor.run(two, soon())).partials)
        assert supervisor.started == 2
    finally:
        await supervisor.close()


async def test_a_budget_that_no_stage_fits_is_said(tmp_path: Path) -> None:
    live = LiveRun(a_plan((0, 2))).run(1)
    supervisor = AuditProcess(1 << 10)
    try:
        with pytest.raises(OutOfSpace, match="budget for audits"):
            await supervisor.run(bundle_at(tmp_path / "b", live, live.case(0, 0)), soon())
        worker = supervisor._worker
        assert worker is not None
        assert os.getpriority(os.PRIO_PROCESS, worker.process.pid) >= 10
    finally:
        began_s = time.monotonic()
        await supervisor.close()
        assert time.monotonic() - began_s < 60
