"""What a training step asks of the object store, by formula, and what it costs at a price list: pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from subnet.model.memory import boundary_bytes
from subnet.model.plan import ModelPlan
from subnet.numerics.layout import Partition, Section
from subnet.numerics.slices import slice_size
from subnet.protocol.messages import StoreUse
from subnet.run.config import PricesSection
from validator.retention import AUDIT_WINDOW_STEPS

R2 = PricesSection()
"""The defaults: Cloudflare R2's list prices."""
S3 = PricesSection(
    put_usd_per_million=5.00, get_usd_per_million=0.40, stored_usd_per_gb_month=0.023, egress_usd_per_gb=0.09
)
LOG_STEPS = 100
"""Merged gradients are kept for two snapshots' time, at the default of 50 steps each."""
MONTH_S = 30 * 86400.0


def expected_use(plan: ModelPlan, replicas: Sequence[int], *, by_store: bool) -> StoreUse:
    """What the miners do in one training step without evaluation and snapshot, ``replicas`` of each stage at work.

    Of each partition that h members hold, its owner puts the sum and the others get it.
    """
    use = evidence_use(plan, replicas) if by_store else StoreUse()
    for section, partition, holders in _partitions(plan, replicas):
        merged = slice_size(section, partition, plan.config.pipeline.microbatches)
        use = use.plus(StoreUse(1, holders - 1, bytes_up=merged, bytes_down=(holders - 1) * merged))
    return use


def evidence_use(plan: ModelPlan, replicas: Sequence[int]) -> StoreUse:
    """Boundaries and slices: each of the 2 (S - 1) M boundaries is put once and got once; each of the h holders of a partition
    puts its slice, and the owner gets the others'."""
    microbatches = plan.config.pipeline.microbatches
    count = 2 * (plan.num_stages - 1) * microbatches
    moved = count * boundary_bytes(plan)
    use = StoreUse(puts=count, gets=count, bytes_up=moved, bytes_down=moved)
    for section, partition, holders in _partitions(plan, replicas):
        share = microbatches // max(replicas[stage] for stage in section.stages)
        packed = slice_size(section, partition, share)
        use = use.plus(StoreUse(holders, holders - 1, bytes_up=holders * packed, bytes_down=(holders - 1) * packed))
    return use


def _partitions(plan: ModelPlan, replicas: Sequence[int]) -> Iterator[tuple[Section, Partition, int]]:
    """Each with the number of its holders."""
    for group in plan.layout.groups:
        for partition in group.partitions:
            section = plan.layout.sections[partition.section]
            yield section, partition, sum(replicas[stage] for stage in section.stages)


def per_million_tokens(
    use: StoreUse, prices: PricesSection, tokens: int, seconds: float, evidence_bytes: int
) -> dict[str, float]:
    """US dollars by kind; ``use`` is that of a step of so many tokens and seconds. Deleting is free."""
    steps = 1e6 / tokens
    kept = evidence_bytes * AUDIT_WINDOW_STEPS + (use.bytes_up - evidence_bytes) * LOG_STEPS
    parts = {
        "puts": (use.puts + use.lists) * prices.put_usd_per_million / 1e6,
        "gets": use.gets * prices.get_usd_per_million / 1e6,
        "egress": use.bytes_down / 1e9 * prices.egress_usd_per_gb,
        "storage": kept / 1e9 * seconds / MONTH_S * prices.stored_usd_per_gb_month,
    }
    costs = {name: part * steps for name, part in parts.items()}
    return {**costs, "all": sum(costs.values())}
