"""``GET /v1/policy`` and ``POST /v1/policy``: the policy of this validator, and its change from the next tempo on.

Order of a change: checked, written to the keeper's file, told to the books and to the journal of the run that is led. It is in
force from the first block of the next tempo, as this validator expects it, and scores of that time are made with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from aiohttp import web
from loguru import logger

from subnet.chain.base import Chain, Metagraph
from subnet.errors import Busy, IotaError, Unreachable
from subnet.net.http import Call, Route, answer
from subnet.policy.api import LIMIT_REQUEST_BYTES, PolicyLine, PolicyRequest, PolicyView
from subnet.policy.change import check_change, differences
from subnet.policy.policy import short
from subnet.timing import TIMEOUTS, Clock
from validator.policy_keeper import PolicyKeeper, counting_of

if TYPE_CHECKING:
    from validator.node import ValidatorNode

LOOK_S = 0.5


class NotYours(IotaError):
    """The policy is somebody else's to change."""

    code, http_status = "not_allowed", 403


class OtherBase(IotaError):
    """The change was made from a policy that isn't in force any more."""

    code, http_status = "other_base", 409


class Pending(Busy):
    """One change per tempo."""

    code, http_status = "policy_pending", 409


class PolicyDesk:
    """``tell``: the books and the run that is led, called once the change is on disk. ``effect``: called when one is in force."""

    def __init__(
        self,
        keeper: PolicyKeeper,
        hotkey: str,
        chain: Chain,
        metagraph: Callable[[], Metagraph | None],
        clock: Clock,
        *,
        tell: Callable[[PolicyLine], None],
        effect: Callable[[PolicyLine], None],
    ) -> None:
        self._keeper, self._hotkey, self._chain, self._metagraph = keeper, hotkey, chain, metagraph
        self._clock, self._tell, self._effect = clock, tell, effect
        self._turn = asyncio.Lock()

    @property
    def _now_s(self) -> float:
        return self._clock.wall_ns() / 1e9

    def view(self) -> PolicyView:
        return self._keeper.view(self._now_s)

    def may_change(self, hotkey: str) -> bool:
        """Whether it is the validator's own hotkey, or the subnet owner's, registered or not."""
        metagraph = self._metagraph()
        return hotkey == self._hotkey or (metagraph is not None and hotkey == metagraph.owner_hotkey != "")

    async def apply(self, hotkey: str, request: PolicyRequest) -> PolicyView:
        """The same request again is answered like the first."""
        metagraph = self._metagraph()
        if not self.may_change(hotkey):
            owner = metagraph.owner_hotkey if metagraph is not None else ""
            raise NotYours(
                f"{hotkey} may not change the policy of this validator",
                hint=f"its own hotkey {self._hotkey} may, and the subnet owner's{f' {owner}' if owner else ''}",
            )
        async with self._turn:
            return await self._applied(hotkey, request, metagraph)

    async def _applied(self, hotkey: str, request: PolicyRequest, metagraph: Metagraph | None) -> PolicyView:
        view, new = self.view(), request.policy
        pending, in_force = view.pending, view.in_force
        if new.digest == (pending or in_force).digest:
            return view
        if pending is not None:
            raise Pending(
                f"policy {short(pending.digest)} takes effect in {pending.since_s - view.time_s:.0f} s",
                hint="one change per tempo: apply this one then",
                retry_after_s=pending.since_s - view.time_s,
            )
        if request.base != in_force.digest:
            raise OtherBase(
                f"policy {short(in_force.digest)} is in force, not {short(request.base)}",
                hint="look at it with iota policy show --live, then apply again",
            )
        check_change(in_force.policy, new)
        block, since_s = await self._next_tempo(metagraph)
        line = PolicyLine(new, new.digest, since_s, block, hotkey, self._now_s)
        await asyncio.to_thread(self._keeper.add, line)
        changes = ", ".join(f"{d.name} {d.old!r} to {d.new!r}" for d in differences(in_force.policy, new))
        logger.warning("policy {} from block {} on, by {}: {}", short(new.digest), block, hotkey, changes)
        self._tell(line)
        return self.view()

    async def _next_tempo(self, metagraph: Metagraph | None) -> tuple[int, float]:
        """(block, wall time) at which the next tempo begins."""
        if metagraph is None:
            raise Unreachable("the chain wasn't seen yet: nobody knows when the tempo ends", hint="try again")
        block = await self._chain.block(timeout_s=TIMEOUTS.http_request_s / 4)
        block_time_s = await self._chain.block_time_s(timeout_s=TIMEOUTS.http_request_s / 4)
        left = blocks_left(block, metagraph.netuid, metagraph.tempo)
        return block + left, self._now_s + left * block_time_s

    async def watch(self) -> None:
        """Forever: says when a policy comes into force, and has it take effect."""
        known = self._keeper.in_force(self._now_s)
        while True:
            await asyncio.sleep(LOOK_S)
            line = self._keeper.in_force(self._now_s)
            if line is not known:
                known = line
                logger.info("policy {} is in force", short(line.digest))
                self._effect(line)


def desk_of_leader(node: ValidatorNode) -> PolicyDesk:
    """Of a validator that leads runs: the active one's journal has what its book is to count with."""

    def tell(line: PolicyLine) -> None:
        session = node.session
        told = session.entry.stored.run_id if session is not None and session.tell_policies() else ""
        node.scores.change(counting_of(line), told=told)

    def effect(line: PolicyLine) -> None:
        if node.session is not None:
            node.session.take_policy(line.policy)

    return PolicyDesk(
        node.policies,
        node.signer.hotkey,
        node.chain,
        lambda: node.side.metagraph,
        node.clock,
        tell=tell,
        effect=effect,
    )


def blocks_left(block: int, netuid: int, tempo: int) -> int:
    """From this block to the one in which the subnet settles next: where (block + netuid + 1) is a multiple of (tempo + 1)."""
    period = tempo + 1
    return period - (block + netuid + 1) % period


def policy_routes(desk: PolicyDesk) -> list[Route]:
    async def show(call: Call) -> web.StreamResponse:
        return answer(desk.view())

    async def change(call: Call) -> web.StreamResponse:
        return answer(await desk.apply(call.hotkey, call.decode(PolicyRequest)))

    return [
        Route("GET", "/v1/policy", show, signed=False),
        Route("POST", "/v1/policy", change, body_limit_bytes=LIMIT_REQUEST_BYTES),
    ]
