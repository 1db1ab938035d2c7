"""Cheats about what is sent and said: other bytes than receipted, evidence withheld, friends cleared, floods."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable
from typing import Any

import msgspec
from blake3 import blake3

from benchmarks.cheats import NO_ITEM, Liar, Patches
from benchmarks.cheats_work import FACTOR, scaled_bytes, scaled_gradient
from miner.context import RunContext
from miner.member_evidence import EvidenceWork
from miner.member_witness import WitnessWork
from miner.owes import RunWitness, StoreEvidence
from miner.run_member import RunMember
from subnet.audit.build import claimed_digest
from subnet.errors import IotaError
from subnet.model.memory import boundary_bytes
from subnet.net.base import send_deadline
from subnet.net.client import SignedClient
from subnet.net.streams import StreamTransport
from subnet.protocol.messages import BoundaryFrame, GrantRequest, JoinRequest, NeedFrame, Report, WantBlobFrame
from subnet.protocol.sent import sign_sent
from subnet.run.state import members_of
from subnet.timing import TIMEOUTS, Deadline
from subnet.words import PROTOCOL_VERSION, Member

Method = Callable[..., Any]
FLOODS = 3
"""Requests to the validator, and frames to miners, that are under way at once, of each."""


def equivocating_sender(liar: Liar, patches: Patches) -> None:
    """Receipted is what was computed; what is sent is something else under a hash of its own."""

    def send(original: Method) -> Method:
        async def changed(self: Any, peer: Any, header: Any, body: Any, **named: Any) -> None:
            is_plain = isinstance(header, BoundaryFrame) and header.packing == "none"
            if is_plain and liar.lies(header.step, header.microbatch, header.stage):
                body = scaled_bytes(body, FACTOR)
                header = msgspec.structs.replace(header, hash=blake3(body).hexdigest())
                if header.signature and liar.context is not None:  # unsigned it would be refused at the door
                    header = sign_sent(liar.context.signer, header)
            await original(self, peer, header, body, **named)

        return changed

    patches.put(StreamTransport, "send", send)


def refused_opening(liar: Liar, patches: Patches) -> None:
    """Evidence never reaches the store; the miner goes on as if it had."""

    def store(original: Method) -> Method:
        async def changed(self: EvidenceWork, owe: StoreEvidence) -> None:
            if liar.lies(owe.key.step, owe.key.microbatch, owe.key.stage):
                self._context.local.opened.add((owe.audit, owe.hash))
                return
            await original(self, owe)

        return changed

    patches.put(EvidenceWork, "store", store)


def cover(liar: Liar, patches: Patches) -> None:
    """As a third party it replays nothing, and says the digest that would clear the accused."""

    def replayed(original: Method) -> Method:
        async def changed(self: WitnessWork, owe: RunWitness) -> str:
            if not liar.is_one:
                return await original(self, owe)
            case = await self._case(owe, Deadline.after(TIMEOUTS.audit_run_s))
            said = claimed_digest(case, case.partials[0].member) if case.partials else None
            return said or await original(self, owe)

        return changed

    patches.put(WitnessWork, "_replayed", replayed)


def colluding_witness(liar: Liar, patches: Patches) -> None:
    scaled_gradient(liar, patches)
    cover(liar, patches)


def flooding_peer(liar: Liar, patches: Patches) -> None:
    """Beside its honest work: signed requests that mean nothing, and frames nobody is waiting for, as fast as they go."""

    def run(original: Method) -> Method:
        async def changed(self: RunMember, peer_port: int) -> None:
            floods = [_flood_validator(liar) for _ in range(FLOODS)]
            floods += [_flood_miners(liar, self.links._transport) for _ in range(FLOODS)]
            tasks = [asyncio.create_task(flood, name="flood") for flood in floods]
            try:
                await original(self, peer_port)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)

        return changed

    patches.put(RunMember, "run", run)


def _begun(liar: Liar) -> RunContext | None:
    """Once it is a member and serves a stage; each step that it floods in is noted as a lie."""
    context = liar.context
    if context is None or context.member is None or context.stage is None:
        return None
    return context if liar.lies(context.run_state.next_step, NO_ITEM, context.stage.stage) else None


async def _flood_validator(liar: Liar) -> None:
    turn = 0
    while True:
        context = _begun(liar)
        if context is None:
            await asyncio.sleep(0.1)
            continue
        turn += 1
        with contextlib.suppress(IotaError):
            path, body = _nonsense(context, turn)
            client: SignedClient = context.blobs._validator
            await client.request("POST", path, body, None, deadline=Deadline.after(2.0))
        await asyncio.sleep(0)


def _nonsense(context: RunContext, turn: int) -> tuple[str, Any]:
    stranger = Member(context.me().hotkey, 99, turn) if context.member is not None else Member("nobody", 0, 0)
    cursor = context.directives.cursor
    match turn % 3:
        case 0:
            return "/v1/reports", Report(PROTOCOL_VERSION, context.run_id, stranger, cursor, ())
        case 1:
            wanted = ((secrets.token_hex(32), 0),)
            return "/v1/grants", GrantRequest(PROTOCOL_VERSION, context.run_id, False, wanted)
        case _:
            return "/v1/join", JoinRequest(
                version=PROTOCOL_VERSION,
                run="no run",
                boot=secrets.token_hex(8),
                host="127.0.0.1",
                port=1,
                hardware_class=(),
                seen=cursor,
            )


async def _flood_miners(liar: Liar, transport: Any) -> None:
    turn = 0
    while True:
        context = _begun(liar)
        peers = [] if context is None else _others(context)
        if context is None or not peers:
            await asyncio.sleep(0.1)
            continue
        turn += 1
        with contextlib.suppress(IotaError):
            address = context.address(peers[turn % len(peers)])
            if address is not None:
                header, body = _unwanted(context, turn)
                await transport.send(address, header, body, deadline=send_deadline(len(body)))
        await asyncio.sleep(0)


def _others(context: RunContext) -> list[Member]:
    state = context.run_state
    stages = range(context.plan.num_stages)
    return [member for stage in stages for member in members_of(state, stage) if member != context.member]


def _unwanted(context: RunContext, turn: int) -> tuple[Any, bytes]:
    member, step = context.me(), context.run_state.next_step
    stage = 0 if context.stage is None else context.stage.stage
    match turn % 3:
        case 0:
            body = secrets.token_bytes(boundary_bytes(context.plan))
            hash_ = blake3(body).hexdigest()
            return BoundaryFrame(context.run_id, step, turn % 4, stage, False, member, 1, hash_), body
        case 1:
            return NeedFrame(context.run_id, step, turn % 4, 1 - min(stage, 1), False, member), b""
        case _:
            return WantBlobFrame(context.run_id, turn, secrets.token_hex(32), 0, 1 << 20, member), b""
