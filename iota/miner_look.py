"""Facts for an estimate: what a validator publishes of a run, what the chain pays, and how fast this machine is."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from iota.miner_estimate import DAY_S, ChainFacts, Machine, RunFacts, StageFacts, chain_facts, last_day
from iota.onchain import on_chain
from iota.remote import Remote
from miner.hardware import choose_device, free_memory
from subnet.chain.base import Chain
from subnet.errors import NotFound
from subnet.model.hardware_class import hardware_class
from subnet.model.memory import Budgets, stage_memory
from subnet.model.plan import ModelPlan, ModelUnits
from subnet.model.registry import check_run, load_architecture
from subnet.model.unit_costs import measure_unit_costs
from subnet.protocol.api import ExportInfo, RunStatus
from subnet.protocol.wire import decode
from subnet.run.config import RunConfig
from subnet.score.score import Score
from subnet.timing import TIMEOUTS, Deadline
from validator.stage_plan import stage_costs

FEW_STEPS, ALL_STEPS = 2_000, 100_000
"""As many as are asked for first; and where they are less than a day."""
MAX_CONFIG_BYTES = 1 << 20


def look_at_run(remote: Remote, run: str | None, deadline: Deadline) -> tuple[RunFacts, ModelPlan]:
    """The active run, which is called ``run`` if that is given; :class:`NotFound` where there is none."""
    hello = remote.hello(deadline.sooner(TIMEOUTS.hello_s))
    name = run or hello.run
    if name is None:
        raise NotFound(
            f"{remote.url} leads no run now", hint="iota run list shows what is queued; ask again when one is active"
        )
    status = remote.status(deadline, run=name, steps=FEW_STEPS)
    if len(status.steps) >= FEW_STEPS and sum(step.seconds for step in status.steps) < DAY_S:
        status = remote.status(deadline, run=name, steps=ALL_STEPS)
    info, listed = remote.plan_info(name, deadline), remote.scores(deadline)
    plan = plan_of(info)
    last_sealed_s = max((score.last_sealed_s for score in listed.scores), default=0.0)
    num_steps, covered_s = last_day(status.steps, max(0.0, listed.time_s - last_sealed_s))
    facts = RunFacts(
        run=name,
        state=status.summary.state,
        num_steps=num_steps,
        covered_s=covered_s,
        microbatches=plan.config.pipeline.microbatches,
        stages=_stages(plan, status),
        policy=listed.policy,
        reliability=mean_reliability(listed.scores),
        hardware_class=info.hardware_class,
    )
    return facts, plan


def plan_of(info: ExportInfo) -> ModelPlan:
    """The run as its members compute it."""
    config = decode(info.config, RunConfig, limit_bytes=MAX_CONFIG_BYTES, what="the run's config")
    units = ModelUnits(info.unit_tensors, info.unit_flops_per_token, info.tied)
    return ModelPlan(config, info.model_config, units, info.cuts)


def item_flops(plan: ModelPlan, stage: int) -> float:
    """FLOPs of one microbatch at a stage, forward and backward: what scores count."""
    tokens = plan.config.pipeline.microbatch_rows * plan.config.data.sequence_length
    return tokens * sum(plan.units.unit_flops_per_token[unit] for unit in plan.stage_units[stage])


def mean_reliability(scores: Sequence[Score]) -> float:
    """By work; convicted ones count with their 0. 1 where nobody has worked."""
    rate = sum(score.rate for score in scores)
    return sum(score.worth for score in scores) / rate if rate > 0 else 1.0


def _stages(plan: ModelPlan, status: RunStatus) -> tuple[StageFacts, ...]:
    found: list[StageFacts] = []
    for stage in range(plan.num_stages):
        each_s = [member.seconds_per_item for member in status.members if member.stage == stage]
        rates = tuple(1.0 / seconds if seconds else None for seconds in each_s)
        memory = stage_memory(plan, stage, Budgets(replicas=len(rates) + 1))
        found.append(StageFacts(stage, item_flops(plan, stage), rates, memory.peak_bytes))
    return tuple(found)


def measure_machine(plan: ModelPlan, device: str, budget_s: float) -> Machine:
    """Time one item of each stage on the run's shapes, and compute its golden tasks. Takes ``budget_s`` and a bit."""
    chosen = choose_device(device)
    architecture = load_architecture(plan.model_config)
    check_run(plan.config, architecture)
    free_bytes = free_memory(chosen)
    costs = measure_unit_costs(plan.config, architecture, budget_s=budget_s, device=chosen)
    chunks = plan.config.pipeline.chunks
    return Machine(
        device=chosen,
        name=torch.cuda.get_device_name(chosen) if chosen.startswith("cuda") else "CPU",
        item_s=tuple(cost * chunks for cost in stage_costs(costs, plan.cuts)),
        hardware_class=hardware_class(plan, chosen),
        free_bytes=free_bytes,
    )


def look_at_chain(network: str, endpoint: str | None, netuid: int, deadline: Deadline) -> ChainFacts:
    async def work(chain: Chain) -> ChainFacts:
        metagraph = await chain.metagraph(netuid, timeout_s=deadline.remaining_s())
        rules = await chain.hyperparameters(netuid, timeout_s=deadline.remaining_s())
        return chain_facts(metagraph, rules, await chain.block_time_s(timeout_s=deadline.remaining_s()))

    return on_chain(network, endpoint, work)
