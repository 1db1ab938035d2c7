"""A journal is its leader's to write: whatever it says under its signature, a follower refuses it or folds it, and goes on."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from follow_cases import Audited, Published, block_hash
from lead_cases import Keys

from subnet.errors import Corrupt, IotaError
from subnet.protocol import wire
from subnet.run import events as ev
from subnet.timing import ManualClock
from validator.follow_run import FollowedRun
from validator.scoring import ScoreBook

ODD = (
    -1,
    0,
    1,
    3,
    1 << 40,
    -(1 << 40),
    2**63 - 1,
    "",
    "ab" * 32,
    "nobody",
    True,
    0.5,
    float("nan"),
    1e308,
    [],
    {},
    None,
)
SEEDS = (5, 36)
TRIES = 150


def mutated(rng: random.Random, value: Any) -> Any:
    """The same with one leaf replaced, or a list cut, doubled or emptied."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        return {**value, key: mutated(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.8:
        at = rng.randrange(len(value))
        return [*value[:at], mutated(rng, value[at]), *value[at + 1 :]]
    if isinstance(value, list) and value:
        return rng.choice([value[:-1], [*value, value[-1]], [], value[::-1]])
    return rng.choice(ODD)


def changed(rng: random.Random, data: bytes) -> bytes | None:
    """Another record of the same number that decodes."""
    raw = msgspec.msgpack.decode(data)
    for _ in range(40):
        number, time_ns, event = raw
        other = msgspec.msgpack.encode([number, time_ns, mutated(rng, event)])
        try:
            record = wire.decode(other, ev.Record, limit_bytes=1 << 24, what="record")
        except IotaError:
            continue
        if (again := wire.encode(record)) != data:
            return again
    return None


@pytest.mark.parametrize("seed", SEEDS)
def test_no_record_ends_the_follower(tmp_path: Path, seed: int) -> None:
    records = [wire.encode(record) for record in Audited(seed).records]
    published = Published(Keys(), Audited(seed).records)
    rng, folded, refused = random.Random(seed), 0, 0
    run, copy = FollowedRun("toy-00000001", tmp_path, ScoreBook().run("toy-00000001"), ManualClock()), b""
    for segment in published.segments:
        copy = run.copy()
        for _ in range(max(1, TRIES // len(published.segments))):
            at = rng.randrange(segment.first, segment.first + len(segment.records))
            other = changed(rng, records[at])
            if other is None:
                continue
            trial = another(tmp_path, copy)
            try:
                for number, data in enumerate(segment.records, segment.first):
                    trial.folded._fold(other if number == at else data, trial._seen)
                for closed in trial.promises.due():
                    ledger = trial.watch.audits.ledger
                    trial.promises.undrawn(trial.state, ledger, closed, block_hash(closed.event.block))
                folded += 1
            except Corrupt:
                refused += 1
            trial.view()
        run.take(segment)
    assert folded > 20
    assert refused > 20


def another(directory: Path, copy: bytes) -> FollowedRun:
    """The same run in a process of its own, its findings thrown away."""
    run = FollowedRun(
        "toy-00000001", directory / "trial", ScoreBook(leader_audits=False).run("toy-00000001"), ManualClock()
    )
    run.breaches.append = run.breaches.items.append  # type: ignore[method-assign]
    if copy:
        run.write_copy(copy)
        run.load_copy()
    return run
