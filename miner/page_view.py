"""What the miner's page shows, and what may be said to it; plain data, made from what the node has at this moment."""

from __future__ import annotations

import msgspec

from miner.caps import CapsReport, Flow
from miner.context import RunContext
from miner.flop_meter import Speed
from miner.sensors import MachineView
from miner.settings import MinerSettings
from miner.told import Told
from miner.waiting import why_waiting
from subnet.errors import InputError
from subnet.run.state import DONE, end_step, works

MIN_RATE_BYTES_PER_S = 1000.0
MAX_RATE_BYTES_PER_S = 1e12


class DiskUse(msgspec.Struct, frozen=True):
    what: str
    used_bytes: int
    limit_bytes: int


class RunPart(msgspec.Struct, frozen=True, kw_only=True):
    """What this miner does in a run."""

    run: str
    stage: int | None
    """None: not let in yet."""
    first_layer: int
    last_layer: int
    num_stages: int
    incarnation: str
    step: int
    steps: int
    leases: int
    queued: int
    """Jobs of the compute thread, the running one among them."""
    busy_s: dict[str, float]
    """Time of the compute thread by kind of work; ``waiting``: with nothing to compute."""


class MinerView(msgspec.Struct, frozen=True, kw_only=True):
    """``GET /v1/miner``. ``state``: stopped, resting (the machine is in use), looking (for a validator with a run),
    joining, waiting, working."""

    hotkey: str
    time_s: float
    validator: str
    """URL, empty while it looks for one."""
    state: str
    waiting_for: str
    part: RunPart | None
    upload: Flow
    download: Flow
    device: str
    device_memory_bytes: int
    device_memory_limit_bytes: int | None
    reachable: bool
    reach: str
    disk: tuple[DiskUse, ...]
    told: Told | None = None
    """What it was told when it asked to be let in, where it isn't yet; kept over restarts."""
    machine: MachineView | None = None
    """None: not looked at yet."""
    speed: Speed | None = None


class CapsChange(msgspec.Struct, frozen=True):
    """``POST /v1/miner/caps``: of both directions, at once and until the process ends. None: no limit."""

    upload_bytes_per_s: float | None
    download_bytes_per_s: float | None


class WorkChange(msgspec.Struct, frozen=True):
    """``POST /v1/miner/work``. False: leases go back, then nothing is done until True."""

    working: bool


def check_caps(change: CapsChange) -> None:
    for way, rate in (("upload", change.upload_bytes_per_s), ("download", change.download_bytes_per_s)):
        if rate is not None and not MIN_RATE_BYTES_PER_S <= rate <= MAX_RATE_BYTES_PER_S:
            raise InputError(f"{way} = {rate:g} bytes a second is not allowed", hint="allowed: none, or 1 kB to 1 TB")


def view_of(
    hotkey: str,
    settings: MinerSettings,
    report: CapsReport,
    context: RunContext | None,
    *,
    validator: str,
    wanted: bool,
    rests: str = "",
    told: Told | None = None,
    machine: MachineView | None = None,
    speed: Speed | None = None,
) -> MinerView:
    part = None if context is None else part_of(context)
    state, waits = ("resting", rests) if wanted and rests else _state(context, part, wanted=wanted, validator=validator)
    return MinerView(
        hotkey=hotkey,
        time_s=report.time_ns / 1e9,
        validator=validator,
        state=state,
        waiting_for=waits,
        part=part,
        upload=report.upload,
        download=report.download,
        device=settings.device if context is None else context.device,
        device_memory_bytes=report.device_memory_bytes,
        device_memory_limit_bytes=report.device_memory_limit_bytes,
        reachable=report.reachable,
        reach=report.reach,
        disk=() if context is None else disk_of(context),
        told=told,
        machine=machine,
        speed=speed if part is not None and part.stage is not None else None,
    )


def _state(context: RunContext | None, part: RunPart | None, *, wanted: bool, validator: str) -> tuple[str, str]:
    if not wanted:
        return "stopped", "you: press Start"
    if context is None or part is None:
        return (
            "looking",
            "a validator that leads a run" if not validator else "the run's data and the device to be ready",
        )
    if part.queued:
        return "working", ""
    waits = why_waiting(context.run_state, context.member, context.local)
    return ("joining" if part.stage is None else "waiting"), waits


def part_of(context: RunContext) -> RunPart:
    state, member = context.run_state, context.member
    info = state.members.get(member) if member is not None else None
    stage = None if info is None else info.stage
    layers = range(0) if stage is None else context.plan.layers_of(stage)
    leases = 0
    if member is not None and stage is not None:
        for work in works(state):
            leases += sum(work.items[stage][m].status != DONE for m in work.held.get(member, ()))
    return RunPart(
        run=context.plan.config.run.name,
        stage=stage,
        first_layer=layers.start,
        last_layer=layers.stop - 1,
        num_stages=context.plan.num_stages,
        incarnation="" if member is None else f"{member.term}.{member.number}",
        step=max(0, state.next_step),
        steps=context.plan.config.run.steps if state.run is None else end_step(state),
        leases=leases,
        queued=len(context.compute),
        busy_s=context.compute.time_by_kind(),
    )


def disk_of(context: RunContext) -> tuple[DiskUse, ...]:
    settings = context.settings
    return (
        DiskUse("tokens, snapshots, merged gradients", context.chunk_cache.used_bytes, settings.cache_disk_bytes),
        DiskUse("boundaries that audits may ask for", context.cache.disk_used, settings.boundary_disk_bytes),
        DiskUse("boundaries in memory", context.cache.memory_used, settings.boundary_memory_bytes),
    )
