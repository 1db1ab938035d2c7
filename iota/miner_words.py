"""An estimate in words, for a terminal."""

from __future__ import annotations

from iota.miner_estimate import DAY_S, ChainFacts, Estimate, Offer
from iota.plan import human_bytes


def lines_of(found: Estimate) -> list[str]:
    offer = found.offer
    lines = [
        f"run {found.run} ({found.state}): {found.steps_in_last_day} steps sealed in the last day, "
        f"in {_hours(found.covered_s)}",
        f"this machine: {found.device_name} ({found.device}); {found.class_says}",
        f"{'stage':>5}  {'members':>7}  {'their items/s':>13}  {'an item here':>12}  {'memory':>10}  {'score':>6}",
        *(_row(one) for one in found.offers),
        f"a newcomer goes to stage {found.stage}: {found.why_stage}",
        f"there it would have done {100 * offer.share_of_stage:.3g} % of the items: {offer.items:.4g}, "
        f"{offer.work_flops:.4g} FLOPs",
        f"score {offer.score:.4f}: that work against the others', reliability {offer.reliability:.3f}",
        _pay(offer, found.chain),
    ]
    if found.chain is not None:
        lines.append(_registration(found.chain))
    if not offer.fits:
        lines.append(f"memory: stage {offer.stage} needs {human_bytes(offer.needs_bytes)}, less is free here")
    return [*lines, "assumed:", *(f"  - {line}" for line in found.assumes)]


def _row(one: Offer) -> str:
    memory = human_bytes(one.needs_bytes) + ("" if one.fits else "!")
    return (
        f"{one.stage:>5}  {one.members:>7}  {one.members_items_per_s:>13.4g}  {one.item_s * 1e3:>9.4g} ms  "
        f"{memory:>10}  {one.score:>6.4f}"
    )


def _pay(offer: Offer, chain: ChainFacts | None) -> str:
    if chain is None:
        return "amount: the chain wasn't asked"
    if chain.miners_per_tempo is None or offer.tokens_per_day is None:
        return f"amount: no miner of subnet {chain.netuid} was paid in the last tempo (block {chain.block})"
    per_day = chain.miners_per_tempo * DAY_S / chain.tempo_s
    return (
        f"{offer.tokens_per_day:.6g} of the subnet's token a day: {offer.score:.4f} x (1 - {chain.burn_share:.3f} burned) "
        f"x {per_day:.6g} that the chain pays miners a day (block {chain.block})"
    )


def _registration(chain: ChainFacts) -> str:
    if not chain.registration_allowed:
        return f"registration on subnet {chain.netuid} is closed"
    full = ": the one that earned least is replaced" if chain.slots_taken >= chain.slots else ""
    return f"registration costs {chain.registration_cost:g} TAO; {chain.slots_taken} of {chain.slots} slots are taken{full}"


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:.3g} h" if seconds >= 3600 else f"{seconds:.3g} s"
