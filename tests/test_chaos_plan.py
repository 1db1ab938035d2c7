"""A plan is a function of its seed; counted plans have exactly the kinds asked for; durations and kinds are checked."""

from __future__ import annotations

import statistics
from collections import Counter
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iota.chaos.command import parse_seconds
from iota.chaos.plan import (
    NETWORK_KINDS,
    PROCESS,
    Disruption,
    Kind,
    Ranges,
    describe,
    make_plan,
    make_plan_counted,
    needs_network,
    parse_kinds,
)
from subnet.errors import ConfigError

ALL = tuple(Kind)
PROCESSES = tuple(kind for kind in Kind if kind not in NETWORK_KINDS)


def test_a_plan_is_a_function_of_its_seed_and_nothing_else() -> None:
    plan = make_plan(7, 600, 20, ALL)
    assert plan == make_plan(7, 600, 20, ALL)
    assert plan != make_plan(8, 600, 20, ALL)
    assert make_plan(7, 300, 20, ALL) == tuple(d for d in plan if d.at_s < 300)  # a longer one goes on as the shorter
    assert msgspec.json.decode(msgspec.json.encode(plan), type=tuple[Disruption, ...]) == plan
    assert (plan[0].kind, round(plan[0].at_s, 3)) == (Kind.CORRUPT, 52.934)  # a seed in a report stays good


def test_times_are_those_of_a_poisson_process() -> None:
    plan = make_plan(1, 20_000, 10, ALL)
    gaps = [b.at_s - a.at_s for a, b in pairwise(plan)]
    assert statistics.mean(gaps) == pytest.approx(10, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(10, rel=0.15)
    assert [d.number for d in plan] == list(range(len(plan)))
    counts = Counter(d.kind for d in plan)
    assert set(counts) == set(ALL)
    assert min(counts.values()) > 0.6 * len(plan) / len(ALL)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10_000), st.booleans())
def test_every_number_is_in_its_range_and_every_kind_can_be_described(seed: int, network: bool) -> None:
    ranges = Ranges()
    for d in make_plan(seed, 300, 5, ALL if network else PROCESSES, network=network):
        assert 0 <= d.choice < 1
        if d.kind is Kind.PAUSE:
            assert 0.5 <= d.for_s <= 15
        if d.kind in (Kind.KILL, Kind.PREEMPT, Kind.REJOIN):
            assert ranges.back[0] <= d.back_s <= ranges.back[1]
        if d.kind is Kind.PREEMPT:
            assert d.notice_s == 1
        if d.kind is Kind.PARTITION:
            assert d.link in ("validator", "peers", "both")
            assert d.mode in ("reset", "blackhole")
        if d.kind is Kind.CORRUPT:
            assert d.num_bytes >= 1
            assert d.every_bytes >= 1
        if d.kind is Kind.SLOW:
            assert (d.link == PROCESS) == (d.share < 1)
            assert network or d.link == PROCESS
        assert describe(d) or d.kind in (Kind.JOIN, Kind.LEAVE)


def test_which_plans_need_proxies() -> None:
    assert not needs_network(make_plan(3, 1000, 5, PROCESSES, network=False))
    assert not needs_network(make_plan(3, 1000, 5, (Kind.KILL, Kind.PAUSE, Kind.VALIDATOR_KILL)))
    assert needs_network(make_plan(3, 1000, 5, (Kind.STORE_OUTAGE,)))
    with pytest.raises(ConfigError, match="partition"):
        make_plan(3, 1000, 5, (Kind.KILL, Kind.PARTITION), network=False)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10_000), st.integers(4, 90), st.integers(0, 3))
def test_a_counted_plan_has_exactly_what_was_asked_for(seed: int, num: int, validator_kills: int) -> None:
    kinds = (Kind.KILL, Kind.PREEMPT, Kind.PAUSE, Kind.REJOIN)
    fixed = {Kind.VALIDATOR_KILL: validator_kills}
    total = num + validator_kills
    plan = make_plan_counted(seed, total, kinds, num_steps=100, fixed=fixed)
    counts = Counter(d.kind for d in plan)
    assert len(plan) == total
    assert counts[Kind.VALIDATOR_KILL] == validator_kills
    assert all(num // 4 <= counts[kind] <= num // 4 + 1 for kind in kinds)
    steps = [d.at_step for d in plan]
    assert steps == sorted(steps)  # pyright: ignore
    assert all(step is not None and 0 <= step < 100 for step in steps)
    timed = make_plan_counted(seed, total, kinds, span_s=600, fixed=fixed)
    assert [d.kind for d in timed] == [d.kind for d in plan]
    assert all(600 * d.number / total <= d.at_s <= 600 * (d.number + 1) / total for d in timed)


def test_counted_plans_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="must occur"):
        make_plan_counted(1, 2, (Kind.KILL, Kind.PAUSE, Kind.JOIN), span_s=10)
    with pytest.raises(ConfigError, match="must occur"):
        make_plan_counted(1, 2, (), span_s=10, fixed={Kind.KILL: 3})
    with pytest.raises(ConfigError, match="seconds or over steps"):
        make_plan_counted(1, 2, (Kind.KILL,))
    with pytest.raises(ConfigError, match="seconds or over steps"):
        make_plan_counted(1, 2, (Kind.KILL,), span_s=1, num_steps=1)


def test_kinds_and_times_as_a_person_writes_them() -> None:
    assert parse_kinds(" kill, pause,kill,store-outage ") == (Kind.KILL, Kind.PAUSE, Kind.STORE_OUTAGE)
    for text in ("", "kill,nap"):
        with pytest.raises(ConfigError, match="store-outage"):
            parse_kinds(text)
    assert [parse_seconds(text, "--x") for text in ("20s", "10m", "1.5h", "300ms", "7")] == [20, 600, 5400, 0.3, 7]
    for text in ("", "0s", "-1s", "5d", "s", "1e3"):
        with pytest.raises(ConfigError, match="is no time"):
            parse_seconds(text, "--x")


@pytest.mark.parametrize(("duration_s", "mtbf_s"), [(10, 0), (10, -1), (-1, 1), (float("inf"), 1), (1e9, 1)])
def test_plans_without_end_are_refused(duration_s: float, mtbf_s: float) -> None:
    with pytest.raises(ConfigError):
        make_plan(1, duration_s, mtbf_s, ALL)
    with pytest.raises(ConfigError, match="pause"):
        Ranges(pause=(2.0, 1.0))
