"""Jobs run one at a time, most urgent first, off the event loop; what was dropped never runs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from miner.compute import BACKWARD, FORWARD, URGENT, ComputeThread


@pytest.fixture
async def thread() -> AsyncIterator[ComputeThread]:
    compute = ComputeThread()
    yield compute
    assert await asyncio.to_thread(compute.stop)


class Gate:
    """A job that holds the thread until it is opened."""

    def __init__(self, compute: ComputeThread) -> None:
        self.open, self.entered = threading.Event(), threading.Event()
        self.future = compute.submit("gate", (URGENT,), self._hold)

    def _hold(self) -> bool:
        self.entered.set()
        return self.open.wait(10)


async def test_the_most_urgent_goes_first(thread: ComputeThread) -> None:
    gate, order = Gate(thread), list[str]()
    await asyncio.to_thread(gate.entered.wait, 10)
    jobs = [
        thread.submit(name, priority, lambda name=name: order.append(name))
        for name, priority in [("f2", (FORWARD, 2)), ("f1", (FORWARD, 1)), ("b3", (BACKWARD, 3)), ("merge", (URGENT,))]
    ]
    assert len(thread) == 5
    gate.open.set()
    await asyncio.gather(*jobs)
    assert order == ["merge", "b3", "f1", "f2"]


async def test_runs_on_one_thread_that_is_not_the_loops(thread: ComputeThread) -> None:
    names = {await thread.submit(i, (FORWARD, i), lambda: threading.current_thread().name) for i in range(3)}
    assert names == {"compute"}


async def test_a_dropped_job_never_runs(thread: ComputeThread) -> None:
    gate, ran = Gate(thread), list[int]()
    await asyncio.to_thread(gate.entered.wait, 10)
    unwanted = thread.submit(1, (FORWARD, 1), lambda: ran.append(1))
    wanted = thread.submit(2, (FORWARD, 2), lambda: ran.append(2))
    assert thread.drop(lambda key: key == 1) == 1
    assert thread.drop(lambda key: key == "gate") == 0, "the running job is left alone"
    gate.open.set()
    await wanted
    assert unwanted.cancelled()
    assert ran == [2]


async def test_an_error_reaches_whoever_waits_and_the_thread_goes_on(thread: ComputeThread) -> None:
    def fail() -> None:
        raise ZeroDivisionError("no")

    with pytest.raises(ZeroDivisionError):
        await thread.submit("bad", (FORWARD,), fail)
    assert await thread.submit("good", (FORWARD,), lambda: 7) == 7
    assert set(thread.time_by_kind()) == {"str", "waiting"}


async def test_stop_cancels_what_is_queued() -> None:
    compute = ComputeThread()
    gate = Gate(compute)
    await asyncio.to_thread(gate.entered.wait, 10)
    queued = compute.submit("late", (FORWARD,), lambda: None)
    stopping = asyncio.create_task(asyncio.to_thread(compute.stop))
    await asyncio.sleep(0)
    gate.open.set()
    assert await stopping
    await asyncio.sleep(0)
    assert queued.cancelled() or queued.done()
