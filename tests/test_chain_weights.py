"""A validator's weights over time: commits are watched until revealed, and many tempos alone with a bad chain do no harm."""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from loguru import logger
from loopback.worlds import MINER, OTHER, VALIDATOR, Worlds, genesis

from subnet.chain.base import WeightsReceipt
from subnet.chain.refusals import ChainRefused
from subnet.errors import DeadlinePassed, Unreachable
from validator.scoring import Score
from validator.weights import MAX_WAITING_COMMITS, CommitBook, WeightPolicy, WeightSetter, WeightsReport


@pytest.fixture
async def worlds(tmp_path: Path) -> AsyncIterator[Worlds]:
    made = Worlds(tmp_path)
    yield made
    await made.close()


@pytest.fixture
def warnings() -> Any:
    lines: list[str] = []
    sink = logger.add(lambda message: lines.append(message.record["message"]), level="INFO")
    yield lines
    logger.remove(sink)


def scores() -> dict[str, Score]:
    return {
        miner.hotkey: Score(
            hotkey=miner.hotkey, registered_at_block=0, total=total, work=total, sealed_work=total, last_sealed_s=0.0
        )
        for miner, total in ((MINER, 0.25), (OTHER, 0.75))
    }


def receipt(block: int, uid: int, *, sealed: bool = True) -> WeightsReceipt:
    return WeightsReceipt(block=block, uids=(uid,), values=(65535,), reveal_round=block + 20 if sealed else None)


def test_commits_wait_for_their_reveal_and_it_is_said_once_when_none_comes(warnings: list[str]):
    book = CommitBook()
    for block in range(MAX_WAITING_COMMITS + 3):
        book.look(None)
        book.note(receipt(block, block))
    assert len(book.waiting) == MAX_WAITING_COMMITS
    assert [line for line in warnings if "revealed none of the last 4" in line] == [warnings[0]]
    second = book.waiting[1]
    book.look(WeightsReceipt(block=9, uids=second.uids, values=second.values))
    assert book.waiting[0].block == second.block + 1, "older commits are done with"
    assert "reveals committed weights again" in warnings[-1]
    book.note(receipt(20, 1, sealed=False))
    assert book.waiting == []


async def test_weights_are_committed_tempo_by_tempo_and_revealed(worlds: Worlds):
    world = await worlds.make("local", genesis(commit_reveal=True, tempo=9))
    chain = world.chain()
    setter = WeightSetter(chain, 1, VALIDATOR.hotkey, scores)
    for number in range(3):
        report = await setter.attempt()
        assert report.status == "set", report
        assert report.reveal_round is not None
        assert "weights committed at block" in str(report)
        await world.advance(10)
        stored = await chain.weights(1, 1)
        assert stored is not None, f"revealed after tempo {number}"
        assert (stored.uids, stored.values) == ((2, 3), (21845, 65535))
    assert len(setter._commits.waiting) <= 1


class BadChain:
    """A chain that often refuses, breaks off, or says yes without storing; the rest is the real local chain."""

    def __init__(self, chain: Any, seed: int) -> None:
        self._chain, self._rng = chain, random.Random(seed)
        self.troubles: Counter[str] = Counter()

    def _trouble(self, call: str) -> None:
        kind = self._rng.choices(("none", "away", "late", "refused"), (70, 10, 5, 15))[0]
        if kind == "away":
            self.troubles[kind] += 1
            raise Unreachable(f"{call}: connection reset")
        if kind == "late":
            self.troubles[kind] += 1
            raise DeadlinePassed(f"{call}: no answer in time")
        if kind == "refused" and call == "set_weights":
            self.troubles[kind] += 1
            raise ChainRefused(self._rng.choice(["NeuronNoValidatorPermit", "RateLimitExceeded", "Dropped"]))

    def __getattr__(self, call: str) -> Any:
        real = getattr(self._chain, call)

        async def made(*args: Any, **kwargs: Any) -> Any:
            self._trouble(call)
            return await real(*args, **kwargs)

        return made


@pytest.mark.parametrize("tempos", [40, pytest.param(200, marks=pytest.mark.slow)])
async def test_many_tempos_alone_with_a_bad_chain(worlds: Worlds, warnings: list[str], tempos: int):
    """Every tempo's weights are set or the reason is there; no try comes sooner than it may; memory doesn't grow."""
    world = await worlds.make("local", genesis(tempo=9, weights_rate_limit=5))
    chain = BadChain(world.chain(), seed=7)
    reports: list[tuple[int, WeightsReport]] = []
    waits: list[float] = []
    objects: list[int] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        assert seconds >= 0.25, "never sooner than a block"
        await world.advance(max(1, round(seconds / 0.25)))
        if len(waits) % (tempos // 4) == 0:
            gc.collect()
            objects.append(len(gc.get_objects()))
        if world.state.block > tempos * 10:
            raise asyncio.CancelledError

    setter = WeightSetter(chain, 1, VALIDATOR.hotkey, scores, WeightPolicy(backoff_cap=3), sleep=sleep)  # type: ignore[arg-type]
    with pytest.raises(asyncio.CancelledError):
        await setter.run(lambda report: reports.append((world.state.block, report)))
    assert sum(chain.troubles.values()) > tempos / 10, "the chain was bad indeed"
    assert all(chain.troubles[kind] for kind in ("away", "late", "refused"))
    assert len(reports) <= 2 * tempos, "about one try per tempo"
    statuses = Counter(report.status for _, report in reports)
    assert statuses["set"] > tempos / 8, statuses
    assert all(report.code and report.reason for _, report in reports if report.status != "set")
    gaps = [later - sooner for (sooner, _), (later, _) in itertools.pairwise(reports)]
    assert max(gaps) <= 3 * 10 + 5, "never silent for longer than the back-off's cap"
    said = [line for line in warnings if line.startswith("weights ")]
    assert len(said) >= statuses["set"], "each success, and each new reason, is logged"
    kept = len(reports) * 4 + len(warnings) * 2  # what this test itself holds on to
    assert objects[-1] - objects[0] < 1000 + kept, objects
