"""The way to a validator: answers, latency, clocks, versions, and whether others reach this machine."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from statistics import median

from iota.doctor.spec import Network, load_spec
from miner.reach import find_reach
from subnet.chain.fit import Findings
from subnet.errors import IotaError
from subnet.net.client import SignedClient
from subnet.net.streams import StreamTransport
from subnet.protocol.bandwidth import LIMIT_PROBE_BYTES, BandwidthAnswer, BandwidthProbe
from subnet.protocol.messages import AnyPeerFrame, Hello
from subnet.protocol.signing import Signer
from subnet.timing import SYSTEM_CLOCK, TIMEOUTS, Deadline
from subnet.words import PROTOCOL_OLDEST, PROTOCOL_VERSION

NUM_HELLOS = 9
CLOCK_S = 2.0
"""Signed requests carry the time; beyond 30 s they are refused, before that the offset is learnt."""
SLOW_S = 0.3
MEASURED_S, MAX_TRANSFERS = 2.0, 6
"""Of the bandwidth each way: not longer, not more."""


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
            findings.note("bandwidth and reachability aren't looked at without a wallet", "give --wallet.name")
            return
        await bandwidth(findings, client)
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
    if not max(hello.protocol_min, PROTOCOL_OLDEST) <= min(hello.protocol_max, PROTOCOL_VERSION):
        spoken = f"{hello.protocol_min} to {hello.protocol_max}"
        findings.bad(
            f"the validator speaks protocol {spoken}, this is {PROTOCOL_VERSION}", "update, or ask the operator to"
        )
    what = f"leads run {hello.run}" if hello.run else "leads no run"
    findings.ok(f"{hello.hotkey} {what}" + (f"; it waits for {hello.waiting_for}" if hello.waiting_for else ""))


async def bandwidth(findings: Findings, client: SignedClient, least: Network | None = None) -> None:
    """A few MiB each way, for two seconds each at most; the best of the single transfers, the way's own time taken off."""
    least = least or load_spec().of("miner").network
    try:
        up, down = await _speed(client, up=True), await _speed(client, up=False)
    except IotaError as error:
        findings.note(f"the bandwidth isn't known: {error.reason}", error.hint or "a registered hotkey may measure it")
        return
    said = f"at least {up:,.0f} Mbit/s up and {down:,.0f} down to the validator"
    if up < least.upload_mbps or down < least.download_mbps:
        wanted = f"min_compute.yml asks for {least.upload_mbps} up and {least.download_mbps} down"
        findings.note(said, f"{wanted}; iota plan says what a run needs, codes make it less")
    else:
        findings.ok(said)


async def _speed(client: SignedClient, *, up: bool) -> float:
    """Mbit/s one way."""

    async def once(size_bytes: int) -> float:
        probe = BandwidthProbe(os.urandom(size_bytes) if up else b"", 0 if up else size_bytes)
        began = time.perf_counter()
        deadline = Deadline.after(TIMEOUTS.http_request_s)
        await client.request("POST", "/v1/bandwidth", probe, BandwidthAnswer, deadline=deadline)
        return time.perf_counter() - began

    await once(0)  # opens the connection
    trip_s = min([await once(0) for _ in range(3)])
    best, size_bytes, until = 0.0, 64 << 10, time.perf_counter() + MEASURED_S
    for _ in range(MAX_TRANSFERS):
        spent_s = await once(size_bytes)
        best = max(best, 8e-6 * size_bytes / max(0.25 * spent_s, spent_s - trip_s))  # trips differ from one to the next
        if time.perf_counter() + 2 * spent_s > until:
            break
        size_bytes = min(LIMIT_PROBE_BYTES // 2, 4 * size_bytes)
    return best


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
