"""A metagraph and the weights on it, for people."""

from __future__ import annotations

from collections.abc import Mapping

from rich.table import Table

from subnet.chain.base import Metagraph, WeightsReceipt


def metagraph_table(metagraph: Metagraph) -> Table:
    table = Table(title=f"subnet {metagraph.netuid} at block {metagraph.block}", title_justify="left", box=None)
    for name in ("uid", "hotkey", "coldkey", "stake", "permit", "updated", "incentive", "axon"):
        table.add_column(name, justify="right" if name in ("uid", "stake", "updated", "incentive") else "left")
    for neuron in metagraph.neurons:
        table.add_row(
            str(neuron.uid),
            neuron.hotkey[:10],
            neuron.coldkey[:10],
            f"{neuron.stake:,.0f}",
            "yes" if neuron.validator_permit else "",
            str(neuron.last_update),
            f"{neuron.incentive:.4f}",
            str(neuron.axon or ""),
        )
    return table


def weight_lines(metagraph: Metagraph, weights: Mapping[int, WeightsReceipt]) -> list[str]:
    """One line per validator: the shares it gives, by uid."""
    lines: list[str] = []
    for uid, receipt in sorted(weights.items()):
        total = sum(receipt.values) or 1
        shares = ", ".join(
            f"uid {to} {100 * value / total:.1f} %" for to, value in zip(receipt.uids, receipt.values, strict=True)
        )
        age = metagraph.block - receipt.block
        lines.append(f"validator uid {uid} set {age} blocks ago: {shares or 'nothing'}")
    return lines or ["no validator has set weights"]
