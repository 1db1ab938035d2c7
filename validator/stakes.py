"""Whether a hotkey has the stake that the policy asks of whoever is dealt work."""

from __future__ import annotations

from subnet.chain.base import Metagraph
from subnet.errors import Refusal
from subnet.policy.policy import AdmissionRules

RETRY_S = 60.0


def stake_refusal(metagraph: Metagraph | None, hotkey: str, rules: AdmissionRules) -> Refusal | None:
    """None: it may join, as far as its stake goes."""
    neuron = metagraph.neuron(hotkey) if metagraph is not None else None
    if rules.min_stake <= 0 or neuron is None or neuron.stake >= rules.min_stake:
        return None
    return Refusal(
        "stake_too_low",
        f"{hotkey} has {neuron.stake:g} staked, this validator's policy asks for {rules.min_stake:g} (admission.min_stake)",
        RETRY_S,
        hint="add stake to the hotkey; the metagraph shows it within a few blocks",
    )
