"""Parts of a miner's turn in a run: working until it is lost or over, its first record, its plan."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from miner.directives import Directives
from miner.find_validator import Answered
from subnet.model.plan import ModelPlan, ModelUnits
from subnet.run.events import RunPlanned


async def first_of(work: Coroutine[Any, Any, None], watch: Coroutine[Any, Any, Answered]) -> Answered | None:
    """What the watch returns, after the work was cancelled and has cleaned up; None when the work ended first."""
    working, watching = (
        asyncio.create_task(work, name="taking part"),
        asyncio.create_task(watch, name="validator watch"),
    )
    tasks = {working, watching}
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        found = watching.result() if watching.done() and watching.exception() is None else None
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        if found is not None and not working.cancelled():
            await found.client.close()  # the work ended by itself at that very moment
    if not working.cancelled():
        working.result()
        return None
    return watching.result()


async def first_record(directives: Directives) -> RunPlanned:
    """Follow the stream just far enough to know the run."""
    follower = asyncio.create_task(directives.follow(), name="directives")
    try:
        while directives.state.run is None:
            changed = asyncio.create_task(directives.changed.wait())
            await asyncio.wait({changed, follower}, return_when=asyncio.FIRST_COMPLETED)
            changed.cancel()
            directives.changed.clear()
            if follower.done():
                follower.result()
    finally:
        follower.cancel()
        await asyncio.wait({follower})
    return directives.state.run


def plan_of(planned: RunPlanned) -> ModelPlan:
    """The run as this process computes it."""
    units = ModelUnits(planned.unit_tensors, planned.unit_flops_per_token, planned.tied)
    return ModelPlan(planned.config, planned.model_config, units, planned.cuts)
