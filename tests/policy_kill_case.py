"""A validator that is killed when a change of its policy is on disk, and no journal and no book has heard of it: run as a process.

policy_kill_case.py DIRECTORY
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

from subnet.chain.base import Metagraph
from subnet.policy.api import PolicyLine, PolicyRequest
from subnet.policy.policy import SubnetPolicy
from subnet.policy.score import ScorePolicy
from subnet.timing import ManualClock
from validator.policy_desk import PolicyDesk
from validator.policy_keeper import PolicyKeeper


def _plain(half_life_s: float) -> SubnetPolicy:
    score = ScorePolicy(half_life_s=half_life_s, uptime_exponent=0, deadline_exponent=0, audit_exponent=0)
    return SubnetPolicy(score=score)


BEFORE, AFTER = _plain(100.0), _plain(400.0)


class Blocks:
    """All that is asked of a chain."""

    async def block(self, *, timeout_s: float = 1.0) -> int:
        return 30

    async def block_time_s(self, *, timeout_s: float = 1.0) -> float:
        return 12.0


async def crash_between(directory: Path) -> None:
    def die(line: PolicyLine) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    keeper = PolicyKeeper(directory, BEFORE, "own", 5.0)
    graph = Metagraph(netuid=1, block=30, tempo=20, owner_hotkey="owner", neurons=())
    desk = PolicyDesk(keeper, "own", Blocks(), lambda: graph, ManualClock(), tell=die, effect=die)  # type: ignore[arg-type]
    await desk.apply("own", PolicyRequest(AFTER, BEFORE.digest))


if __name__ == "__main__":
    asyncio.run(crash_between(Path(sys.argv[1])))
