"""A model of the public IOTA's training loop, so that claims can be compared on one fleet: rates and epochs, no protocol.

Nothing here is their code. Each assumption below has its source: C = the public client's code and its constants (releases of
September 2025 to May 2026), D = their documentation, S = what they have said in public, and ? = our own guess where nothing is
public. Their orchestrator is closed; its thresholds are those that the client names.

It favours the legacy system where in doubt: no failed transfers, no failed phases, perfect balance of work within a stage by
speed, validation costs nothing, and an epoch's merge always succeeds.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence

import msgspec

from subnet.errors import ConfigError
from subnet.simulate.costs import StageCosts
from subnet.simulate.fleet import Fleet, GroupPart
from subnet.simulate.links import BYTES_PER_MBIT

ASSUMPTIONS: tuple[tuple[str, str], ...] = (
    ("C", "stages are dealt by count: a joiner goes where fewest are, whatever its speed"),
    (
        "C/D",
        "an activation is PUT into the store by its maker and GET by its taker, pulled each 0.51 s; since March 2026 it "
        "goes straight (set activations = 'straight')",
    ),
    ("C", "activations travel in bf16 through a bottleneck of 1/64 of the width (ratio 64 for most of their models)"),
    (
        "C",
        "the epoch ends for all when 80 % of all miners have done at least B_min = 10 backwards (or as many as given)",
    ),
    ("C", "whoever has fewer than B_min then has worked for nothing: its batches aren't in the merge"),
    (
        "C",
        "pseudo-gradients in bf16, W = 2 bytes a parameter of the stage: W up, 2 W down to reduce, W down merged, and 4 W / N up",
    ),
    (
        "C",
        "the merge of a stage goes on when 80 % of its miners have submitted, and ends when 30 % of partitions are merged",
    ),
    ("D", "nobody trains while weights are uploaded and merged"),
    ("C/D", "who joins in the middle of an epoch waits for the next one"),
    ("C", "then it has two epochs of warm-up in which what it does isn't counted (warm_up_epochs)"),
    ("C", "a miner that dies loses all it has done in the epoch"),
    ("C", "a phase ends after 3 h at the latest"),
    ("?", "who can't reach B_min any more (down, benched) isn't waited for, if that is more than 20 % of the miners"),
    ("?", "the phases' polling costs 1 s each (the client polls each second)"),
)


MAX_FAULTS = 100_000
PHASE_LIMIT_S = 10_800.0
"""A phase that takes longer goes over into the next."""


class LegacySettings(msgspec.Struct, frozen=True):
    """What the model can be told. Defaults are the client's constants."""

    epochs: int = 20
    min_batches: int = 10
    quorum: float = 0.8
    merge_share: float = 0.3
    bottleneck: int = 64
    activations: str = "store"
    poll_s: float = 0.51
    phase_poll_s: float = 1.0
    warm_up_epochs: int = 2

    def __post_init__(self) -> None:
        if self.activations not in ("store", "straight"):
            raise ConfigError(f"activations = {self.activations!r} is not allowed", hint="allowed: store, straight")
        if self.epochs < 1 or self.min_batches < 1:
            raise ConfigError(
                f"epochs = {self.epochs}, min_batches = {self.min_batches} are not allowed", hint="allowed: 1 or more"
            )


class LegacyFigures(msgspec.Struct, frozen=True):
    """What came of it. ``tokens_per_s`` counts only what is in a merge; ``done_tokens_per_s`` all that was computed."""

    epochs: int
    seconds: float
    tokens_per_s: float
    done_tokens_per_s: float
    mfu: float
    train_s: float
    """Mean of an epoch."""
    merge_s: float
    discarded_share: float
    """Of the computed work: below the minimum, benched, warming up, or dead."""
    faults: int
    up_bytes_per_miner: float
    """An epoch's merge."""
    down_bytes_per_miner: float


class _Miner:
    def __init__(self, group: GroupPart, stage: int, rate: float, name: str, seed: int) -> None:
        self.group, self.stage, self.rate = group, stage, rate
        self.rng = random.Random(f"{seed}/faults/{name}")
        self.up, self.benched, self.warm_up = True, False, 0
        self.next_s = self.rng.expovariate(1 / (3600 * group.mtbf_hours)) if group.mtbf_hours else float("inf")
        self.died = False


def item_rate(costs: StageCosts, settings: LegacySettings, fleet: Fleet, group: GroupPart, stage: int) -> float:
    """Microbatches a second of one miner: the slowest of its GPU and both directions of its link.

    A longer way makes no rate lower while enough activations are under way; a miner has at most two in its queue, so the
    round trips of the store count where they are longer than two items.
    """
    gpu_s = costs.item_s(stage, group.gpu)
    size = 2 * costs.tokens * costs.plan.hidden_size / settings.bottleneck
    each_way = (stage > 0) + (stage < costs.num_stages - 1)
    up_s = each_way * size / (group.up_mbit * BYTES_PER_MBIT / group.per_link)
    down_s = each_way * size / (group.down_mbit * BYTES_PER_MBIT / group.per_link)
    trips = 4 if settings.activations == "store" else 1
    wait_s = settings.poll_s / 2 * (settings.activations == "store" or stage == 0)
    latency_s = trips * (group.rtt_ms + fleet.store.rtt_ms * (settings.activations == "store")) / 1000 + wait_s
    return 1 / max(gpu_s, up_s, down_s, (gpu_s + latency_s) / 2)


def simulate_legacy(costs: StageCosts, fleet: Fleet, settings: LegacySettings, *, seed: int = 0) -> LegacyFigures:
    """Epoch by epoch until so many are merged. Deterministic by seed."""
    miners = _deal(costs, fleet, settings, seed)
    now_s = counted = done = train_total_s = merge_total_s = 0.0
    faults = 0
    for _ in range(settings.epochs):
        for miner in miners:
            miner.died = False
            if miner.benched and miner.up:
                miner.benched = False
        train_s, work, faults_now = _train(costs, miners, settings, now_s)
        now_s, faults = now_s + train_s, faults + faults_now
        merge_s = max(
            (_merge_s(costs, fleet, settings, miners, stage) for stage in range(costs.num_stages)), default=0.0
        )
        for miner in miners:
            batches = work[id(miner)]
            done += batches * costs.stage_flops[miner.stage]
            if batches >= settings.min_batches and not miner.died and miner.warm_up == 0:
                counted += batches * costs.stage_flops[miner.stage]
            miner.warm_up = max(0, miner.warm_up - 1)
        now_s += merge_s
        faults += _pass_time(miners, now_s, settings.warm_up_epochs)
        train_total_s, merge_total_s = train_total_s + train_s, merge_total_s + merge_s
    flops_per_token = sum(costs.stage_flops) / costs.tokens
    w = 2 * max(costs.params)
    replicas = max(1, min(sum(m.stage == s for m in miners) for s in range(costs.num_stages)))
    return LegacyFigures(
        epochs=settings.epochs,
        seconds=now_s,
        tokens_per_s=counted / flops_per_token / now_s,
        done_tokens_per_s=done / flops_per_token / now_s,
        mfu=counted / (now_s * fleet.peak_flops),
        train_s=train_total_s / settings.epochs,
        merge_s=merge_total_s / settings.epochs,
        discarded_share=1 - counted / done if done else 0.0,
        faults=faults,
        up_bytes_per_miner=w + 4 * w / replicas,
        down_bytes_per_miner=3 * w,
    )


def _deal(costs: StageCosts, fleet: Fleet, settings: LegacySettings, seed: int) -> list[_Miner]:
    """By count, in the order of the fleet file, mixed as joins are."""
    groups = [group for group in fleet.group for _ in range(group.count)]
    random.Random(f"{seed}/joins").shuffle(groups)
    return [
        _Miner(
            group, n % costs.num_stages, item_rate(costs, settings, fleet, group, n % costs.num_stages), str(n), seed
        )
        for n, group in enumerate(groups)
    ]


def _train(
    costs: StageCosts, miners: Sequence[_Miner], settings: LegacySettings, begin_s: float
) -> tuple[float, dict[int, float], int]:
    """Fluid between faults: the pipeline goes as fast as its slowest stage, each stage's work shared by speed."""
    work = {id(miner): 0.0 for miner in miners}
    now_s, faults = begin_s, 0
    num_needed = settings.quorum * len(miners)
    for _ in range(MAX_FAULTS):
        active = [[m for m in miners if m.stage == s and m.up and not m.benched] for s in range(costs.num_stages)]
        rates = [sum(m.rate for m in stage) for stage in active]
        slowest = min(rates)
        next_s = min(m.next_s for m in miners)
        shares = {id(m): m.rate / rates[m.stage] for stage in active for m in stage} if slowest > 0 else {}
        until_s = _time_to_quorum(miners, work, shares, slowest, settings.min_batches, num_needed)
        wait_s = min(until_s, max(0.0, next_s - now_s))
        if wait_s == float("inf"):
            raise ConfigError("the fleet never reaches the quorum of the legacy model", hint="more miners than stages")
        for key, share in shares.items():
            work[key] += share * slowest * wait_s
        now_s += wait_s
        if until_s <= max(0.0, next_s - (now_s - wait_s)):
            return now_s - begin_s, work, faults
        if now_s - begin_s > PHASE_LIMIT_S:
            return now_s - begin_s, work, faults
        faults += _pass_time(miners, now_s, settings.warm_up_epochs)
    raise ConfigError("the legacy model's fleet fails too often to end an epoch", hint="a longer mtbf_hours")


def _time_to_quorum(
    miners: Sequence[_Miner],
    work: dict[int, float],
    shares: dict[int, float],
    rate: float,
    min_batches: int,
    num_needed: float,
) -> float:
    """Seconds until 80 % of all miners have their minimum, or all that still can."""
    times: list[float] = []
    for miner in miners:
        lacking = min_batches - work[id(miner)]
        own = shares.get(id(miner), 0.0) * rate
        times.append(0.0 if lacking <= 0 else lacking / own if own > 0 else float("inf"))
    able = sum(time < float("inf") for time in times)
    index = max(0, round(min(num_needed, max(1, able))) - 1)
    return heapq.nsmallest(index + 1, times)[-1]


def _pass_time(miners: Sequence[_Miner], now_s: float, warm_up_epochs: int) -> int:
    """What has failed or come back by now."""
    faults = 0
    for miner in miners:
        while miner.next_s <= now_s:
            if miner.up:
                miner.up, miner.died, faults = False, True, faults + 1
                miner.next_s += miner.rng.expovariate(1 / miner.group.outage_s)
            else:
                miner.up, miner.benched = True, True
                miner.warm_up = warm_up_epochs
                miner.next_s += miner.rng.expovariate(1 / (3600 * miner.group.mtbf_hours))
    return faults


def _merge_s(costs: StageCosts, fleet: Fleet, settings: LegacySettings, miners: Sequence[_Miner], stage: int) -> float:
    """Upload by the 80th percentile of the stage, then the reduction by the 30th, then everybody's download by the 80th."""
    here = [m for m in miners if m.stage == stage and m.up and not m.benched]
    if not here:
        return settings.phase_poll_s
    w = 2.0 * costs.params[stage]
    n = len(here)
    store_up = fleet.store.up_mbit * BYTES_PER_MBIT / (len(miners) or 1)
    store_down = fleet.store.down_mbit * BYTES_PER_MBIT / (len(miners) or 1)

    def seconds(miner: _Miner, up: float, down: float) -> float:
        link = miner.group
        up_rate = min(link.up_mbit * BYTES_PER_MBIT / link.per_link, store_down)
        down_rate = min(link.down_mbit * BYTES_PER_MBIT / link.per_link, store_up)
        return max(up / up_rate, down / down_rate) + 4 * (link.rtt_ms + fleet.store.rtt_ms) / 1000

    def at(share: float, times: list[float]) -> float:
        return sorted(times)[min(n - 1, max(0, round(share * n) - 1))]

    upload_s = at(settings.quorum, [seconds(m, w, 0) for m in here])
    reduce_s = at(settings.merge_share, [seconds(m, 4 * w / n, 2 * w) for m in here])
    fetch_s = at(settings.quorum, [seconds(m, 0, w) for m in here])
    return upload_s + reduce_s + fetch_s + 3 * settings.phase_poll_s
