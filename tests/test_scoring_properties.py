"""Whatever is in a journal, scores are numbers; more verified work never costs; batches change nothing; splitting never pays."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from journal_cases import SEEDS, records_of
from score_cases import AUDITED, Journal, judged, member, planned

from subnet.run import events as ev
from subnet.score.accounts import MOST_FLOPS
from subnet.score.book import RunBook
from subnet.score.decay import half_power, half_power_lost, whole_power
from subnet.score.policy import BOUNDS, ScorePolicy
from subnet.score.recompute import combined, recompute
from subnet.score.score import Score, kept
from subnet.words import Commitment

EASY = settings(max_examples=25, deadline=None)
POLICIES = st.builds(
    ScorePolicy,
    half_life_s=st.floats(*BOUNDS["half_life_s"]),
    forget_after_half_lives=st.floats(*BOUNDS["forget_after_half_lives"]),
    uptime_prior_s=st.floats(*BOUNDS["uptime_prior_s"]),
    unproven_leases=st.floats(*BOUNDS["unproven_leases"]),
    audit_prior_partials=st.floats(*BOUNDS["audit_prior_partials"]),
    uptime_exponent=st.integers(0, 8),
    deadline_exponent=st.integers(0, 8),
    audit_exponent=st.integers(0, 8),
    undecided_pay=st.floats(0.0, 1.0),
)
ANY_FLOAT = st.floats(allow_nan=True, allow_infinity=True)


def numbers(score: Score) -> list[float]:
    return [value for value in msgspec.structs.astuple(score) if isinstance(value, int | float)]


# --- numbers -------------------------------------------------------------------------------------------------------


@EASY
@given(st.sampled_from(SEEDS), st.integers(0, 2**32), POLICIES, st.lists(ANY_FLOAT, min_size=3, max_size=3), ANY_FLOAT)
@example(5, 0, ScorePolicy(), [math.nan, math.inf, -1.0], 0.0)
@example(5, 0, ScorePolicy(half_life_s=1.0), [1.7e308, 1.7e308, 1.7e308], 0.0)
def test_scores_are_finite_and_not_negative(
    seed: int, noise: int, policy: ScorePolicy, flops: list[float], later_s: float
):
    """With any policy that is allowed, any FLOPs that a submission might name, at any time."""
    records = judged(records_of(seed), random.Random(noise), often=0.1)
    plan = records[0].event
    assert isinstance(plan, ev.RunPlanned)
    units = len(plan.unit_flops_per_token)
    strange = msgspec.structs.replace(plan, unit_flops_per_token=tuple((flops * units)[:units]))
    records[0] = msgspec.structs.replace(records[0], event=strange)
    now_s = records[-1].time_ns / 1e9 + (later_s if math.isfinite(later_s) else 0.0)
    scores = recompute(records, policy, now_s)
    assert scores
    for score in scores.values():
        assert all(math.isfinite(value) and value >= 0 for value in numbers(score)), score
        assert max(score.total, score.uptime, score.deadlines, score.audits, score.reliability) <= 1.0
    whole = math.fsum(score.total for score in scores.values())
    assert whole == pytest.approx(1.0) or all(score.worth == 0.0 for score in scores.values())


def test_flops_that_are_no_numbers_count_nothing_and_none_is_endless():
    book = RunBook()
    book.note(ev.Record(0, 0, planned()))
    for flops, expected in ((math.nan, 0.0), (-1.0, 0.0), (math.inf, MOST_FLOPS)):
        plan = msgspec.structs.replace(planned(), unit_flops_per_token=(flops,) * 4)
        book.note(ev.Record(0, 0, plan))
        assert set(book._accounts.data.stage_flops) == {expected}


# --- decay ---------------------------------------------------------------------------------------------------------


@given(st.floats(0.0, 1200.0))
@example(1.0 / 64.0)
@example(math.nextafter(1.0, 0.0))
def test_decay_is_two_to_the_minus_x(x: float):
    true = 2.0**-x
    assert half_power(x) == pytest.approx(true, rel=1e-15) if x < 1000 else half_power(x) == 0.0
    assert half_power_lost(x) == pytest.approx(-math.expm1(-x * math.log(2)), rel=2e-14)
    assert half_power(math.nextafter(x, math.inf)) <= half_power(x) <= 1.0


GOLDEN_POWERS = [
    "0x1.ddb680117ab11p-1",
    "0x1.0000000000000p-1",
    "0x1.6a09e667f3bcdp-2",
    "0x1.965fea53d6e3cp-1",
    "0x1.125fbee25066ap-30",
]
GOLDEN_LOST = "0x1.7d0fcb1062b8ap-31"


def test_decay_has_the_same_bits_as_on_every_other_machine():
    """The bits themselves: IEEE 754 leaves no choice. A machine that fails here has scores of its own."""
    assert [half_power(x).hex() for x in (0.1, 1.0, 1.5, 1 / 3, 29.9)] == GOLDEN_POWERS
    assert half_power_lost(1e-9).hex() == GOLDEN_LOST
    assert whole_power(0.7, 3).hex() == (0.7 * 0.7 * 0.7).hex()


# --- more work never costs -----------------------------------------------------------------------------------------

ITEMS = st.integers(1, 16)


def story(rng: random.Random, extra: int = 0, policy: ScorePolicy | None = None) -> Journal:
    """Some steps of two members with late leases, absences and audits; ``extra``: items that a seals besides, in one of them."""
    j = Journal(policy or ScorePolicy(half_life_s=300.0)).join("a").join("b")
    numbers = {"a": 1, "b": 1}
    steps = rng.randrange(2, 8)
    favoured = rng.randrange(steps)
    for step in range(steps):
        j.wait(rng.randrange(1, 200))
        shares = {member(name, numbers[name]): rng.randrange(1, 17) for name in "ab"}
        if step == favoured:
            shares[member("a", numbers["a"])] += extra
        for m in range(rng.randrange(3)):
            j.add(ev.Leased(step, 900 + m, 0, member("a", numbers["a"]), 1), ev.Revoking(step, 900 + m, 0, 1))
        j.seal(step, shares)
        kind = rng.choice(["passed", "passed", "failed", "undecided", ""])
        if kind and step != favoured:
            j.audit(step, **{kind: (member("a", numbers["a"]),)})
        j.end_step(step)
        if rng.random() < 0.3:
            j.add(ev.Gone(member("a", numbers["a"]), rng.choice(["lost", "left"]))).wait(rng.randrange(300))
            numbers["a"] += 1
            j.join("a", number=numbers["a"])
    return j


@EASY
@given(st.integers(0, 2**32), ITEMS, st.floats(0.0, 1e4))
def test_more_verified_work_never_costs(seed: int, extra: int, later_s: float):
    less = story(random.Random(seed)).scores(later_s)
    more = story(random.Random(seed), extra).scores(later_s)
    assert more["a"].work > less["a"].work
    assert more["a"].worth > less["a"].worth
    assert more["a"].total >= less["a"].total
    assert more["b"].worth == less["b"].worth


@EASY
@given(st.integers(0, 2**32))
def test_of_an_audits_outcomes_passed_is_worth_most_and_failed_least(seed: int):
    worth: dict[str, float] = {}
    for outcome in ("passed", "undecided", "failed"):
        j = story(random.Random(seed))
        who = next(
            e.event.member
            for e in reversed(j.records)
            if isinstance(e.event, ev.Joined) and e.event.member.hotkey == "a"
        )
        j.seal(100, {who: 5}).audit(100, **{outcome: (who,)})
        worth[outcome] = j.scores()["a"].worth
    assert worth["passed"] >= worth["undecided"] > worth["failed"]


# --- batches -------------------------------------------------------------------------------------------------------


@EASY
@given(st.sampled_from(SEEDS), st.integers(0, 2**32))
def test_batches_change_no_bit(seed: int, noise: int):
    """However records are grouped (a dump at any cut), with what doesn't count among them or not, and in whatever order
    receipts of one instant were written."""
    rng = random.Random(noise)
    records = judged(records_of(seed), rng)
    policy, now_s = ScorePolicy(), records[-1].time_ns / 1e9 + 9.0
    wanted = recompute(records, policy, now_s)
    batched = RunBook(policy)
    for batch in cut(records, rng):
        again = RunBook(policy)
        again.load(batched.dump())
        batched = again
        for record in shuffled(batch, rng):
            batched.note(record)
            batched.note(msgspec.structs.replace(record, event=ev.HardwareClassSet((), "operator")))
    assert combined([batched], policy, now_s) == wanted


def cut(records: Sequence[ev.Record], rng: random.Random) -> list[list[ev.Record]]:
    batches: list[list[ev.Record]] = [[]]
    for record in records:
        if rng.random() < 0.1:
            batches.append([])
        batches[-1].append(record)
    return batches


def shuffled(batch: list[ev.Record], rng: random.Random) -> list[ev.Record]:
    """Neighbouring receipts of the same instant change places."""
    found = list(batch)
    for i in range(len(found) - 1):
        one, other = found[i], found[i + 1]
        both = isinstance(one.event, ev.Backwarded) and isinstance(other.event, ev.Backwarded)
        if both and one.time_ns == other.time_ns and rng.random() < 0.5:
            found[i], found[i + 1] = other, one
    return found


# --- sybils --------------------------------------------------------------------------------------------------------


def worked(k: int, steps: int, items: int, late: set[tuple[int, int]], absent: set[int], policy: ScorePolicy) -> float:
    """What one machine's work is worth under k hotkeys: the same items, the same of them late, the same absences, each
    partial audited and right."""
    j = Journal(policy)
    numbers = [1] * k
    for name in range(k):
        j.join(f"s{name}")
    for step in range(steps):
        names = [member(f"s{name}", numbers[name]) for name in range(k)]
        shares = {who: tuple(range(name, items, k)) for name, who in enumerate(names)}
        for who, own in shares.items():
            for m in own:
                if (step, m) in late:
                    j.add(ev.Leased(step, m, 0, who, 1), ev.Revoking(step, m, 0, 1), ev.NotAccumulated(step, m, 0, 1))
                else:
                    j.work(step, who, (m,))
        entries = tuple(
            Commitment(who, 0, tuple(m for m in own if (step, m) not in late), ((0, "h"),))
            for who, own in shares.items()
        )
        j.wait(10).add(ev.StageSealed(step, 0, 1, entries, ("h",), (("b", 1),), "0"))
        j.audit(step, passed=tuple(names)).end_step(step)
        if step in absent:
            for name in range(k):
                j.add(ev.Gone(names[name], "lost"))
            j.wait(7)
            for name in range(k):
                numbers[name] += 1
                j.join(f"s{name}", number=numbers[name])
    return math.fsum(score.worth for score in j.scores().values())


@EASY
@given(
    st.integers(2, 8),
    st.integers(1, 12),
    st.integers(8, 48),
    st.floats(0.0, 0.3),
    st.sets(st.integers(0, 11), max_size=3),
    st.integers(0, 2**32),
)
def test_a_miner_split_into_several_hotkeys_earns_no_more(
    k: int, steps: int, items: int, late_share: float, absent: set[int], seed: int
):
    rng = random.Random(seed)
    late = {(step, m) for step in range(steps) for m in range(items) if rng.random() < late_share}
    assume(all(2 * sum(m % k == name for _, m in late) <= steps * (items // k) for name in range(k)))
    policy = ScorePolicy()
    one, split = (worked(n, steps, items, late, absent, policy) for n in (1, k))
    assert split <= one
    assert one == 0.0 or split < one, "the hotkeys' first leases weren't to be proven"


@given(st.lists(st.tuples(st.floats(0.0, 1e5), st.floats(0.0, 1.0)), min_size=2, max_size=16), st.floats(0.0, 1e3))
@example([(1000.0, 0.0), (1000.0, 1.0)], 16.0)
@example([(100.0, 0.0), (100.0, 0.2)], 0.0)
def test_nor_however_it_divides_its_lateness(hotkeys: list[tuple[float, float]], unproven: float):
    """(done, late as a share of done) of each hotkey, late less often than not: all that is paid for is leases done."""
    one_done, one_late = math.fsum(done for done, _ in hotkeys), math.fsum(done * late for done, late in hotkeys)
    one = one_done * kept(one_done, one_late, unproven)
    split = math.fsum(done * kept(done, done * late, unproven) for done, late in hotkeys)
    assert split <= one * (1 + 1e-12)


def test_only_who_is_late_more_often_than_not_loses_less_than_it_cost():
    """The limit: nobody pays more than it has. A hotkey that is only ever late earns nothing and takes lateness from others."""
    one = 1000 * kept(1000, 100, 16.0)
    assert 1000 * kept(1000, 0, 16.0) + 0 * kept(0, 100, 16.0) > one
    assert kept(0, 100, 16.0) == kept(0, 1, 0.0) == 0.0
    assert kept(0, 0, 0.0) == 1.0


def test_without_leases_to_be_proven_splitting_costs_nothing():
    """What the constant is for."""
    free = ScorePolicy(unproven_leases=0.0)
    assert worked(4, 6, 32, set(), set(), free) == pytest.approx(worked(1, 6, 32, set(), set(), free), rel=1e-12)
    assert worked(4, 6, 32, set(), set(), ScorePolicy()) < 0.9 * worked(1, 6, 32, set(), set(), ScorePolicy())


def test_work_in_probation_is_verified_and_paid_like_any_other():
    """A new hotkey's sums are redone before their seal: neither more nor less is paid for them."""
    one = Journal(audit=AUDITED).join("a").seal(0, {member("a"): 8})
    two = Journal(audit=AUDITED).join("a").seal(0, {member("a"): 8}).audit(0, passed=(member("a"),))
    assert one.scores()["a"].worth == two.scores()["a"].worth > 0.0


# --- policies ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(BOUNDS))
def test_bounds_are_kept_to_and_named(name: str):
    low, high = BOUNDS[name]
    kind = int if isinstance(low, int) else float
    for value in (low, high):
        assert getattr(ScorePolicy(**{name: kind(value)}), name) == value
    for value in (low - 1 if kind is int else math.nextafter(low, -math.inf), high + 1, math.nan):
        with pytest.raises(Exception, match=f"score.{name} = .* is not allowed") as error:
            ScorePolicy(**{name: value})
        assert getattr(error.value, "hint", "") == f"allowed: {low:g} to {high:g}"
    assert set(BOUNDS) == set(ScorePolicy.__struct_fields__)
