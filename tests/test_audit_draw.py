"""Draws are what the documented hashes say, as often as the rate says, and independent of who asks when."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_cases import folded

from subnet.audit import draw
from subnet.audit.ledger import WorkLedger
from subnet.errors import InputError
from subnet.run import events as ev
from subnet.run.config import NO_AUDITS, AuditSection

AUDIT = AuditSection(rate=0.03, before_seal="probation")


def test_the_seed_and_the_unit_are_the_documented_hashes():
    parts = b"".join(len(p).to_bytes(4, "little") + p for p in (b"run", b"1", b"7", b"0xabc", b"5Val"))
    seed = blake3(b"iota/audit/1\0" + parts).digest()
    assert draw.seed("run", 1, 7, "0xabc", "5Val") == seed
    digest = blake3(seed + (-1).to_bytes(8, "little", signed=True) + (2).to_bytes(4, "little") + b"5Miner").digest()
    assert draw.unit(seed, -1, 2, "5Miner") == (int.from_bytes(digest[:8], "little") >> 11) / 2**53


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 9), st.integers(0, 99), st.text(max_size=8), st.text(max_size=8), st.text(max_size=8))
def test_whatever_changes_changes_the_seed(branch: int, window: int, run: str, block: str, hotkey: str):
    seed = draw.seed(run, branch, window, block, hotkey)
    others = [
        draw.seed(run + "x", branch, window, block, hotkey),
        draw.seed(run, branch + 1, window, block, hotkey),
        draw.seed(run, branch, window + 1, block, hotkey),
        draw.seed(run, branch, window, block + "x", hotkey),
        draw.seed(run, branch, window, block, hotkey + "x"),
        draw.seed(run, branch, window, hotkey, block) if hotkey != block else b"",
    ]
    assert seed not in others
    assert 0.0 <= draw.unit(seed, window, branch, hotkey) < 1.0


def test_units_are_uniform_and_independent():
    seed = draw.seed("run", 0, 0, "block", "validator")
    units = [draw.unit(seed, step, stage, f"hot{h}") for step in range(50) for stage in range(4) for h in range(25)]
    count = len(units)
    for edge in (0.03, 0.25, 0.5, 0.97):
        share = sum(u < edge for u in units) / count
        assert abs(share - edge) < 5 * math.sqrt(edge * (1 - edge) / count)
    pairs = sum(a < 0.5 and b < 0.5 for a, b in itertools.pairwise(units)) / count
    assert abs(pairs - 0.25) < 0.03


def test_rates():
    assert draw.rate_of(AUDIT) == 0.03
    assert draw.rate_of(AUDIT, unchecked=True) == draw.rate_of(AUDIT, marked=True) == pytest.approx(0.12)
    assert draw.rate_of(AUDIT, unchecked=True, marked=True) == pytest.approx(0.48)
    assert draw.rate_of(AuditSection(rate=0.1, before_seal="probation"), unchecked=True, marked=True) == 1.0
    assert draw.rate_of(NO_AUDITS) == 0.0


def drawn_of(audit: AuditSection, *, marked: bool = False, passed: bool = False, skip: bool = True, seed: int = 44):
    ledger = WorkLedger()
    state = folded(seed, ledger, audit)
    records = [record for step in range(-1, state.next_step) for record in ledger.partials(step)]
    if marked:
        state.audits.marks = {record.member.hotkey: 1 for record in records}
    if passed:
        for number, record in enumerate(records, 1):
            opened = ev.AuditOpened(number, record.step, record.stage, 0, (record.member,), state.leader, (), (1,))
            ledger.note(state, opened)
            ledger.note(state, ev.AuditClosed(number, passed=(record.member,)))
    window = ev.WindowClosed(0, -1, state.next_step - 1, 9)
    return records, draw.drawn(state, ledger, window, "hash", "validator", skip_passed=skip), state


def test_a_draw_is_every_partial_whose_unit_is_below_its_rate():
    for marked in (False, True):
        audit = AuditSection(rate=0.2, before_seal="probation", window_steps=8, open_windows=1)
        records, draws, _ = drawn_of(audit, marked=marked)
        seed = draw.seed("toy", 0, 0, "hash", "validator")
        expected = {
            (r.step, r.stage, r.member)
            for r in records
            if draw.unit(seed, r.step, r.stage, r.member.hotkey)
            < min(1.0, 0.2 * (4 if r.unchecked else 1) * (4 if marked else 1))
        }
        assert {(d.step, d.stage, member) for d in draws for member in d.members} == expected
        assert expected
        for found in draws:
            own = [r for r in records if (r.step, r.stage) == (found.step, found.stage)]
            assert found.whole == (len(found.members) == len(own))
        assert [(d.step, d.stage) for d in draws] == sorted((d.step, d.stage) for d in draws)


def test_what_passed_before_its_seal_is_left_alone_unless_one_doesnt_believe_it():
    audit = AuditSection(rate=1.0, before_seal="probation", window_steps=8, open_windows=1)
    records, draws, _ = drawn_of(audit)
    assert sum(len(found.members) for found in draws) == len(records)
    assert all(found.whole for found in draws)
    assert drawn_of(audit, passed=True)[1] == ()
    assert drawn_of(audit, passed=True, skip=False)[1] == draws


# --- theory ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rate", "steps", "share"), [(0.03, 50, 1.0), (0.03, 200, 0.2), (0.12, 50, 0.05), (1.0, 3, 0.2)]
)
def test_the_formula_is_what_happens(rate: float, steps: int, share: float):
    rng, caught, runs = random.Random(5), 0, 4000
    for _ in range(runs):
        caught += any(rng.random() < share and rng.random() < rate for _ in range(steps))
    expected = draw.catch_probability(rate, steps, share)
    assert abs(caught / runs - expected) < 5 * math.sqrt(max(expected * (1 - expected), 1e-4) / runs)


def test_probation_is_an_audit_of_everything():
    audit = AuditSection(rate=0.03, before_seal="probation", probation_items=16)
    assert draw.catch_with_probation(audit, 3, 1.0, 4) == 1.0
    assert draw.catch_with_probation(audit, 3, 0.05, 4) == pytest.approx(1 - 0.95**12)
    later = draw.catch_with_probation(audit, 104, 0.05, 4)
    wrong = 1 - 0.95**4
    assert later == pytest.approx(1 - (1 - wrong) ** 4 * (1 - 0.03 * wrong) ** 100)
    everything = AuditSection(rate=0.0, before_seal="all")
    assert draw.catch_with_probation(everything, 10, 0.05, 4) == pytest.approx(1 - 0.95**40)


def test_the_cost_is_the_rate_times_what_it_is_multiplied_by():
    assert draw.expected_cost(0.03) == 0.03
    assert draw.expected_cost(0.03, [(0.75, 1.0), (0.25, 4.0)]) == pytest.approx(0.0525)
    assert draw.expected_cost(0.5, [(1.0, 16.0)]) == 1.0


@pytest.mark.parametrize("bad", [-0.1, 1.1, float("nan")])
def test_shares_are_shares(bad: float):
    for call in (
        lambda: draw.catch_probability(bad, 3, 0.5),
        lambda: draw.catch_probability(0.5, 3, bad),
        lambda: draw.wrong_partials(bad, 3),
        lambda: draw.expected_cost(bad),
    ):
        with pytest.raises(InputError):
            call()
