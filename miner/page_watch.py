"""What the miner's page shows of the machine and of speed, looked at every few seconds, off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from miner.context import RunContext
from miner.flop_meter import FlopMeter
from miner.hardware import choose_device
from miner.sensors import MachineView, Sensors
from subnet.timing import SYSTEM_CLOCK

EVERY_S = 5.0


class PageWatch:
    """``wanted``: the device as the settings name it."""

    def __init__(self, wanted: str) -> None:
        self._wanted = wanted
        self.flops = FlopMeter()
        self.machine: MachineView | None = None

    async def keep(self, context: Callable[[], RunContext | None]) -> None:
        """For ever."""
        sensors = Sensors(await asyncio.to_thread(choose_device, self._wanted))
        while True:
            now_s = SYSTEM_CLOCK.now_s()
            self.machine = await asyncio.to_thread(sensors.read, now_s)
            self.count(now_s, context())
            await asyncio.sleep(EVERY_S)

    def count(self, now_s: float, context: RunContext | None) -> None:
        """What was computed by now."""
        if context is None or context.stage is None:
            return
        plan, stage = context.plan, context.stage.stage
        tokens = plan.config.pipeline.microbatch_rows * plan.config.data.sequence_length
        item_flops = tokens * sum(plan.units.unit_flops_per_token[unit] for unit in plan.stage_units[stage])
        self.flops.note(now_s, context.compute.num_done, item_flops, last_stage=plan.is_last(stage))
