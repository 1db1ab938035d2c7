"""A validator's scores are anybody's: a live book, one resumed from dumps, and one recomputed from the records agree to the bit."""

from __future__ import annotations

import random
from pathlib import Path

import journal_cases
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from journal_cases import OFTEN, SEEDS, Rig, records_of
from score_cases import Owner, judged

from subnet.run import events as ev
from subnet.score.book import RunBook
from subnet.score.policy import ScorePolicy
from subnet.score.recompute import combined, recompute


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(SEEDS), st.integers(0, 2**32), st.floats(10.0, 1e5), st.floats(0.0, 1.0), st.floats(0.0, 5000.0))
def test_live_resumed_and_recomputed_scores_are_equal_to_the_bit(
    seed: int, noise: int, half_life_s: float, undecided_pay: float, later_s: float
):
    rng = random.Random(noise)
    records = judged(records_of(seed), rng)
    policy = ScorePolicy(half_life_s=half_life_s, undecided_pay=undecided_pay)
    now_s = records[-1].time_ns / 1e9 + later_s
    live, resumed = RunBook(policy), RunBook(policy)
    for record in records:
        live.note(record)
        resumed.note(record)
        if rng.random() < 0.02:
            data = resumed.dump()
            resumed = RunBook(policy)
            resumed.load(data)
            resumed.tallies(now_s)  # looking changes nothing
    scores = recompute(records, policy, now_s)
    assert combined([live], policy, now_s) == scores
    assert combined([resumed], policy, now_s) == scores
    assert resumed.dump() == live.dump()
    assert scores, "nobody has a score: the journal tells nothing"
    assert sum(score.total for score in scores.values()) == pytest.approx(1.0) or all(
        score.worth == 0 for score in scores.values()
    )
    for score in scores.values():
        assert 0.0 <= score.total <= 1.0
        assert score.work >= 0.0
        assert all(0.0 <= term <= 1.0 for term in (score.uptime, score.deadlines, score.audits, score.reliability))


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(SEEDS), st.integers(0, 2**32), st.floats(50.0, 1e4))
def test_work_is_the_sum_over_seals_that_the_formula_says(seed: int, noise: int, half_life_s: float):
    """Of journals without audits: straight from the seals, without a book."""
    rng = random.Random(noise)
    time_ns, records = 10**18, list[ev.Record]()
    for record in records_of(seed):
        time_ns += rng.randrange(0, 10**9)
        records.append(msgspec.structs.replace(record, time_ns=time_ns))
    now_s = time_ns / 1e9
    planned = next(r.event for r in records if isinstance(r.event, ev.RunPlanned))
    tokens = planned.config.pipeline.microbatch_rows * planned.config.data.sequence_length
    last = len(planned.cuts) - 1
    expected: dict[str, float] = {}
    for record in records:
        if isinstance(record.event, ev.StageSealed):
            for entry in record.event.entries:
                units = 1 + (entry.stage == 0) + (entry.stage == last)
                flops = units * tokens * len(entry.microbatches)
                faded = flops * 2 ** (-(now_s - record.time_ns / 1e9) / half_life_s)
                expected[entry.member.hotkey] = expected.get(entry.member.hotkey, 0.0) + faded
    scores = recompute(records, ScorePolicy(half_life_s=half_life_s), now_s)
    for hotkey, work in expected.items():
        assert scores[hotkey].work == pytest.approx(work, rel=1e-9)
    assert {hotkey for hotkey, score in scores.items() if score.work} == {h for h, work in expected.items() if work}


async def test_a_restarted_validator_has_the_scores_that_the_journal_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Whether its journal begins with record 0 or with a copy; what it has folded before the copy is gone."""
    monkeypatch.setattr(journal_cases, "Counter", Owner)
    rig = Rig(tmp_path / "journal.db", copies=OFTEN)
    records, from_copy = records_of(44), 0
    for first in range(0, len(records), 20):
        rig.clock.advance(77.7)
        await rig.emit(records[first : first + 20])
        again = Rig(rig.copy_files(tmp_path / f"at{first}"))
        all_seen, seen = rig.counter.seen, again.counter.seen
        from_copy += len(seen) < len(all_seen)
        now_s = rig.clock.wall_ns() / 1e9 + 5.0
        scores = recompute(all_seen, ScorePolicy(), now_s)
        assert combined([rig.counter.book], ScorePolicy(), now_s) == scores
        assert combined([again.counter.book], ScorePolicy(), now_s) == scores
        again.close()
    assert from_copy, "no journal began with a copy"
    rig.close()
