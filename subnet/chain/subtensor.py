"""A :class:`~subnet.chain.base.Chain` on a Bittensor network, whichever library speaks to the node.

Reads of one answer are all at one block. ``block`` and ``block_hash`` speak of finalized blocks only; snapshots are of
the best block. Writes wait for inclusion and are read back; a write whose answer is lost is looked for on the chain
before it is called lost. Refusals bear the runtime's own names.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from subnet.chain import subtensor_calls as calls
from subnet.chain import subtensor_view as view
from subnet.chain.base import (
    CALL_TIMEOUT_S,
    WRITE_TIMEOUT_S,
    Axon,
    Commitment,
    Hyperparameters,
    KeySigner,
    Metagraph,
    WeightsReceipt,
    to_u16,
)
from subnet.chain.refusals import ChainRefused
from subnet.chain.subtensor_link import SUBTENSOR, Head, Item, RawCall, SubtensorLink
from subnet.chain.subtensor_weights import Compose, WeightsCall, read_standing, send_weights
from subnet.errors import ConfigError, NotFound
from subnet.timing import Deadline

DEFAULT_BLOCK_TIME_S = 12.0


class SubtensorChain:
    """Reads need no key; ``serve``, ``set_weights`` and ``set_commitment`` are signed by ``hotkey``."""

    def __init__(self, link: SubtensorLink, hotkey: KeySigner | None = None) -> None:
        self.link = link
        self._hotkey = hotkey
        self._block_time_s: float | None = None
        self._writing = asyncio.Lock()

    async def close(self) -> None:
        await self.link.close()

    # ---- reading

    async def block(self, *, timeout_s: float = CALL_TIMEOUT_S) -> int:
        return (await self.link.finalized(Deadline.after(timeout_s))).number

    async def block_time_s(self, *, timeout_s: float = CALL_TIMEOUT_S) -> float:
        if self._block_time_s is None:
            slot_ms = await self.link.constant("Aura", "SlotDuration", Deadline.after(timeout_s))
            self._block_time_s = view.whole(slot_ms, "Aura.SlotDuration") / 1000 if slot_ms else DEFAULT_BLOCK_TIME_S
        return self._block_time_s

    async def block_hash(self, number: int, *, timeout_s: float = CALL_TIMEOUT_S) -> str:
        deadline = Deadline.after(timeout_s)
        newest = await self.link.finalized(deadline)
        if not 0 <= number <= newest.number:
            error = NotFound(f"block {number} isn't final; the newest that is: {newest.number}")
            wait_s = (number - newest.number) * await self.block_time_s(timeout_s=deadline.remaining_s())
            error.retry_after_s = wait_s if number > newest.number else None
            raise error
        return (await self.link.hash_of(number, deadline)).removeprefix("0x")

    async def metagraph(self, netuid: int, *, timeout_s: float = CALL_TIMEOUT_S) -> Metagraph:
        deadline = Deadline.after(timeout_s)
        head = await self._head_of_subnet(netuid, deadline)
        return await self.metagraph_at(netuid, head, deadline)

    async def metagraph_at(self, netuid: int, head: Head, deadline: Deadline) -> Metagraph:
        """From the storage items of the live metadata; stake lent by parent hotkeys isn't counted here."""
        named = await self.link.read(view.per_subnet(view.SUBNET_NAMES, netuid), head.hash, deadline)
        owner_hotkey, tempo, *columns = named
        keys = await self.link.read_map(SUBTENSOR, "Keys", (netuid,), head.hash, deadline)
        hotkeys = view.by_uid(keys, "Keys")
        registered = await self.link.read_map(SUBTENSOR, "BlockAtRegistration", (netuid,), head.hash, deadline)
        axons = await self.link.read_map(SUBTENSOR, "Axons", (netuid,), head.hash, deadline)
        owners = await self._per_hotkey("Owner", lambda hotkey: (hotkey,), hotkeys, head, deadline)
        alpha = await self._per_hotkey("TotalHotkeyAlpha", lambda hotkey: (hotkey, netuid), hotkeys, head, deadline)
        root = await self._per_hotkey("TotalHotkeyAlpha", lambda hotkey: (hotkey, 0), hotkeys, head, deadline)
        (tao_weight,) = await self.link.read([Item(SUBTENSOR, "TaoWeight")], head.hash, deadline)
        neurons = view.view_neurons(
            columns,
            hotkeys,
            {view.whole(uid, "BlockAtRegistration"): view.whole(at, "BlockAtRegistration") for uid, at in registered},
            {view.address(hotkey, "Axons"): info for hotkey, info in axons},
            owners,
            [view.total_stake(mine, lent, tao_weight) for mine, lent in zip(alpha, root, strict=True)],
        )
        return view.view_metagraph(netuid, head.number, tempo, owner_hotkey, neurons)

    async def hyperparameters(self, netuid: int, *, timeout_s: float = CALL_TIMEOUT_S) -> Hyperparameters:
        deadline = Deadline.after(timeout_s)
        head = await self._head_of_subnet(netuid, deadline)
        items = [*view.per_subnet(view.HYPERPARAMETER_NAMES, netuid), Item(SUBTENSOR, "StakeThreshold")]
        *values, threshold = await self.link.read(items, head.hash, deadline)
        return view.view_hyperparameters(values, threshold)

    async def weights(
        self, netuid: int, uid: int, *, mechanism: int = 0, timeout_s: float = CALL_TIMEOUT_S
    ) -> WeightsReceipt | None:
        deadline = Deadline.after(timeout_s)
        head = await self._head_of_subnet(netuid, deadline)
        index = view.storage_index(netuid, mechanism)
        items = [Item(SUBTENSOR, "Weights", (index, uid)), Item(SUBTENSOR, "LastUpdate", (index,))]
        stored, updates = await self.link.read(items, head.hash, deadline)
        return view.view_weights(stored, updates, uid)

    async def commitments(self, netuid: int, *, timeout_s: float = CALL_TIMEOUT_S) -> dict[str, Commitment]:
        deadline = Deadline.after(timeout_s)
        head = await self._head_of_subnet(netuid, deadline)
        found = await self.link.read_map("Commitments", "CommitmentOf", (netuid,), head.hash, deadline)
        viewed = ((view.address(hotkey, "CommitmentOf"), view.view_commitment(entry)) for hotkey, entry in found)
        return {hotkey: commitment for hotkey, commitment in sorted(viewed) if commitment is not None}

    # ---- writing

    async def register(
        self, netuid: int, *, coldkey: KeySigner, hotkey: str, timeout_s: float = WRITE_TIMEOUT_S
    ) -> int:
        """Burn at most what registering costs now. Where a part is locked as collateral this is left to ``btcli``."""
        deadline = Deadline.after(timeout_s)
        head = await self._head_of_subnet(netuid, deadline)
        await self._no_collateral(netuid, head, deadline)
        (cost,) = await self.link.read([Item(SUBTENSOR, "Burn", (netuid,))], head.hash, deadline)
        call = calls.register(netuid, hotkey, view.whole(cost, "Burn"))
        included = await self._write(call, coldkey, deadline)
        (uid,) = await self.link.read([Item(SUBTENSOR, "Uids", (netuid, hotkey))], included.hash, deadline)
        return view.whole(uid, "Uids")

    async def serve(self, netuid: int, host: str, port: int, *, timeout_s: float = WRITE_TIMEOUT_S) -> None:
        deadline, signer = Deadline.after(timeout_s), self.signer()
        call = calls.serve_axon(netuid, host, port)
        head = await self._head_of_subnet(netuid, deadline)
        item = Item(SUBTENSOR, "Axons", (netuid, signer.hotkey))
        (shown,) = await self.link.read([item], head.hash, deadline)
        if view.view_axon(shown) == Axon(host=host, port=port):
            return
        await self._write(call, signer, deadline)

    async def set_weights(
        self,
        netuid: int,
        weights: Mapping[str, float] | Mapping[int, float],
        *,
        version_key: int = 0,
        mechanism: int = 0,
        timeout_s: float = WRITE_TIMEOUT_S,
    ) -> WeightsReceipt:
        """In the open, or committed where the subnet wants that: the receipt then has a ``reveal_round``."""
        deadline, signer = Deadline.after(timeout_s), self.signer()
        head = await self._head_of_subnet(netuid, deadline)
        uids, values = to_u16(await self._by_uid(netuid, weights, head, deadline))
        call = WeightsCall(netuid, mechanism, uids, values, version_key)
        async with self._writing:
            block_time_s = await self.block_time_s(timeout_s=deadline.remaining_s())
            standing = await read_standing(self.link, call, signer.hotkey, head, block_time_s, deadline)
            return await send_weights(self.link, self.submit_weights, call, standing, signer, deadline)

    async def submit_weights(
        self, call: WeightsCall, compose: Compose, signer: KeySigner, deadline: Deadline
    ) -> tuple[Head, int | None]:
        """Send what ``compose`` makes of the live metadata. The SDK's adapter lets its library decide instead."""
        raw, reveal_round = await compose()
        included = await self.link.submit(raw, signer, deadline)
        return Head(included.block, included.hash), reveal_round

    async def set_commitment(self, netuid: int, data: bytes, *, timeout_s: float = WRITE_TIMEOUT_S) -> None:
        deadline, signer = Deadline.after(timeout_s), self.signer()
        call = calls.set_commitment(netuid, data)
        await self._head_of_subnet(netuid, deadline)
        await self._write(call, signer, deadline)

    # ---- how

    def signer(self) -> KeySigner:
        if self._hotkey is None:
            raise ConfigError("this chain client holds no hotkey", hint="connect with one to write")
        return self._hotkey

    async def _write(self, call: RawCall, signer: KeySigner, deadline: Deadline) -> Head:
        async with self._writing:
            included = await self.link.submit(call, signer, deadline)
        return Head(included.block, included.hash)

    async def _head_of_subnet(self, netuid: int, deadline: Deadline) -> Head:
        head = await self.link.head(deadline)
        (added,) = await self.link.read([Item(SUBTENSOR, "NetworksAdded", (netuid,))], head.hash, deadline)
        if added is not True:
            raise ChainRefused("SubnetNotExists", f"there is no subnet {netuid} on {self.link.endpoint}")
        return head

    async def _no_collateral(self, netuid: int, head: Head, deadline: Deadline) -> None:
        item = Item(SUBTENSOR, "CollateralLockShare", (netuid,))
        if await self.link.lacking([item], [], deadline):
            return
        (share,) = await self.link.read([item], head.hash, deadline)
        if view.whole(share, "CollateralLockShare") > 0:
            hint = f"btcli subnets register --netuid {netuid}: it encrypts the call, as buying the collateral needs"
            raise ConfigError(f"subnet {netuid} locks a part of the registration cost as collateral", hint=hint)

    async def _per_hotkey(
        self,
        name: str,
        keys: Callable[[str], tuple[int | str, ...]],
        hotkeys: Sequence[str],
        head: Head,
        deadline: Deadline,
    ) -> list[object]:
        return await self.link.read([Item(SUBTENSOR, name, keys(hotkey)) for hotkey in hotkeys], head.hash, deadline)

    async def _by_uid(
        self, netuid: int, weights: Mapping[str, float] | Mapping[int, float], head: Head, deadline: Deadline
    ) -> dict[int, float]:
        if not any(isinstance(key, str) for key in weights):
            return {int(key): value for key, value in weights.items()}
        hotkeys = [str(key) for key in weights]
        uids = await self._per_hotkey("Uids", lambda hotkey: (netuid, hotkey), hotkeys, head, deadline)
        for hotkey, uid in zip(hotkeys, uids, strict=True):
            if uid is None:
                raise ChainRefused("UidVecContainInvalidOne", f"{hotkey} isn't registered on subnet {netuid}")
        found = [view.whole(uid, "Uids") for uid in uids]
        return dict(zip(found, weights.values(), strict=True))
