"""Weights on a Bittensor network: in the open or committed, included, read back, and every refusal in plain words.

What is sent comes from the caller alone. A submission whose answer was lost is looked for on the chain for a few
blocks: it may have been included, and sending it again would only run into the rate limit.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from subnet.chain import subtensor_calls as calls
from subnet.chain import subtensor_view as view
from subnet.chain.base import KeySigner, WeightsReceipt
from subnet.chain.refusals import ChainRefused
from subnet.chain.subtensor_link import SUBTENSOR, Head, Item, RawCall, SubtensorLink
from subnet.errors import ConfigError, InputError, Unreachable
from subnet.timing import Deadline

LOOK_BLOCKS = 4
"""Blocks for which a submission without an answer is looked for."""
STANDING_NAMES = (
    "MechanismCountCurrent",
    "CommitRevealWeightsEnabled",
    "WeightsSetRateLimit",
    "MinAllowedWeights",
    "SubnetworkN",
)
SCHEDULE_NAMES = (
    "Tempo",
    "RevealPeriodEpochs",
    "LastEpochBlock",
    "PendingEpochAt",
    "SubnetEpochIndex",
    "BlocksSinceLastStep",
)
"""Storage items, one per subnet, that say when a commit is revealed."""


class WeightsCall(NamedTuple):
    netuid: int
    mechanism: int
    uids: tuple[int, ...]
    values: tuple[int, ...]
    version_key: int

    @property
    def storage_index(self) -> int:
        return view.storage_index(self.netuid, self.mechanism)


class Standing(NamedTuple):
    """What the chain knows of the caller at ``head``, before anything is sent."""

    head: Head
    uid: int
    commit_reveal: bool
    last_update: int
    rate_limit: int
    block_time_s: float

    def wait_s(self, block: int) -> float:
        """Seconds from ``block`` until the rate limit lets another pass; the SDK waits a block longer than the chain."""
        return max(1, self.rate_limit - (block - self.last_update)) * self.block_time_s


Compose = Callable[[], Awaitable[tuple[RawCall, int | None]]]
"""The call from the chain's own metadata, and the reveal round where it is a commit."""
Submit = Callable[[WeightsCall, Compose, KeySigner, Deadline], Awaitable[tuple[Head, int | None]]]
"""Sends the call, as composed here or as a library does it; answers with the block of inclusion and the reveal round."""


async def read_standing(
    link: SubtensorLink, call: WeightsCall, hotkey: str, head: Head, block_time_s: float, deadline: Deadline
) -> Standing:
    """Refuses what the libraries don't send: an unknown mechanism, an unregistered hotkey, too few weights."""
    netuid = call.netuid
    items = [
        *view.per_subnet(STANDING_NAMES, netuid),
        Item(SUBTENSOR, "Uids", (netuid, hotkey)),
        Item(SUBTENSOR, "LastUpdate", (call.storage_index,)),
    ]
    found = await link.read(items, head.hash, deadline)
    mechanisms, commit_reveal, limit, min_weights, n, uid, updates = found
    if call.mechanism >= view.whole(mechanisms, "MechanismCountCurrent"):
        raise ChainRefused("MechanismDoesNotExist", f"mechanism {call.mechanism} of {mechanisms}")
    if uid is None:
        raise ChainRefused("HotKeyNotRegisteredInSubNet", f"{hotkey} isn't registered on subnet {netuid}")
    own, column = view.whole(uid, "Uids"), view.row(updates, "LastUpdate")
    needed = min(view.whole(min_weights, "MinAllowedWeights"), view.whole(n, "SubnetworkN"))
    if len(call.uids) < needed and call.uids != (own,):
        raise ChainRefused("WeightVecLengthIsLow", f"{len(call.uids)} weights above zero, at least {needed} needed")
    return Standing(
        head=head,
        uid=own,
        commit_reveal=view.flag(commit_reveal, "CommitRevealWeightsEnabled"),
        last_update=view.whole(column[own], "LastUpdate") if own < len(column) else 0,
        rate_limit=view.whole(limit, "WeightsSetRateLimit"),
        block_time_s=block_time_s,
    )


async def send_weights(
    link: SubtensorLink,
    submit: Submit,
    call: WeightsCall,
    standing: Standing,
    signer: KeySigner,
    deadline: Deadline,
) -> WeightsReceipt:
    """Send, wait for inclusion, and answer with what the chain stores."""

    async def compose() -> tuple[RawCall, int | None]:
        return await _compose(link, call, standing, signer, deadline)

    try:
        included, reveal_round = await submit(call, compose, signer, deadline)
    except ChainRefused as refused:
        raise await _in_plain_words(link, refused, standing, deadline) from refused
    except Unreachable:
        found = await _look(link, call, standing, signer.hotkey, deadline)
        if found is None:
            raise
        return found
    if standing.commit_reveal:
        receipt = await _commit_at(link, call, signer.hotkey, included, deadline)
        if receipt is None or receipt.reveal_round != reveal_round:
            raise Unreachable(f"the commit of block {included.number} isn't among those the chain stores")
        return receipt
    stored = await _stored_at(link, call, standing.uid, included, deadline)
    if stored is None:
        raise Unreachable(f"block {included.number} took the weights and stores none")
    return stored


async def _compose(
    link: SubtensorLink, call: WeightsCall, standing: Standing, signer: KeySigner, deadline: Deadline
) -> tuple[RawCall, int | None]:
    if not standing.commit_reveal:
        return calls.set_weights(call.netuid, call.mechanism, call.uids, call.values, call.version_key), None
    items = [*view.per_subnet(SCHEDULE_NAMES, call.netuid), Item(SUBTENSOR, "CommitRevealWeightsVersion")]
    *schedule, version = await link.read(items, standing.head.hash, deadline)
    if version != calls.COMMIT_REVEAL_VERSION:
        reason = f"the chain reveals commits of version {version}, this software makes {calls.COMMIT_REVEAL_VERSION}"
        raise ChainRefused("IncorrectCommitRevealVersion", reason)
    named = {name: view.whole(value, name) for name, value in zip(SCHEDULE_NAMES, schedule, strict=True)}
    commit, reveal_round = seal(call, named, standing, signer.hotkey)
    return calls.commit_weights(call.netuid, call.mechanism, commit, reveal_round), reveal_round


def seal(call: WeightsCall, schedule: dict[str, int], standing: Standing, hotkey: str) -> tuple[bytes, int]:
    """Encrypt to the drand round at which the chain will reveal; offline, by this machine's clock."""
    try:
        core: Any = importlib.import_module("bittensor_core")
    except ImportError as error:
        hint = "pip install bittensor-core, which holds the timelock encryption"
        raise ConfigError("this subnet wants weights committed, which needs bittensor-core", hint=hint) from error
    try:
        commit, reveal_round = core.get_encrypted_commit_v2(
            uids=list(call.uids),
            weights=list(call.values),
            version_key=call.version_key,
            last_epoch_block=schedule["LastEpochBlock"],
            pending_epoch_at=schedule["PendingEpochAt"],
            subnet_epoch_index=schedule["SubnetEpochIndex"],
            tempo=schedule["Tempo"],
            blocks_since_last_step=schedule["BlocksSinceLastStep"],
            current_block=standing.head.number,
            subnet_reveal_period_epochs=schedule["RevealPeriodEpochs"],
            block_time=standing.block_time_s,
            hotkey=bytes(core.ss58_decode(hotkey)),
        )
    except (ValueError, TypeError, RuntimeError) as error:
        raise InputError(f"the weights can't be sealed: {error}") from error
    return bytes(commit), int(reveal_round)


# ---- after it was sent


async def _stored_at(
    link: SubtensorLink, call: WeightsCall, uid: int, at: Head, deadline: Deadline
) -> WeightsReceipt | None:
    items = [
        Item(SUBTENSOR, "Weights", (call.storage_index, uid)),
        Item(SUBTENSOR, "LastUpdate", (call.storage_index,)),
    ]
    stored, updates = await link.read(items, at.hash, deadline)
    return view.view_weights(stored, updates, uid)


async def _commit_at(
    link: SubtensorLink, call: WeightsCall, hotkey: str, at: Head, deadline: Deadline
) -> WeightsReceipt | None:
    """The commit of this hotkey that was included in block ``at``."""
    name = "TimelockedWeightCommits"
    for _, queue in await link.read_map(SUBTENSOR, name, (call.storage_index,), at.hash, deadline):
        for entry in view.row(queue, name):
            who, block, _, reveal_round = view.row(entry, name)
            if who == hotkey and block == at.number:
                number = view.whole(reveal_round, name)
                return WeightsReceipt(block=at.number, uids=call.uids, values=call.values, reveal_round=number)
    return None


async def _look(
    link: SubtensorLink, call: WeightsCall, standing: Standing, hotkey: str, deadline: Deadline
) -> WeightsReceipt | None:
    """What became of a submission without an answer; None where the chain shows nothing of it."""
    until = deadline.sooner(LOOK_BLOCKS * standing.block_time_s + 1.0)
    while not until.expired:
        try:
            head = await link.head(until)
            found = await _seen(link, call, standing, hotkey, head, until)
        except Unreachable:
            found = None  # still away; the caller reports the loss of the submission
        if found is not None:
            return found
        await asyncio.sleep(min(standing.block_time_s, until.remaining_s()))
    return None


async def _seen(
    link: SubtensorLink, call: WeightsCall, standing: Standing, hotkey: str, head: Head, deadline: Deadline
) -> WeightsReceipt | None:
    (updates,) = await link.read([Item(SUBTENSOR, "LastUpdate", (call.storage_index,))], head.hash, deadline)
    column = view.row(updates, "LastUpdate")
    last = view.whole(column[standing.uid], "LastUpdate") if standing.uid < len(column) else 0
    if last <= max(standing.head.number, standing.last_update):
        return None
    if standing.commit_reveal:
        return await _commit_at(link, call, hotkey, Head(last, head.hash), deadline)
    return await _stored_at(link, call, standing.uid, head, deadline)


async def _in_plain_words(
    link: SubtensorLink, refused: ChainRefused, standing: Standing, deadline: Deadline
) -> ChainRefused:
    """The pool's collective names become those of the call, and a rate limit says how long it lasts."""
    too_fast = "CommittingWeightsTooFast" if standing.commit_reveal else "SettingWeightsTooFast"
    code = {"RateLimitExceeded": too_fast, "StakeAmountTooLow": "NotEnoughStakeToSetWeights"}.get(
        refused.code, refused.code
    )
    if code == too_fast:
        head = await link.head(deadline)
        reason = (
            f"set at block {standing.last_update}, this is {head.number}, the limit is {standing.rate_limit} blocks"
        )
        return ChainRefused(code, reason, retry_after_s=standing.wait_s(head.number))
    if code != refused.code:
        return ChainRefused(code, retry_after_s=refused.retry_after_s)
    return refused
