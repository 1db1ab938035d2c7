"""A small process without torch that tells the validator that the miner lives, even while its interpreter lock is taken.

It shares one page with the main process (a counter of event-loop turns) and holds one end of a pipe: end-of-file means that
the main process is dead, which it reports at once. Start it before any thread or event loop exists.
"""

from __future__ import annotations

import http.client
import mmap
import os
import select
import signal
import struct
import time
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from subnet.protocol.messages import Heartbeat
from subnet.protocol.signing import Signer
from subnet.words import PROTOCOL_VERSION

INTERVAL_S = 1.0
REQUEST_S = 1.5
"""Connecting and answering each; a validator that was only slow has the heartbeat all the same."""
LAST_WORDS_TRIES = 5
LIMIT_ANSWER_BYTES = 4096


class Target(msgspec.Struct, frozen=True):
    """Where heartbeats go and what they say."""

    url: str
    receiver: str
    boot: str
    clock_offset_ns: int
    peak_flops_per_s: float = 0.0


@dataclass
class HeartbeatHandle:
    """The main process's side."""

    pid: int
    _pipe: int
    _page: mmap.mmap

    def aim(self, target: Target) -> None:
        """Start sending, or send elsewhere (after a rejoin)."""
        os.write(self._pipe, msgspec.json.encode(target) + b"\n")

    def tick(self, count: int) -> None:
        self._page[:8] = struct.pack("<Q", count)

    def stop(self) -> None:
        """End it without a death report."""
        try:
            os.kill(self.pid, signal.SIGTERM)
            os.waitpid(self.pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass
        os.close(self._pipe)
        self._page.close()


def start_heartbeat(signer: Signer) -> HeartbeatHandle:
    """Fork the heartbeat process. The caller must still be single-threaded."""
    page = mmap.mmap(-1, 8)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(writer)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            _beat_forever(signer, reader, page)
            code = 0
        finally:
            os._exit(code)
    os.close(reader)
    os.set_inheritable(writer, False)
    return HeartbeatHandle(pid, writer, page)


def _beat_forever(signer: Signer, reader: int, page: mmap.mmap) -> None:
    target: Target | None = None
    pending, line = b"", Line()
    due = 0.0
    while True:
        wait_s = max(0.0, due - time.monotonic()) if target else None
        readable, _, _ = select.select([reader], [], [], wait_s)
        if readable:
            chunk = os.read(reader, 65536)
            if not chunk:
                if target is not None:
                    _last_words(signer, target)
                return
            *lines, pending = (pending + chunk).split(b"\n")
            for told in lines:
                target, due = msgspec.json.decode(told, type=Target), 0.0
        if target is not None and time.monotonic() >= due:
            due = time.monotonic() + INTERVAL_S
            _send(signer, target, line, ticks=struct.unpack("<Q", page[:8])[0])


def _last_words(signer: Signer, target: Target) -> None:
    """Nobody else will say it; where the validator doesn't answer, it learns it from silence."""
    for number in range(LAST_WORDS_TRIES):
        if _send(signer, target, Line(), ticks=0, suspect="the main process died"):
            return
        time.sleep(0.1 * 2**number)


class Line:
    """The connection to one validator, kept between two beats: a handshake a second is dear, over TLS above all."""

    def __init__(self) -> None:
        self._to: tuple[str, str, int | None] | None = None
        self._connection: http.client.HTTPConnection | None = None

    def post(self, url: str, path: str, request: Callable[[], tuple[bytes, dict[str, str]]]) -> bool:
        """Whether it was answered. A kept connection that the other side has closed meanwhile is made anew, once, and the
        request with it: it may not be sent twice as it is."""
        parts = urllib.parse.urlsplit(url)
        to = (parts.scheme, parts.hostname or "", parts.port)
        if to != self._to:
            self.close()
        self._to = to
        for kept in (True, False) if self._connection is not None else (False,):
            body, headers = request()
            try:
                self._exchange(path, body, headers)
                return True
            except TimeoutError:
                self.close()
                return False
            except (OSError, http.client.HTTPException):
                self.close()
                if not kept:
                    return False
        return False

    def _exchange(self, path: str, body: bytes, headers: dict[str, str]) -> None:
        if self._connection is None:
            assert self._to is not None  # post has set it
            scheme, host, port = self._to
            kind = http.client.HTTPSConnection if scheme == "https" else http.client.HTTPConnection
            self._connection = kind(host, port, timeout=REQUEST_S)
        self._connection.request("POST", path, body=body, headers=headers)
        answer = self._connection.getresponse()
        if len(answer.read(LIMIT_ANSWER_BYTES)) == LIMIT_ANSWER_BYTES or answer.will_close:
            self.close()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _send(signer: Signer, target: Target, line: Line, *, ticks: int, suspect: str = "") -> bool:
    """One heartbeat, and whether it was answered; a failure is what silence means to the validator, so nobody is told."""
    path = "/v1/heartbeat"

    def request() -> tuple[bytes, dict[str, str]]:
        beat = Heartbeat(PROTOCOL_VERSION, target.boot, ticks, suspect, target.peak_flops_per_s)
        body, wall_ns = msgspec.msgpack.encode(beat), time.time_ns() + target.clock_offset_ns
        headers = signer.sign_request(method="POST", target=path, body=body, receiver=target.receiver, wall_ns=wall_ns)
        return body, {**headers, "Content-Type": "application/msgpack"}

    return line.post(target.url, path, request)
