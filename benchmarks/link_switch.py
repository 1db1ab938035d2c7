"""A user-space switch between network namespaces: every packet arrives after the delay, at no more than the receiver's rate.

Each namespace's only interface is a TUN device that ends here; what it sends is paced by ``tc tbf`` in the kernel before it comes.
A receiver's queue holds ``QUEUE_S`` at its rate; what doesn't fit is dropped, as a home router does. Packets to one
receiver keep their order.

    python -m benchmarks.link_switch DELAY_S RATE_BYTES_PER_S NAME=ADDRESS[=free] ...
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import socket
import struct
import sys
import time
from collections import deque
from dataclasses import dataclass, field

from benchmarks.link_spaces import MTU_BYTES, TUN, run

_TUNSETIFF = 0x400454CA
_IFF_TUN_NO_PI = 0x0001 | 0x1000
_CLONE_NEWNET = 0x40000000
QUEUE_S = 0.1


@dataclass
class End:
    """One namespace: its device, and what is on its way there."""

    fd: int
    rate: float | None
    free_at_s: float = 0.0
    queue: deque[tuple[float, bytes]] = field(default_factory=deque[tuple[float, bytes]])
    dropped: int = 0


def enter(namespace: str) -> None:
    """This thread works in the namespace from now on; an empty name is the machine's own."""
    path = f"/run/netns/{namespace}" if namespace else "/proc/1/ns/net"
    fd = os.open(path, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(fd, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {path}")
    finally:
        os.close(fd)


def open_tun(namespace: str, address: str, home: int) -> int:
    """The device as it appears in the namespace, up, with its address; ``home`` is where this process belongs."""
    if namespace:
        enter(namespace)
    try:
        fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH", TUN.encode(), _IFF_TUN_NO_PI))
        run("ip", "addr", "add", f"{address}/24", "dev", TUN)
        run("ip", "link", "set", TUN, "mtu", str(MTU_BYTES), "txqueuelen", "1000", "up")
    finally:
        if namespace and ctypes.CDLL(None, use_errno=True).setns(home, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns back")
    return fd


def forward(ends: dict[bytes, End], delay_s: float) -> None:
    """For ever."""
    poller = select.epoll()
    by_fd = {end.fd: end for end in ends.values()}
    for fd in by_fd:
        poller.register(fd, select.EPOLLIN)
    due_s: float | None = None
    while True:
        timeout_s = -1.0 if due_s is None else max(0.0, due_s - time.monotonic())
        for fd, _ in poller.poll(timeout_s):
            _take(fd, ends, delay_s)
        now_s, due_s = time.monotonic(), None
        for end in by_fd.values():
            while end.queue and end.queue[0][0] <= now_s:
                _give(end, end.queue.popleft()[1])
            if end.queue and (due_s is None or end.queue[0][0] < due_s):
                due_s = end.queue[0][0]


def _take(fd: int, ends: dict[bytes, End], delay_s: float) -> None:
    """Everything that has come from one end, into the queues of the others."""
    for _ in range(64):
        try:
            packet = os.read(fd, MTU_BYTES + 64)
        except BlockingIOError:
            return
        to = ends.get(packet[16:20]) if packet[0] >> 4 == 4 else None
        if to is None:
            continue
        now_s = time.monotonic()
        at_s = now_s
        if to.rate is not None:
            at_s = max(now_s, to.free_at_s)
            if at_s - now_s > QUEUE_S:
                to.dropped += 1
                continue
            to.free_at_s = at_s = at_s + len(packet) / to.rate
        to.queue.append((at_s + delay_s, packet))


def _give(end: End, packet: bytes) -> None:
    try:
        os.write(end.fd, packet)
    except (BlockingIOError, OSError):
        end.dropped += 1


def main(arguments: list[str]) -> int:
    delay_s, rate, *named = arguments
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    ends: dict[bytes, End] = {}
    for text in named:
        name, address, *free = text.split("=")
        fd = open_tun(name, address, home)
        ends[socket.inet_aton(address)] = End(fd, None if free else float(rate))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    forward(ends, float(delay_s))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
