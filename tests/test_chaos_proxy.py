"""A proxy passes bytes unchanged, does what its policy says to old and new connections, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iota.chaos.proxy import PASS, Link, Policy, Proxy
from iota.chaos.relay import CHUNK_BYTES, QUEUE_CHUNKS, Flipper
from subnet.errors import ConfigError, IotaError

WAIT_S = 30.0


class Upstream:
    """Accepts connections and hands them out; everything is closed at the end."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(WAIT_S)
        self.port: int = self._listener.getsockname()[1]
        self._open: list[socket.socket] = []

    def accept(self) -> socket.socket:
        connection, _ = self._listener.accept()
        connection.settimeout(WAIT_S)
        self._open.append(connection)
        return connection

    def nobody_came(self) -> bool:
        self._listener.settimeout(0.0)
        try:
            self._open.append(self._listener.accept()[0])
        except BlockingIOError:
            return True
        finally:
            self._listener.settimeout(WAIT_S)
        return False

    def close(self) -> None:
        for each in (*self._open, self._listener):
            each.close()


@pytest.fixture
def upstream() -> Iterator[Upstream]:
    found = Upstream()
    yield found
    found.close()


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    with Proxy() as running:
        yield running


@pytest.fixture
def link(proxy: Proxy, upstream: Upstream) -> Link:
    return proxy.add("link", upstream.port)


@contextmanager
def client(link: Link) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", link.port), timeout=WAIT_S) as opened:
        yield opened


def read_exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        chunk = connection.recv(count - len(data))
        if not chunk:
            break
        data += chunk
    return data


def read_to_end(connection: socket.socket) -> None:
    while connection.recv(1 << 16):
        continue


def assert_reset(link: Link) -> None:
    """Of a new connection: at once, or so soon that it doesn't even come about."""
    with pytest.raises(ConnectionResetError), client(link) as near:
        near.recv(1)


def assert_silent(connection: socket.socket, seconds: float = 0.2) -> None:
    connection.settimeout(seconds)
    with pytest.raises(TimeoutError):
        connection.recv(1)
    connection.settimeout(WAIT_S)


def eventually(condition: object) -> None:
    assert callable(condition)
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_bytes_pass_both_ways_and_ends_too(proxy: Proxy, link: Link, upstream: Upstream) -> None:
    data = bytes(range(256)) * 4000
    with client(link) as near:
        far = upstream.accept()
        sender = threading.Thread(target=near.sendall, args=(data,))
        sender.start()
        assert read_exactly(far, len(data)) == data
        sender.join()
        near.shutdown(socket.SHUT_WR)  # half an end is no whole one
        assert far.recv(1) == b""
        far.sendall(b"answer")
        assert read_exactly(near, 6) == b"answer"
        far.close()
        assert near.recv(1) == b""
    eventually(lambda: proxy.num_open() == 0)
    assert link.num_bytes == len(data) + 6
    assert not link.relays


def test_a_connection_to_nobody_is_reset(proxy: Proxy) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    link = proxy.add("nowhere", port)
    assert_reset(link)
    eventually(lambda: proxy.num_open() == 0)


def test_a_reset_of_one_side_reaches_the_other(link: Link, upstream: Upstream) -> None:
    with client(link) as near:
        far = upstream.accept()
        near.sendall(b"x")
        assert far.recv(1) == b"x"
        far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        far.close()
        with pytest.raises(ConnectionResetError):
            near.recv(1)


def test_reset_ends_open_connections_and_new_ones_until_it_is_lifted(
    proxy: Proxy, link: Link, upstream: Upstream
) -> None:
    with client(link) as near:
        far = upstream.accept()
        proxy.set("link", Policy(mode="reset"))
        for side in (near, far):
            with pytest.raises(ConnectionResetError):
                side.recv(1)
    assert_reset(link)
    assert upstream.nobody_came()
    assert link.num_reset >= 2
    proxy.set("link", PASS)
    with client(link) as near:
        near.sendall(b"again")
        assert read_exactly(upstream.accept(), 5) == b"again"


def test_a_black_hole_holds_everything_and_loses_nothing(proxy: Proxy, link: Link, upstream: Upstream) -> None:
    with client(link) as near, client(link) as other:
        far, other_far = upstream.accept(), upstream.accept()
        near.sendall(b"before")
        assert read_exactly(far, 6) == b"before"
        proxy.set("link", Policy(mode="blackhole"))
        near.sendall(b"held")
        far.sendall(b"back")
        other.sendall(b"other")
        with client(link) as late:
            late.sendall(b"late")
            for side in (near, far, other_far, late):
                assert_silent(side)
            assert upstream.nobody_came()
            proxy.set("link", PASS)
            assert read_exactly(far, 4) == b"held"
            assert read_exactly(near, 4) == b"back"
            assert read_exactly(other_far, 5) == b"other"
            assert read_exactly(upstream.accept(), 4) == b"late"


def test_what_is_held_is_bounded(proxy: Proxy, link: Link, upstream: Upstream) -> None:
    """A sender into a black hole is stopped by the proxy and the kernel, not by the memory of this machine."""
    with client(link) as near:
        upstream.accept()
        proxy.set("link", Policy(mode="blackhole"))
        near.settimeout(1.0)
        sent = 0
        with suppress(TimeoutError):
            while sent < 64 << 20:
                sent += near.send(b"x" * (1 << 16))
        assert sent < 64 << 20
        (relay,) = link.relays
        held = len(relay._reader._buffer)  # pyright: ignore
        assert held <= 512 << 10  # twice the limit of a reader, and one read
        assert QUEUE_CHUNKS * CHUNK_BYTES <= 1 << 20


def test_delay_and_bandwidth(proxy: Proxy, link: Link, upstream: Upstream) -> None:
    with client(link) as near:
        far = upstream.accept()
        proxy.set("link", Policy(delay_ms=300))
        began = time.monotonic()
        near.sendall(b"x" * 50_000)  # delay is not paid per chunk
        assert len(read_exactly(far, 50_000)) == 50_000
        assert time.monotonic() - began >= 0.3
        proxy.set("link", Policy(kbit_per_s=1000))
        began = time.monotonic()
        near.sendall(b"y" * 50_000)
        assert read_exactly(far, 50_000) == b"y" * 50_000
        assert time.monotonic() - began >= 0.4  # 400 kbit


def test_corruption_inverts_as_many_bytes_as_told_and_then_none(proxy: Proxy, link: Link, upstream: Upstream) -> None:
    data = bytes(1000)
    with client(link) as near:
        far = upstream.accept()
        proxy.set("link", Policy(flip_bytes=3, flip_every=100))
        near.sendall(data)
        got = read_exactly(far, 1000)
        assert [i for i in range(1000) if got[i]] == [99, 199, 299]
        assert link.num_flipped == 3
        near.sendall(data)
        assert read_exactly(far, 1000) == data
        proxy.set("link", Policy(flip_bytes=1, flip_every=1))  # the answers too
        far.sendall(b"\0")
        assert near.recv(1) == b"\xff"


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 5), st.integers(1, 50), st.lists(st.integers(0, 60), max_size=8))
def test_chunks_make_no_difference_to_corruption(count: int, every: int, sizes: list[int]) -> None:
    cut, whole = Flipper(count, every), Flipper(count, every)
    pieces = [cut.flip(bytes(size)) for size in sizes]
    joined, flipped = whole.flip(bytes(sum(sizes)))
    assert b"".join(data for data, _ in pieces) == joined
    assert sum(number for _, number in pieces) == flipped == min(count, sum(sizes) // every)


def test_busy_answers_503(proxy: Proxy, link: Link, upstream: Upstream) -> None:
    proxy.set("link", Policy(mode="busy"))
    for body in (None, b"z" * 300_000):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"{link.url}/blob", data=body, timeout=WAIT_S)
        assert refused.value.code == 503
        assert b"Unavailable" in refused.value.read()
        refused.value.close()
    assert upstream.nobody_came()
    with client(link) as near:
        near.sendall(b"x" * 200_000)  # no head within the bound
        with pytest.raises(ConnectionError):
            read_to_end(near)
    eventually(lambda: proxy.num_open() == 0)


def test_a_truncated_answer_ends_in_order_after_so_many_bytes(proxy: Proxy, link: Link, upstream: Upstream) -> None:
    proxy.set("link", Policy(truncate_after=10))
    for _ in range(2):
        with client(link) as near:
            near.sendall(b"a long question")
            far = upstream.accept()
            assert read_exactly(far, 15) == b"a long question"
            far.sendall(b"0123456")
            far.sendall(b"789abcdef")
            assert read_exactly(near, 100) == b"0123456789"
    with client(link) as near:
        far = upstream.accept()
        far.sendall(b"0123456789")  # exactly as much: nothing is missing
        assert read_exactly(near, 10) == b"0123456789"
        proxy.set("link", PASS)
        far.sendall(b"more")
        assert read_exactly(near, 4) == b"more"


def test_the_openers_link_holds_too(proxy: Proxy, upstream: Upstream) -> None:
    link = proxy.add("a", upstream.port, identify=lambda first: "b" if b"from b" in first else None)
    proxy.add("b", upstream.port)
    with client(link) as from_b, client(link) as from_c:
        from_b.sendall(b"from b")
        far = upstream.accept()
        assert read_exactly(far, 6) == b"from b"
        from_c.sendall(b"from c")
        other = upstream.accept()
        assert read_exactly(other, 6) == b"from c"
        proxy.set("b", Policy(mode="reset"))
        with pytest.raises(ConnectionResetError):
            from_b.recv(1)
        other.sendall(b"here")
        assert read_exactly(from_c, 4) == b"here"
        with client(link) as again:
            again.sendall(b"from b")
            with pytest.raises(ConnectionResetError):
                again.recv(1)
    assert upstream.nobody_came()
    eventually(lambda: not proxy.links["b"].relays)


def test_close_ends_connections_in_any_state(upstream: Upstream) -> None:
    proxy = Proxy()
    proxy.start()
    link = proxy.add("link", upstream.port, identify=lambda first: None)
    with client(link) as mute, client(link) as full:
        full.sendall(b"first")
        far = upstream.accept()
        full.settimeout(0.5)
        with suppress(TimeoutError):
            while True:
                full.send(b"x" * (1 << 16))  # nobody reads it at the other end
        assert proxy.num_open() == 2
        proxy.close()
        proxy.close()
        assert proxy.num_open() == 0
        for side in (mute, full):
            side.settimeout(WAIT_S)
            with pytest.raises(ConnectionError):
                read_to_end(side)
        far.close()
    assert not any(thread.name == "proxy" for thread in threading.enumerate())
    with pytest.raises(IotaError, match="aren't running"):
        proxy.add("late", upstream.port)


def test_many_connections_leave_no_task_and_no_descriptor(proxy: Proxy, link: Link, upstream: Upstream) -> None:
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = descriptors()
    for number in range(40):
        with client(link) as near:
            near.sendall(b"x")
            far = upstream.accept()
            assert far.recv(1) == b"x"
            if number % 3 == 0:
                far.close()
        far.close()
    eventually(lambda: proxy.num_open() == 0)
    eventually(lambda: descriptors() <= before)


def test_an_error_of_the_proxy_itself_is_not_swallowed(upstream: Upstream) -> None:
    def broken(first: bytes) -> str | None:
        raise ZeroDivisionError(first)

    proxy = Proxy()
    proxy.start()
    link = proxy.add("link", upstream.port, identify=broken)
    with client(link) as near:
        near.sendall(b"x")
        with pytest.raises(ConnectionError):
            near.recv(1)
    eventually(lambda: proxy.num_open() == 0)
    with pytest.raises(ExceptionGroup, match="the proxies failed"):
        proxy.close()


def test_a_port_in_use_is_a_config_error(proxy: Proxy, upstream: Upstream) -> None:
    with pytest.raises(ConfigError, match="can't listen"):
        proxy.add("link", 1, port=upstream.port)
    assert "link" not in proxy.links


async def test_the_products_own_client_takes_it_for_what_it_is(proxy: Proxy, link: Link) -> None:
    """503, a reset and a broken-off answer are unreachable or busy to a signed client: worth a retry."""
    from subnet.errors import Refused, Unreachable
    from subnet.net.client import SignedClient
    from subnet.timing import Deadline

    for policy in (Policy(mode="busy"), Policy(mode="reset")):
        await asyncio.to_thread(proxy.set, "link", policy)
        async with SignedClient(link.url) as asker:
            with pytest.raises((Refused, Unreachable)) as refused:
                await asker.request("GET", "/v1/hello", None, None, deadline=Deadline.after(1.0), signed=False)
            assert refused.value.retryable
