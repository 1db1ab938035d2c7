"""A rate limit holds over any stretch of time, lets urgent ones go first, and counts; amounts are read as people write them."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peer_cases import A, B, Node, Note, running, soon, until

from subnet.errors import ConfigError
from subnet.net.base import Priority
from subnet.net.rate import BURST_S, RateLimit, bytes_per_s, num_bytes
from subnet.timing import ManualClock


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("12.5MB", 12.5e6),
        ("100Mbit", 12.5e6),
        ("100 Mbit/s", 12.5e6),
        ("100mbps", 100e6),
        ("1GiB/s", float(1 << 30)),
        ("5000", 5000.0),
        ("8kbit", 1000.0),
    ],
)
def test_rates(text: str, rate: float) -> None:
    assert bytes_per_s(text, "--limit.upload") == rate


def test_sizes() -> None:
    assert num_bytes("6GiB", "--limit.vram") == 6 << 30
    assert num_bytes("500MB", "--limit.vram") == 500_000_000


@pytest.mark.parametrize("text", ["", "fast", "-1MB", "0", "10 furlongs", "1e9", "nan"])
def test_what_is_no_rate(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--limit\.upload"):
        bytes_per_s(text, "--limit.upload")


@given(st.lists(st.tuples(st.integers(1, 5000), st.floats(0, 2)), min_size=1, max_size=40))
@settings(max_examples=50, deadline=None)
def test_what_came_already_is_paid_for_afterwards(arrivals: list[tuple[int, float]]) -> None:
    """Whoever waits as told never passes the rate by more than the burst and one arrival."""
    clock, rate = ManualClock(), 1000.0
    limit = RateLimit(rate, clock)
    began_s, total = clock.now_s(), 0
    for size_bytes, pause_s in arrivals:
        assert total <= rate * (clock.now_s() - began_s + BURST_S) + 1e-6
        total += size_bytes
        clock.advance(limit.spend(size_bytes) + pause_s)
    assert limit.used_bytes == total


async def test_urgent_first_then_in_order() -> None:
    limit = RateLimit(1e6)
    order: list[str] = []

    async def take(name: str, priority: int) -> None:
        await limit.take(20_000, priority)
        order.append(name)

    await limit.take(100_000)
    tasks = [asyncio.create_task(take(n, p)) for n, p in (("a", 2), ("b", 2), ("c", 0), ("d", 1), ("e", 2))]
    await asyncio.sleep(0)
    tasks[4].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order == ["c", "d", "a", "b"]
    assert limit.used_bytes == 180_000
    assert limit.waited_s > 0


async def test_without_a_limit_nothing_waits() -> None:
    limit = RateLimit()
    await limit.take(1 << 40)
    assert limit.spend(1 << 40) == 0.0
    assert (limit.used_bytes, limit.waited_s) == (1 << 41, 0.0)


@pytest.mark.parametrize("way", ["up", "down"])
async def test_a_transport_keeps_to_its_limit(way: str) -> None:
    limit = RateLimit(4e6)
    a = Node(A, upload=limit if way == "up" else None)
    b = Node(B, download=limit if way == "down" else None)
    loop = asyncio.get_running_loop()
    async with running(a, b):
        await a.transport.connect(b.address, deadline=soon())
        began_s = loop.time()
        for i in range(3):
            await a.transport.send(b.address, Note(i), bytes(1_000_000), priority=Priority.FORWARD, deadline=soon())
        await until(lambda: len(b.frames) == 3)
        took_s = loop.time() - began_s
    assert limit.used_bytes >= 3_000_000
    assert took_s >= 3_000_000 / 4e6 - 2 * BURST_S - 0.1  # never faster; how much slower is the machine's affair
    assert limit.waited_s > 0
