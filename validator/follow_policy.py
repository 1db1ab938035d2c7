"""Whether a leader counts with the policy that this follower has: where it doesn't, their scores and weights differ."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import NoReturn

from loguru import logger

from subnet.policy.policy import short
from subnet.score.book import Told
from validator.follow_run import FollowedRun
from validator.policy_keeper import DEFAULT_DIGEST

LOOK_S = 0.5


def doubt_of(told: Told | None, own: str) -> str:
    """``told``: what the journal last said of its leader's policy; ``own``: digest of the policy here. Empty where they agree."""
    digest = told.digest if told is not None else DEFAULT_DIGEST
    if digest == own:
        return ""
    since = (
        time.strftime(" since %Y-%m-%d %H:%M:%S UTC", time.gmtime(told.effective_s))
        if told and told.effective_s
        else ""
    )
    return (
        f"its leader counts with policy {short(digest)}{since}, this validator with {short(own)}: their scores differ "
        "(iota policy diff URL URL)"
    )


class PolicyDoubts:
    def __init__(self, runs: Callable[[], Iterable[FollowedRun]], own: Callable[[], str]) -> None:
        self._runs, self._own = runs, own

    def look(self) -> None:
        for run in list(self._runs()):
            if run.state.run is None:
                continue
            doubt = doubt_of(run.book.told, self._own())
            if doubt and doubt != run.policy_doubt:
                logger.warning("run {}: {}", run.name, doubt)
            run.policy_doubt = doubt

    async def run(self) -> NoReturn:
        """Forever."""
        while True:
            self.look()
            await asyncio.sleep(LOOK_S)
