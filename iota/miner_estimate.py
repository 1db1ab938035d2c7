"""What a machine would have earned on a run in the last day, and why: arithmetic on what validator and chain publish.

Pure. :mod:`iota.miner_look` gets the facts and measures the machine. The sums, in order:

    share of a stage = own rate / (own rate + that of the stage's members)        rates in items/s
    items            = steps sealed in the last day · microbatches · share, at most what the machine can do in that time
    work             = items · FLOPs of an item of the stage
    reliability      = leases / (leases + unproven), to the policy's power: always there, right, and in time, but new
    score            = work · reliability / (that + the others' work · the others' reliability)
    a day's tokens   = score · (1 - burned) · what miners are paid in a tempo · tempos in a day
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain as joined

import msgspec

from subnet.chain.base import Hyperparameters, Metagraph
from subnet.errors import NotFound
from subnet.protocol.api import StepView
from subnet.score.decay import LN2, whole_power
from subnet.score.policy import ScorePolicy
from subnet.words import Member
from validator.stage_plan import Replica, place_joiner

DAY_S = 86_400.0


class StageFacts(msgspec.Struct, frozen=True):
    """One stage of the run."""

    stage: int
    item_flops: float
    """Of one microbatch, forward and backward: what an item pays."""
    rates: tuple[float | None, ...]
    """Items a second of each member; None where the validator hasn't measured it yet."""
    needs_bytes: int = 0
    """Memory of a miner there."""


class RunFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A run as its leader tells of it."""

    run: str
    state: str
    """``running``, ``finished``, ..., see :class:`~subnet.protocol.api.RunSummary`."""
    num_steps: int
    """Sealed in the last day."""
    covered_s: float
    """What of the last day they took."""
    microbatches: int
    """Paid items of a step and stage."""
    stages: tuple[StageFacts, ...]
    policy: ScorePolicy
    reliability: float
    """The miners' mean, by their work."""
    hardware_class: tuple[str, ...] | None
    """Golden hashes of the class that the run is pinned to; None: still open."""


class ChainFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the subnet pays, as of ``block``."""

    netuid: int
    block: int
    miners_per_tempo: float | None
    """Tokens that all miners together were paid in the last tempo, burned ones included; None: nobody was paid."""
    burn_share: float
    """Of the miners' incentive, what went to the owner's uid."""
    tempo_s: float
    registration_cost: float
    """TAO."""
    registration_allowed: bool
    slots: int
    slots_taken: int


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """This one, measured on the run's own shapes."""

    device: str
    name: str
    item_s: tuple[float, ...]
    """Seconds of one item's forward and backward, by stage; compute alone."""
    hardware_class: tuple[str, ...]
    free_bytes: int


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """What the machine would have done at one stage."""

    stage: int
    members: int
    members_items_per_s: float
    item_s: float
    share_of_stage: float
    items: float
    work_flops: float
    reliability: float
    score: float
    """Share of all miners' pay, 0 to 1."""
    needs_bytes: int
    fits: bool
    """Whether the stage's memory is free here."""
    tokens_per_day: float | None
    """None: the chain tells of no pay, or wasn't asked."""


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """The answer. ``stage``: where the validator would put a newcomer; ``offers`` has all stages."""

    run: str
    state: str
    steps_in_last_day: int
    covered_s: float
    device: str
    device_name: str
    wanted: bool | None
    """Whether this hardware class may join; None: the run's class isn't settled."""
    class_says: str
    stage: int
    why_stage: str
    offers: tuple[Offer, ...]
    chain: ChainFacts | None
    assumes: tuple[str, ...]

    @property
    def offer(self) -> Offer:
        return self.offers[self.stage]


def last_day(steps: Sequence[StepView], idle_s: float) -> tuple[int, float]:
    """(steps, seconds) of those sealed within the last day; ``idle_s``: since the last seal."""
    left_s, count, covered_s = DAY_S - idle_s, 0, 0.0
    for step in reversed(steps):
        if covered_s >= left_s:
            break
        count, covered_s = count + 1, covered_s + step.seconds
    return count, min(covered_s, max(0.0, left_s))


def chain_facts(metagraph: Metagraph, rules: Hyperparameters, block_time_s: float) -> ChainFacts:
    """Miners' pay is what those who only mine were paid for their part of the incentive, scaled to all of it."""
    owner = metagraph.owner_hotkey
    paid = [
        n for n in metagraph.neurons if n.incentive > 0 and n.emission > 0 and n.dividends == 0 and n.hotkey != owner
    ]
    incentive = sum(n.incentive for n in paid)
    return ChainFacts(
        netuid=metagraph.netuid,
        block=metagraph.block,
        miners_per_tempo=sum(n.emission for n in paid) / incentive if incentive > 0 else None,
        burn_share=sum(n.incentive for n in metagraph.neurons if n.hotkey == owner),
        tempo_s=(metagraph.tempo + 1) * block_time_s,
        registration_cost=rules.registration_cost,
        registration_allowed=rules.registration_allowed,
        slots=rules.max_uids,
        slots_taken=len(metagraph.neurons),
    )


def estimate(run: RunFacts, machine: Machine, chain: ChainFacts | None) -> Estimate:
    """Raises :class:`NotFound` where nobody earned anything in the last day."""
    if run.num_steps == 0 or run.covered_s <= 0:
        raise NotFound(
            f"nobody earned anything on run {run.run} in the last day: no step of it was sealed ({run.state})",
            hint="ask again when it runs; iota run list names others",
        )
    replicas = [_replicas(run, stage, machine) for stage in range(len(run.stages))]
    placed = place_joiner(replicas)
    offers = tuple(_offer(run, machine, chain, stage, replicas[stage]) for stage in range(len(run.stages)))
    wanted, says = class_fits(run.hardware_class, machine.hardware_class)
    return Estimate(
        run=run.run,
        state=run.state,
        steps_in_last_day=run.num_steps,
        covered_s=run.covered_s,
        device=machine.device,
        device_name=machine.name,
        wanted=wanted,
        class_says=says,
        stage=placed.stage,
        why_stage="nobody serves it" if placed.reason.code == "stage_empty" else "it limits the run's throughput",
        offers=offers,
        chain=chain,
        assumes=_assumes(run, chain),
    )


def _replicas(run: RunFacts, stage: int, machine: Machine) -> list[Replica]:
    """Members whose speed isn't known count as the others of their stage; where no speed is known, as this machine."""
    rates = run.stages[stage].rates
    known = [rate for rate in rates if rate is not None]
    usual = sum(known) / len(known) if known else 1.0 / machine.item_s[stage]
    return [Replica(Member("", stage, number), usual if rate is None else rate) for number, rate in enumerate(rates)]


def _offer(run: RunFacts, machine: Machine, chain: ChainFacts | None, stage: int, replicas: Sequence[Replica]) -> Offer:
    facts, policy, own = run.stages[stage], run.policy, 1.0 / machine.item_s[stage]
    others = sum(replica.rate for replica in replicas)
    share = own / (own + others)
    items = min(run.num_steps * run.microbatches * share, run.covered_s * own)
    work = items * facts.item_flops
    leases = items / run.covered_s * policy.half_life_s / LN2
    kept = leases / (leases + policy.unproven_leases)
    reliability = whole_power(kept, policy.deadline_exponent)
    whole = run.num_steps * run.microbatches * sum(s.item_flops for s in run.stages)
    worth = work * reliability
    all_worth = worth + (whole - work) * run.reliability
    score = worth / all_worth if all_worth > 0 else 0.0
    return Offer(
        stage=stage,
        members=len(replicas),
        members_items_per_s=others,
        item_s=machine.item_s[stage],
        share_of_stage=share,
        items=items,
        work_flops=work,
        reliability=reliability,
        score=score,
        needs_bytes=facts.needs_bytes,
        fits=facts.needs_bytes <= machine.free_bytes,
        tokens_per_day=_tokens_per_day(score, chain),
    )


def _tokens_per_day(score: float, chain: ChainFacts | None) -> float | None:
    if chain is None or chain.miners_per_tempo is None:
        return None
    return score * (1.0 - chain.burn_share) * chain.miners_per_tempo * DAY_S / chain.tempo_s


def class_fits(wanted: tuple[str, ...] | None, own: tuple[str, ...]) -> tuple[bool | None, str]:
    if wanted is None:
        return None, "the run's hardware class isn't settled yet: the first machines that agree make it"
    if wanted == own:
        return True, "this machine computes the run's golden tasks to the bit: its hardware class is wanted"
    if len(wanted) != len(own):
        return False, f"a join would be refused: the run has {len(wanted)} golden tasks, here there are {len(own)}"
    task = next(i for i, (a, b) in enumerate(zip(own, wanted, strict=True)) if a != b)
    return False, (
        f"a join would be refused: golden task {task} gives {own[task][:12]} here, the run's class has "
        f"{wanted[task][:12]} (the device, torch's version and the thread count make a class)"
    )


def _assumes(run: RunFacts, chain: ChainFacts | None) -> tuple[str, ...]:
    unknown = sum(rate is None for rate in joined.from_iterable(stage.rates for stage in run.stages))
    lines = [
        "the run would have been as fast as it was: more where this machine's stage holds it up",
        "this machine is there all day, right, and in time; transfers, merges and updates take no compute from it",
        "leases are dealt by speed: compute as measured here against what members report",
    ]
    if unknown:
        lines.append(f"{unknown} members whose speed isn't known are as fast as others of their stage")
    if run.covered_s < 0.9 * DAY_S:
        lines.append(f"steps of {run.covered_s / 3600:.2g} h, all that the last day has, stand for the day")
    if run.state == "finished":
        lines.append("the run has finished: nothing more is to be earned on it")
    if chain is not None and chain.miners_per_tempo is not None:
        lines.append("every validator weighs as this one does, and emission and burn stay as in the last tempo")
    return tuple(lines)
