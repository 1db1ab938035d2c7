"""A run's whole journal from the folder of its log store: the segments, in order, whatever the validator has compacted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from subnet.protocol import wire
from subnet.run.events import Record
from validator.log_publisher import LIMIT_SEGMENT_BYTES, SegmentFile

_decoder = msgspec.msgpack.Decoder(Record)


def has_run(store: Path) -> bool:
    """Whether anything of a run's journal is in this store."""
    return any((store / "named").glob("runs%*%journal%*"))


def run_records(store: Path) -> Iterator[Record]:
    """Records of the only run in this store."""
    segments = sorted((store / "named").glob("runs%*%journal%*"))
    if len({path.name.split("%")[1] for path in segments}) != 1:
        raise ValueError(f"{store} holds {len(segments)} segments, and not those of one run")
    for path in segments:
        segment = wire.decode(path.read_bytes(), SegmentFile, limit_bytes=LIMIT_SEGMENT_BYTES, what=str(path))
        for data in segment.records:
            yield _decoder.decode(data)
