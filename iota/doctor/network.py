"""The way to a validator: answers, latency, clocks, versions, and whether others reach this machine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from statistics import median

from miner.reach import find_reach
from subnet.chain.fit import Findings
from subnet.errors import IotaError
from subnet.net.client import SignedClient
from subnet.net.streams import StreamTransport
from subnet.protocol.messages import AnyPeerFrame, Hello
from subnet.protocol.signing import Signer
from subnet.timing import SYSTEM_CLOCK, TIMEOUTS, Deadline
from subnet.words import PROTOCOL_VERSION

NUM_HELLOS = 9
CLOCK_S = 2.0
"""Signed requests carry the time; beyond 30 s they are refused, before that the offset is learnt."""
SLOW_S = 0.3


async def validator_way(
    findings: Findings, url: str, signer: Signer | None, *, host: str = "127.0.0.1", port: int = 0
) -> None:
    """All that can be found out with one validator. ``signer`` None: what needs a registered hotkey is left out."""
    async with SignedClient(url, signer) as client:
        hello = await _hellos(findings, client, url)
        if hello is None:
            return
        _versions(findings, hello)
        client.receiver = hello.hotkey
        client.learn_clock(hello.time_ns)
        if signer is None:
            findings.note("reachability isn't looked at without a wallet", "give --wallet.name")
            return
        await _reach(findings, client, signer, host, port)


async def _hellos(findings: Findings, client: SignedClient, url: str) -> Hello | None:
    seconds: list[float] = []
    offsets: list[float] = []
    hello: Hello | None = None
    try:
        for _ in range(NUM_HELLOS):
            began, began_ns = time.perf_counter(), SYSTEM_CLOCK.wall_ns()
            hello = await client.request(
                "GET", "/v1/hello", None, Hello, signed=False, deadline=Deadline.after(TIMEOUTS.http_request_s)
            )
            seconds.append(time.perf_counter() - began)
            offsets.append((hello.time_ns - began_ns) / 1e9 - seconds[-1] / 2)
    except IotaError as error:
        findings.bad(f"the validator at {url} doesn't answer: {error.reason}", error.hint or "check --validator.url")
        return None
    latency, offset = median(seconds), median(offsets)
    said = f"the validator answers in {1e3 * latency:.0f} ms (median of {NUM_HELLOS})"
    findings.ok(said) if latency < SLOW_S else findings.note(said, "far away: each step waits for a few of these")
    if abs(offset) > CLOCK_S:
        findings.note(f"this machine's clock is {-offset:+.1f} s from the validator's", "start an NTP client")
    else:
        findings.ok(f"clocks agree within {abs(offset):.2f} s")
    return hello


def _versions(findings: Findings, hello: Hello) -> None:
    if not hello.protocol_min <= PROTOCOL_VERSION <= hello.protocol_max:
        spoken = f"{hello.protocol_min} to {hello.protocol_max}"
        findings.bad(
            f"the validator speaks protocol {spoken}, this is {PROTOCOL_VERSION}", "update, or ask the operator to"
        )
    what = f"leads run {hello.run}" if hello.run else "leads no run"
    findings.ok(f"{hello.hotkey} {what}" + (f"; it waits for {hello.waiting_for}" if hello.waiting_for else ""))


async def _reach(findings: Findings, client: SignedClient, signer: Signer, host: str, port: int) -> None:
    """Listen as a miner would, and ask the validator to connect."""

    async def ignore(peer: str, frame: AnyPeerFrame, body: object) -> None:
        return None

    transport: StreamTransport[AnyPeerFrame] = StreamTransport(
        signer, AnyPeerFrame, ignore, host=_listen(host), port=port
    )
    try:
        await transport.start()
    except IotaError as error:
        findings.bad(f"port {port} can't be listened on: {error.reason}", error.hint or "choose another --peer.port")
        return
    try:
        found = await find_reach(client, host, transport.port)
    finally:
        await transport.close()
    if not found.known:
        findings.note(found.text, "reachability can be looked at with a registered hotkey")
    elif found.reachable:
        findings.ok(f"others reach this machine: {found.text}")
    else:
        findings.note(found.text)


def _listen(host: str) -> str:
    return host if host in ("127.0.0.1", "::1", "localhost") else "0.0.0.0"


def run_now(work: Callable[[], Awaitable[None]], seconds: float) -> None:
    """From plain code, within a deadline that ends it whatever it waits for."""

    async def limited() -> None:
        async with Deadline.after(seconds).limit("iota doctor"):
            await work()

    asyncio.run(limited())
