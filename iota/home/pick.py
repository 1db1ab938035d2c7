"""Which runs of which validators fit this machine: memory by stage against what is free, hardware class, and why not."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from iota.plan import human_bytes
from iota.remote import Remote
from subnet.errors import IotaError
from subnet.protocol.api import RunSummary
from subnet.timing import Deadline

CALL_S = 20.0


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """A run of a validator. ``fits`` None: not known before it begins."""

    url: str
    run: str
    state: str
    fits: bool | None
    why: str
    stage_bytes: tuple[int, ...] = ()
    """What each stage takes; empty where that isn't known."""


class HardwareCheck(msgspec.Struct, frozen=True):
    """How this machine's class is found out; apart, since it takes seconds of torch."""

    wanted: Callable[[Remote, str], tuple[bool | None, str]]


def offers_of(
    url: str, free_bytes: int, stage_bytes: Callable[[Remote, str], tuple[int, ...]], hardware: HardwareCheck | None
) -> list[Offer]:
    """All unfinished runs of a validator, in its order; :class:`IotaError` where it doesn't answer."""
    remote = Remote(url)
    found: list[Offer] = []
    for run in remote.runs(Deadline.after(CALL_S)):
        if run.state == "finished":
            continue
        found.append(_offer(remote, run, free_bytes, stage_bytes, hardware))
    return found


def _offer(
    remote: Remote,
    run: RunSummary,
    free_bytes: int,
    stage_bytes: Callable[[Remote, str], tuple[int, ...]],
    hardware: HardwareCheck | None,
) -> Offer:
    def offer(fits: bool | None, why: str, sizes: tuple[int, ...] = ()) -> Offer:
        return Offer(url=remote.url, run=run.name, state=run.state, fits=fits, why=why, stage_bytes=sizes)

    try:
        sizes = stage_bytes(remote, run.name)
    except IotaError as error:
        return offer(None, f"can't be looked at: {error.reason}")
    fits, why = memory_fits(sizes, free_bytes)
    if fits and hardware is not None:
        wanted, said = hardware.wanted(remote, run.name)
        if wanted is False:
            return offer(False, said, sizes)
    return offer(fits, why, sizes)


def memory_fits(sizes: Sequence[int], free_bytes: int) -> tuple[bool, str]:
    """A newcomer is put at the stage that holds up the run, so every stage has to fit."""
    free = f"{human_bytes(free_bytes)} are free"
    too_large = [stage for stage, size in enumerate(sizes) if size > free_bytes]
    if not too_large:
        return True, f"the largest of its {len(sizes)} stages takes {human_bytes(max(sizes))}, {free}"
    stages = ", ".join(f"stage {stage} takes {human_bytes(sizes[stage])}" for stage in too_large[:4])
    more = f" and {len(too_large) - 4} more" if len(too_large) > 4 else ""
    return False, f"{stages}{more}, {free}; the validator puts a newcomer where it is needed, so all have to fit"


def best(offers: Sequence[Offer]) -> Offer | None:
    """The first that fits, one that runs before one that is queued."""
    fitting = [offer for offer in offers if offer.fits]
    return next((offer for offer in fitting if offer.state != "queued"), fitting[0] if fitting else None)


def stage_bytes_of(remote: Remote, run: str) -> tuple[int, ...]:
    """Peak memory of each stage for one more replica, from what the validator publishes."""
    from iota.miner_look import plan_of
    from subnet.model.memory import Budgets, stage_memory

    plan = plan_of(remote.plan_info(run, Deadline.after(CALL_S)))
    return tuple(stage_memory(plan, stage, Budgets()).peak_bytes for stage in range(plan.num_stages))


def hardware_check(device: str) -> HardwareCheck:
    def wanted(remote: Remote, run: str) -> tuple[bool | None, str]:
        from iota.miner_estimate import class_fits
        from iota.miner_look import plan_of
        from miner.hardware import prepare_torch
        from subnet.model.hardware_class import hardware_class

        info = remote.plan_info(run, Deadline.after(CALL_S))
        if info.hardware_class is None:
            return None, ""
        plan = plan_of(info)
        prepare_torch(plan.config.precision.num_threads)  # the class is that of a miner, which does the same
        return class_fits(info.hardware_class, hardware_class(plan, device))

    return HardwareCheck(wanted)
