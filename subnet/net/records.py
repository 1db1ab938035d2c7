"""What travels on a connection once both sides are proven: records of a 6-byte head (kind, priority, length) and a payload.

    START    8-byte length of the body, header     a frame of this priority begins; the one before it has ended
    DATA     bytes                                 the next ones of the body; other priorities' records may come between
    CANCEL   -                                     the frame that has begun is given up by its sender
    WINDOW   8-byte bytes, 4-byte frames           how much the other side may have under way in this priority
    HANDLED  8-byte bytes, 4-byte frames           so much of it is handled, and free again
    REFUSED  a refusal (msgpack)                   a frame of this priority was refused

A frame may begin when nothing of its priority is under way, or when it fits into the window beside what is.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

import msgspec

from subnet.errors import InputError, Refusal
from subnet.net.base import Priority
from subnet.protocol import wire
from subnet.protocol.wire import BODY_LENGTH

HEAD = struct.Struct(">BBI")
_AMOUNT = struct.Struct(">QI")
MAX_DATA_BYTES = 1 << 20
MAX_REFUSED_BYTES = 2048
_MAX_REASON = 300


class Kind(IntEnum):
    START = 1
    DATA = 2
    CANCEL = 3
    WINDOW = 4
    HANDLED = 5
    REFUSED = 6


_KINDS = {int(kind): kind for kind in Kind}
_PRIORITIES = {int(priority): priority for priority in Priority}


class OverCredit(InputError):
    """The peer sent more than it was allowed to have under way."""

    code = "over_credit"


@dataclass
class Amount:
    """Bytes (headers and bodies) and frames."""

    num_bytes: int = 0
    num_frames: int = 0

    def admits(self, under_way: Amount, size_bytes: int) -> bool:
        """Whether a frame of so many bytes fits into this window; nothing does before it is announced."""
        if not self.num_frames:
            return False
        if not under_way.num_frames:
            return True
        return under_way.num_bytes + size_bytes <= self.num_bytes and under_way.num_frames < self.num_frames

    def add(self, num_bytes: int, num_frames: int = 1) -> None:
        self.num_bytes += num_bytes
        self.num_frames += num_frames

    def clear(self) -> None:
        self.num_bytes = self.num_frames = 0


def head(kind: Kind, priority: Priority, num_bytes: int) -> bytes:
    return HEAD.pack(kind, priority, num_bytes)


def parse_head(data: bytes | bytearray, start: int) -> tuple[Kind, Priority, int]:
    kind, priority, num_bytes = HEAD.unpack_from(data, start)
    if kind not in _KINDS or priority not in _PRIORITIES:
        raise InputError(f"a record of kind {kind} and priority {priority}")
    return _KINDS[kind], _PRIORITIES[priority], num_bytes


def payload_limit(kind: Kind, header_bytes: int) -> int:
    if kind is Kind.START:
        return BODY_LENGTH.size + header_bytes
    return {Kind.DATA: MAX_DATA_BYTES, Kind.CANCEL: 0, Kind.REFUSED: MAX_REFUSED_BYTES}.get(kind, _AMOUNT.size)


def start(priority: Priority, header: bytes, body_bytes: int) -> bytes:
    return head(Kind.START, priority, BODY_LENGTH.size + len(header)) + BODY_LENGTH.pack(body_bytes) + header


def parse_start(payload: bytes) -> tuple[bytes, int]:
    """Header, and length of the body."""
    if len(payload) < BODY_LENGTH.size:
        raise InputError(f"the beginning of a frame in {len(payload)} bytes")
    return payload[BODY_LENGTH.size :], BODY_LENGTH.unpack_from(payload)[0]


def amount(kind: Kind, priority: Priority, value: Amount) -> bytes:
    return head(kind, priority, _AMOUNT.size) + _AMOUNT.pack(value.num_bytes, value.num_frames)


def parse_amount(payload: bytes) -> Amount:
    if len(payload) != _AMOUNT.size:
        raise InputError(f"an amount of credit in {len(payload)} bytes")
    return Amount(*_AMOUNT.unpack(payload))


def refused(priority: Priority, refusal: Refusal) -> bytes:
    short = msgspec.structs.replace(refusal, reason=refusal.reason[:_MAX_REASON], hint=refusal.hint[:_MAX_REASON])
    data = wire.encode(short)
    return head(Kind.REFUSED, priority, len(data)) + data
