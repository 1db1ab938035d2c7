"""A leader whose disk takes files up to a size: run as a process, it says what is committed and ends as a validator does."""

from __future__ import annotations

import asyncio
import resource
import sys
from pathlib import Path

from journal_cases import PLANNED, Rig

from neurons.entry import guarded
from subnet.run.events import HardwareClassSet
from validator.tasks import Completion


async def lead(path: Path, limit_bytes: int, num_records: int) -> None:
    rig = Rig(path)
    if limit_bytes:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, resource.RLIM_INFINITY))
    coordinator = rig.coordinator
    coordinator.begin(PLANNED, None)
    print("term", coordinator.state.term, flush=True)

    async def write() -> None:
        for i in range(num_records):
            event = HardwareClassSet((f"{i:02000d}",), "operator")
            coordinator.complete(Completion(None, lambda _, event=event: (event,)))  # type: ignore[arg-type]
            wanted = len(rig.journal)
            while rig.journal.committed <= wanted:
                await asyncio.sleep(0.001)
            print("committed", rig.journal.committed, rig.journal.head, flush=True)

    driver, writer = asyncio.create_task(coordinator.run()), asyncio.create_task(write())
    try:
        await asyncio.wait({driver, writer}, return_when=asyncio.FIRST_COMPLETED)
        if driver.done():
            await driver
    finally:
        for task in (driver, writer):
            task.cancel()
        await asyncio.wait({driver, writer})
        await coordinator.close()


def main() -> int:
    path, limit_bytes, num_records = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    asyncio.run(lead(path, limit_bytes, num_records))
    return 0


if __name__ == "__main__":
    sys.exit(guarded(main))
