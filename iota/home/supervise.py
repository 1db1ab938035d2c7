"""``iota miner start``: one miner in this process, or one process for each, started again when it dies, ended together.

Exit statuses that starting again can't cure (a flag or a file to be mended, a convicted hotkey) are left alone.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from iota.home.places import Miner
from subnet.timing import Backoff

FINAL = (0, 2, 4)
STOP_S = 60.0
LONG_S = 300.0
"""Who ran for so long has a fresh start: the wait before the next one is short again."""
MAX_LINE_BYTES = 1 << 20


class Ended(msgspec.Struct, frozen=True):
    name: str
    status: int


def start_one(miner: Miner) -> int:
    """In this process, until it is told to stop."""
    from neurons import miner as neuron

    return neuron.main(["--config", str(miner.path)])


def start_all(miners: Sequence[Miner], say: Callable[[str], None]) -> int:
    """The worst exit status of those that ended for good; 0 when all were told to stop."""
    return asyncio.run(_all(miners, say))


async def _all(miners: Sequence[Miner], say: Callable[[str], None]) -> int:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping.set)
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_keep(one.name, one.path, stopping, say)) for one in miners]
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
    return max((task.result().status for task in tasks), default=0)


async def _keep(name: str, path: Path, stopping: asyncio.Event, say: Callable[[str], None]) -> Ended:
    backoff = Backoff(1.0, 60.0)
    while True:
        began_s = asyncio.get_running_loop().time()
        status = await _once(name, path, stopping, say)
        if stopping.is_set():
            return Ended(name, 0)
        if status in FINAL:
            say(f"{name} ended with status {status}")
            return Ended(name, status)
        if asyncio.get_running_loop().time() - began_s > LONG_S:
            backoff.reset()
        wait_s = backoff.next_s()
        say(f"{name} died with status {status}; it is started again in {wait_s:.0f} s")
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await stopping.wait()
        if stopping.is_set():
            return Ended(name, 0)


async def _once(name: str, path: Path, stopping: asyncio.Event, say: Callable[[str], None]) -> int:
    """One life of a process; its log comes with its name before each line."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "neurons.miner", "--config", str(path)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        limit=MAX_LINE_BYTES,
        start_new_session=True,  # Ctrl-C comes to us, and we tell it
    )
    assert process.stderr is not None
    ended, told = asyncio.create_task(process.wait()), asyncio.create_task(stopping.wait())
    reader = asyncio.create_task(_repeat(name, process.stderr, say))
    try:
        await asyncio.wait({ended, told}, return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():
            process.terminate()
            with suppress(TimeoutError):
                async with asyncio.timeout(STOP_S):
                    await asyncio.shield(ended)
        if not ended.done():
            say(f"{name} didn't end within {STOP_S:.0f} s: killed")
            process.kill()
        status = await ended
        await asyncio.wait({reader}, timeout=5.0)
        return status
    finally:
        for task in (told, reader):
            task.cancel()
        await asyncio.wait({told, reader})


async def _repeat(name: str, lines: asyncio.StreamReader, say: Callable[[str], None]) -> None:
    while line := await lines.readline():
        say(f"{name} | {line.decode(errors='replace').rstrip()}")
