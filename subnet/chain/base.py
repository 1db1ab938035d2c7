"""What the project asks of a chain, whichever it is: blocks, who is registered, and weights.

Three implementations answer alike: the embedded local chain, and the Bittensor network through its SDK or through
substrate-interface. Refusals are
:class:`~subnet.chain.refusals.ChainRefused` with the runtime's own names. Amounts are TAO, times are seconds,
``timeout_s`` is the caller's deadline for the whole call.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from subnet.chain.refusals import ChainRefused
from subnet.errors import InputError
from subnet.timing import TIMEOUTS

__all__ = [
    "Axon",
    "Chain",
    "ChainRefused",
    "Commitment",
    "Hyperparameters",
    "KeySigner",
    "Metagraph",
    "Neuron",
    "WeightsReceipt",
    "to_u16",
    "upscale_u16",
]

U16_MAX = 65_535
CALL_TIMEOUT_S = TIMEOUTS.chain_request_s
"""Default deadline of one call to the chain."""
WRITE_TIMEOUT_S = TIMEOUTS.chain_write_s
"""Default deadline of a call that waits for inclusion."""


class KeySigner(Protocol):
    """Something that signs for one key, hot or cold: ``subnet.protocol.signing.Signer`` is one."""

    @property
    def hotkey(self) -> str: ...

    def sign(self, data: bytes, /) -> bytes: ...


class Axon(msgspec.Struct, frozen=True):
    """The address that a hotkey announced on the chain."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Neuron(msgspec.Struct, frozen=True, kw_only=True):
    """One slot of a subnet as the chain shows it."""

    uid: int
    hotkey: str
    coldkey: str
    stake: float
    """Stake that counts on this subnet, in TAO (on Bittensor: in the subnet's alpha, root stake included)."""
    validator_permit: bool
    last_update: int
    """Block of the last set weights; the block of registration when there were none."""
    registered_at_block: int
    axon: Axon | None = None
    incentive: float = 0.0
    """Share of the subnet's miner reward, 0 to 1, as of the last tempo."""
    dividends: float = 0.0
    """Share of the subnet's validator reward, 0 to 1."""
    consensus: float = 0.0
    """Weight that a majority of the stake gives it."""
    validator_trust: float = 0.0
    """Part of its own weights that the majority shares."""
    emission: float = 0.0
    """What it earned in the last tempo, in the subnet's token."""


class Metagraph(msgspec.Struct, frozen=True, kw_only=True):
    """A subnet at one block: its neurons in uid order."""

    netuid: int
    block: int
    tempo: int
    owner_hotkey: str
    """Empty where the chain names none."""
    neurons: tuple[Neuron, ...]

    def by_hotkey(self) -> dict[str, Neuron]:
        return {neuron.hotkey: neuron for neuron in self.neurons}

    def neuron(self, hotkey: str) -> Neuron | None:
        return next((neuron for neuron in self.neurons if neuron.hotkey == hotkey), None)

    @property
    def owner_uid(self) -> int | None:
        owner = self.neuron(self.owner_hotkey) if self.owner_hotkey else None
        return None if owner is None else owner.uid

    def permit_holders(self) -> tuple[Neuron, ...]:
        """Holders of a validator permit, the largest stake first; equal stakes by uid."""
        holders = (neuron for neuron in self.neurons if neuron.validator_permit)
        return tuple(sorted(holders, key=lambda neuron: (-neuron.stake, neuron.uid)))


class Hyperparameters(msgspec.Struct, frozen=True, kw_only=True):
    """The subnet's rules that a miner or validator must know."""

    tempo: int
    """Blocks from one settlement of permits and incentives to the next (tempo + 1 as the runtime counts)."""
    immunity_period: int
    max_uids: int
    min_allowed_weights: int
    weights_rate_limit: int
    weights_version_key: int
    serving_rate_limit: int
    max_validators: int
    commit_reveal: bool
    registration_allowed: bool
    registration_cost: float
    """TAO taken from the coldkey."""
    stake_threshold: float
    """TAO below which a hotkey neither gets a permit nor sets weights."""
    mechanisms: int = 1


class WeightsReceipt(msgspec.Struct, frozen=True):
    """Weights as the chain stores them: the block they were set in, and u16 values where only ratios matter."""

    block: int
    uids: tuple[int, ...]
    values: tuple[int, ...]
    reveal_round: int | None = None
    """Where they were committed: the drand round (on a local chain the block) at which the chain reveals them. Until
    then :meth:`Chain.weights` shows the ones before."""


class Commitment(msgspec.Struct, frozen=True):
    """A few public bytes that a hotkey put on the chain."""

    block: int
    data: bytes


class Chain(Protocol):
    """The whole of what is asked of a chain. Writes wait for inclusion; a refusal raises ``ChainRefused``."""

    async def block(self, *, timeout_s: float = CALL_TIMEOUT_S) -> int:
        """Number of the newest block that can't be replaced any more."""
        ...

    async def block_hash(self, number: int, *, timeout_s: float = CALL_TIMEOUT_S) -> str:
        """64 hex digits; ``NotFound`` while the block may still be replaced, with the seconds until it can't."""
        ...

    async def block_time_s(self, *, timeout_s: float = CALL_TIMEOUT_S) -> float: ...

    async def metagraph(self, netuid: int, *, timeout_s: float = CALL_TIMEOUT_S) -> Metagraph: ...

    async def hyperparameters(self, netuid: int, *, timeout_s: float = CALL_TIMEOUT_S) -> Hyperparameters: ...

    async def register(
        self, netuid: int, *, coldkey: KeySigner, hotkey: str, timeout_s: float = WRITE_TIMEOUT_S
    ) -> int:
        """Burn the registration cost and take a slot; returns the uid."""
        ...

    async def serve(self, netuid: int, host: str, port: int, *, timeout_s: float = WRITE_TIMEOUT_S) -> None:
        """Announce the hotkey's address; nothing is sent when the chain shows it already."""
        ...

    async def set_weights(
        self,
        netuid: int,
        weights: Mapping[str, float] | Mapping[int, float],
        *,
        version_key: int = 0,
        mechanism: int = 0,
        timeout_s: float = WRITE_TIMEOUT_S,
    ) -> WeightsReceipt:
        """Set the hotkey's weights, by hotkey or by uid."""
        ...

    async def weights(
        self, netuid: int, uid: int, *, mechanism: int = 0, timeout_s: float = CALL_TIMEOUT_S
    ) -> WeightsReceipt | None:
        """What the chain stores for ``uid``; None when it never set any."""
        ...

    async def set_commitment(self, netuid: int, data: bytes, *, timeout_s: float = WRITE_TIMEOUT_S) -> None: ...

    async def commitments(self, netuid: int, *, timeout_s: float = CALL_TIMEOUT_S) -> dict[str, Commitment]:
        """The newest commitment of each hotkey that made one."""
        ...

    async def close(self) -> None: ...


def to_u16(weights: Mapping[int, float]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Weights as they go on the chain: ``round(w / max * 65535)``, zeros dropped, by uid.

    ``{1: .25, 2: .75}`` gives ``((1, 2), (21845, 65535))``. No weight above zero gives two empty tuples.
    """
    for uid, weight in weights.items():
        if not math.isfinite(weight) or weight < 0:
            raise InputError(f"the weight of uid {uid} is {weight}", hint="weights are finite and not negative")
    largest = max(weights.values(), default=0.0)
    if largest == 0:
        return (), ()
    scaled = ((uid, round(weights[uid] / largest * U16_MAX)) for uid in sorted(weights))
    kept = [(uid, value) for uid, value in scaled if value > 0]
    return tuple(uid for uid, _ in kept), tuple(value for _, value in kept)


def upscale_u16(values: Sequence[int]) -> tuple[int, ...]:
    """What the chain does to the values it is sent: scaled so that the largest is 65535, halves up, in integers."""
    largest = max(values, default=0)
    if largest in (0, U16_MAX):
        return tuple(values)
    return tuple((2 * value * U16_MAX + largest) // (2 * largest) for value in values)
