"""A hotkey has a share of the server, in requests and in bytes; a flood is refused, late, and costs nobody else theirs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from subnet.errors import ConfigError, Refused
from subnet.net.border import Listener, listen
from subnet.net.client import SignedClient
from subnet.net.http import Call, Route, answer, create_app
from subnet.net.limits import LimitPolicy, RateLimited, RequestLimits
from subnet.protocol.signing import RequestVerifier, Signer
from subnet.timing import Deadline, ManualClock

ALICE, BOB, CAROL = (Signer.from_uri(f"//{name}") for name in ("Alice", "Bob", "Carol"))


def test_requests_have_a_burst_and_a_rate() -> None:
    clock = ManualClock()
    limits = RequestLimits(LimitPolicy(requests_per_s=10, requests_burst=20), clock)
    assert [limits.wait_s("a", 0) for _ in range(20)] == [0.0] * 20
    assert limits.wait_s("a", 0) == pytest.approx(0.1)
    assert limits.wait_s("b", 0) == 0.0, "another's share is its own"
    clock.advance(1.0)
    assert sum(limits.wait_s("a", 0) == 0.0 for _ in range(30)) == 10


def test_bytes_have_a_burst_and_a_rate() -> None:
    clock = ManualClock()
    limits = RequestLimits(LimitPolicy(bytes_per_s=1000, bytes_burst=5000), clock)
    assert limits.wait_s("a", 5000) == 0.0
    assert limits.wait_s("a", 1000) == pytest.approx(1.0)
    clock.advance(1.0)
    assert limits.wait_s("a", 1000) == 0.0


def test_shares_shrink_with_the_number_of_askers_and_grow_again() -> None:
    clock = ManualClock()
    policy = LimitPolicy(requests_per_s=100, requests_burst=200, shared_requests_per_s=1000, least_requests_per_s=2)
    limits = RequestLimits(policy, clock)
    for number in range(100):
        limits.wait_s(f"hot{number}", 0)
    assert limits.requests_per_s() == pytest.approx(10)
    clock.advance(60.0)
    limits.wait_s("hot0", 0)
    limits.wait_s("hot0", 0)
    assert limits.requests_per_s() == 100
    for number in range(2000):
        limits.wait_s(f"more{number}", 0)
    assert limits.requests_per_s() == 2


def test_values_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="requests_per_s"):
        LimitPolicy(requests_per_s=0)


@pytest.fixture
async def server() -> AsyncIterator[tuple[Listener, RequestLimits]]:
    async def handle(call: Call) -> web.StreamResponse:
        return answer(call.hotkey)

    limits = RequestLimits(LimitPolicy(requests_per_s=5, requests_burst=3, shared_requests_per_s=1e6))
    app = create_app([Route("POST", "/ask", handle)], RequestVerifier(BOB.hotkey, is_known=lambda _: True), limits)
    listener = await listen(app, "127.0.0.1", 0)
    yield listener, limits
    await listener.close()


async def test_a_flood_is_refused_with_its_code_and_others_are_answered(
    server: tuple[Listener, RequestLimits],
) -> None:
    listener, limits = server
    refusals: list[Refused] = []

    async def flood() -> None:
        async with SignedClient(listener.url, Signer(ALICE.keypair), BOB.hotkey) as client:
            for _ in range(12):
                try:
                    await client._try("POST", "/ask", b"x", str, Deadline.after(30), True)
                except Refused as refused:
                    refusals.append(refused)

    async def calm() -> None:
        async with SignedClient(listener.url, Signer(CAROL.keypair), BOB.hotkey) as client:
            for _ in range(3):
                assert await client.request("POST", "/ask", "x", str, deadline=Deadline.after(30)) == CAROL.hotkey

    await asyncio.gather(flood(), calm())
    assert {(refused.code, refused.status) for refused in refusals} == {(RateLimited.code, 429)}
    assert all(refused.retry_after_s is not None and refused.retry_after_s > 0 for refused in refusals)
    assert limits.num_refused == len(refusals) > 0


async def test_a_client_waits_and_gets_through(server: tuple[Listener, RequestLimits]) -> None:
    listener, _ = server
    async with SignedClient(listener.url, Signer(ALICE.keypair), BOB.hotkey) as client:
        for _ in range(6):
            assert await client.request("POST", "/ask", "x", str, deadline=Deadline.after(30)) == ALICE.hotkey
