"""Writes what waits for one peer, piece by piece: the most urgent that has credit, at the pace of the upload limit."""

from __future__ import annotations

from subnet.errors import Unreachable
from subnet.net import records
from subnet.net.frames import FrameConnection
from subnet.net.outgoing import OutgoingFrame
from subnet.net.peer import Peer
from subnet.net.rate import RateLimit
from subnet.net.records import Kind

_JOIN_BYTES = 16 << 10


async def write_next(peer: Peer, connection: FrameConnection, upload: RateLimit, *, stall_s: float) -> None:
    """Write one record of what is queued, or wait until there may be one; raises what ends the connection."""
    if peer.written_on is not connection:
        peer.queue.rewind()
        peer.written_on = connection
    queue, credit = peer.queue, connection.credit
    queue.changed.clear()
    frame = queue.next(credit)
    if frame is None:
        if connection.failure is not None:
            raise connection.failure
        await queue.changed.wait()
        return
    if not frame.dead:
        num_bytes = min(connection.piece_bytes, upload.piece_bytes, frame.body_bytes - frame.written_bytes)
        await upload.take(num_bytes if frame.begun or num_bytes <= _JOIN_BYTES else 0, frame.priority)
        frame = queue.next(credit)  # meanwhile something more urgent may have come
        if peer.live is not connection:
            raise connection.failure or Unreachable("the connection was replaced")
        if frame is None:
            return
        if not frame.dead:
            data, view = _record(peer, connection, frame, num_bytes)
            await connection.write_record(data, view, stall_s=stall_s)
            if frame.whole and frame.begun:
                queue.finish(frame)
            return
    queue.cancelled(frame, credit)
    await connection.write_record(records.head(Kind.CANCEL, frame.priority, 0), None, stall_s=stall_s)


def _record(
    peer: Peer, connection: FrameConnection, frame: OutgoingFrame, num_bytes: int
) -> tuple[bytes, memoryview | None]:
    """The frame's beginning, joined with a small body, or its next piece."""
    if frame.begun:
        view = frame.piece(num_bytes)
        return records.head(Kind.DATA, frame.priority, view.nbytes), view
    peer.queue.begin(frame, connection.credit)
    data = records.start(frame.priority, frame.header, frame.body_bytes)
    if not 0 < frame.body_bytes <= _JOIN_BYTES:
        return data, None
    parts = [data, records.head(Kind.DATA, frame.priority, frame.body_bytes)]
    while not frame.whole:
        parts.append(bytes(frame.piece(frame.body_bytes)))
    return b"".join(parts), None
