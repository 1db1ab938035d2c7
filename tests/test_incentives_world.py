"""Simulated subnets: the same numbers for the same seed, the real code's pay, draws and verdicts, and money that adds up."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
from incentive_cases import as_bytes, kind, only, small

from iota.incentives import compare_policies, simulate_policy
from iota.incentives_rules import rules_of
from iota.incentives_worker import run_job
from subnet.audit.draw import catch_probability, rate_of, seed, unit, wrong_partials
from subnet.incentives.behaviour import AWAY, Behaviour, Conduct, View, behaviour
from subnet.incentives.court import Court
from subnet.incentives.machines import Timeline, make_machines
from subnet.incentives.outcome import band, gini
from subnet.incentives.scenario import TEMPO_S, Group, Scenario
from subnet.incentives.world import World, audit_of, num_tempos, simulate
from subnet.policy.policy import AdmissionRules, AuditRules, SubnetPolicy, WeightsRules
from subnet.policy.text import policy_from
from subnet.run.audits import CONVICTED, FAULT
from subnet.run.config import AuditSection
from subnet.score.policy import ScorePolicy
from subnet.words import Member

POLICY = SubnetPolicy()


def test_the_same_seed_gives_the_same_bytes_in_any_process_and_another_seed_others() -> None:
    scenario = small(24, 1.0)
    here = run_job((POLICY, scenario, 7))
    assert as_bytes(here) == as_bytes(run_job((POLICY, scenario, 7)))
    assert as_bytes(here) != as_bytes(run_job((POLICY, scenario, 8)))
    alone, together = (simulate_policy(POLICY, scenario, 2, first_seed=7, processes=n) for n in (1, 2))
    assert msgspec.json.encode(alone) == msgspec.json.encode(together)


def test_what_is_paid_is_what_the_chain_emits() -> None:
    scenario = small(40, 2.0)
    found = run_job((SubnetPolicy(weights=WeightsRules(burn_share=0.25)), scenario, 1))
    tempos, economy = num_tempos(scenario), scenario.economy
    miners = economy.emission_per_block * 361 * tempos * (1 - economy.owner_cut) / 2 * economy.token_usd
    paid = math.fsum(book.income_usd for book in found.kinds.values())
    assert found.burned_share == pytest.approx(0.25, abs=1e-3)  # u16 weights
    assert paid == pytest.approx(miners * 0.75, rel=2e-3)
    for book in found.kinds.values():
        days = tempos * TEMPO_S / 86_400 / len(book.daily_usd)
        assert sum(book.daily_usd) * book.machines * days == pytest.approx(book.income_usd, rel=0.05, abs=1e-9)


def test_stake_that_a_policy_asks_for_costs_each_hotkey_of_a_machine() -> None:
    scenario = only(small(40, 1.0), "honest slow", "sybils")
    found = run_job((SubnetPolicy(admission=AdmissionRules(min_stake=100.0)), scenario, 1)).kinds
    a_day = 100.0 * scenario.economy.token_usd * scenario.economy.capital_cost_per_year / 365
    one, many = found["honest slow"], found["sybils"]
    assert one.capital_usd == pytest.approx(a_day * one.machine_h / 24)
    assert many.capital_usd == pytest.approx(8 * a_day * many.machine_h / 24)
    assert run_job((POLICY, scenario, 1)).kinds["sybils"].capital_usd == 0.0


def test_machines_that_never_fail_are_paid_by_their_speed() -> None:
    """Equal machines earn alike, one twice as fast twice as much: the shares of the real score."""
    scenario = only(small(40, 2.0), "honest fast", "honest slow")
    steady = {
        name: msgspec.structs.replace(h, hours_between_outages=1e9, spread=0.0, late_share=0.0)
        for name, h in scenario.hardware.items()
    }
    result = simulate_policy(POLICY, msgspec.structs.replace(scenario, hardware=steady), 1)
    fast, slow = kind(result, "honest fast").income.mean, kind(result, "honest slow").income.mean
    leases_h = 1e13 / 1e14 * 3600 / math.log(2)  # of a slow machine, in the long run
    kept = (4 * leases_h / (4 * leases_h + 16)) / (leases_h / (leases_h + 16))  # unproven leases
    assert fast / slow == pytest.approx(4 * kept, rel=0.02)


def test_half_of_the_leases_late_costs_what_the_formula_says() -> None:
    base = only(small(40, 2.0), "honest slow", "honest fast")
    late = {
        "slow": msgspec.structs.replace(base.hardware["slow"], late_share=0.5, hours_between_outages=1e9, spread=0.0),
        "fast": msgspec.structs.replace(base.hardware["fast"], late_share=0.0, hours_between_outages=1e9, spread=0.0),
    }
    kept = msgspec.structs.replace(late["slow"], late_share=0.0)
    found = [
        kind(simulate_policy(POLICY, msgspec.structs.replace(base, hardware={**late, "slow": slow}), 1), "honest slow")
        for slow in (late["slow"], kept)
    ]
    share = [one.share.mean / (1 - one.share.mean) for one in found]  # against the others, whose worth stays
    assert share[0] / share[1] == pytest.approx(0.5, rel=0.03)


# --- audits and cases ----------------------------------------------------------------------------------------------


def test_what_draws_a_lie_is_the_real_rate() -> None:
    """Partials drawn by numpy's generator are caught as often, and as late, as those drawn by BLAKE3 of a block's hash."""
    scenario = only(small(200, 6.0), "honest slow", "free rider")
    liars = msgspec.structs.replace(scenario.groups[1], count=60, options={"returns_after_h": 2.0})
    scenario = msgspec.structs.replace(scenario, groups=(scenario.groups[0], liars))
    found = run_job((POLICY, scenario, 3)).kinds["free rider"].found_out_h
    rate = rate_of(scenario.run.audit)
    step_h, window = scenario.run.step_s / 3600, scenario.run.audit.window_steps
    delay_h = ((window - 1) / 2 * scenario.run.step_s + 24 + scenario.run.redo_s) / 3600
    waits_h: list[float] = []
    for window_number in range(len(found)):
        blocks = seed("run", 0, window_number, "hash", "leader")
        drawn = next(step for step in range(10_000) if unit(blocks, step, 0, "miner") < rate)
        waits_h.append(drawn * step_h + delay_h)
    error = math.sqrt(np.var(found) / len(found) + np.var(waits_h) / len(found))
    assert len(found) > 400
    assert abs(np.mean(found) - np.mean(waits_h)) < 4 * error
    within = sum(hours < 50 * step_h + delay_h for hours in found) / len(found)
    assert within == pytest.approx(catch_probability(rate, 50, wrong_partials(1.0, 6)), abs=0.07)


def test_cases_end_as_the_leader_decides_them() -> None:
    """A long clean record makes a first mismatch a fault, a short one a conviction; a fault means probation and a mark."""
    policy = SubnetPolicy(audit=AuditRules(fault_after_items=100))
    court = Court(AuditSection(), rules_of(policy))
    new, old = Member("new", 1, 100), Member("old", 1, 101)
    assert court.in_probation("new")
    assert court.must_audit("new")
    court.passed([(new, 16), (old, 100)])
    assert not court.in_probation("new")
    assert court.accuse(new, "a", sealed=True)[1] == CONVICTED
    plain = court.rate("old")
    assert court.accuse(old, "b", sealed=True)[1] == FAULT
    assert court.in_probation("old")
    assert court.rate("old") == 4 * plain
    court.passed([(old, 200)])
    assert court.accuse(old, "b", sealed=True)[1] == CONVICTED
    assert court.rate("x", unchecked=True) == 4 * plain


def test_a_liar_in_probation_earns_nothing_and_is_out_at_once() -> None:
    @behaviour("test_lies_at_once")
    class LiesAtOnce(Behaviour, frozen=True):
        def act(self, view: View) -> Conduct:
            return Conduct(wrong=1.0, honest_first=False)

    scenario = only(small(40, 2.0), "honest slow")
    liar = Group(name="liar", behaviour="test_lies_at_once", hardware="slow", count=2)
    found = run_job((POLICY, msgspec.structs.replace(scenario, groups=(*scenario.groups, liar)), 1)).kinds["liar"]
    assert found.income_usd == 0.0
    assert found.convictions == found.registrations == 4
    assert max(found.found_out_h) == 0.0


def test_everything_redone_before_its_seal_pays_no_liar() -> None:
    policy = policy_from({"audit": {"required": "all"}})
    scenario = small(40, 2.0)
    assert audit_of(scenario, policy).before_seal == "all"
    found = run_job((policy, scenario, 1)).kinds
    honest_slow = found["honest slow"]
    for name in ("free rider", "lazy quantiser", "forward only", "copier"):
        book = found[name]
        assert book.convictions > 0
        assert book.income_usd / book.machines < 0.1 * honest_slow.income_usd / honest_slow.machines


def test_a_policy_raises_the_runs_audits_and_never_lowers_them() -> None:
    scenario = small()
    strict = SubnetPolicy(audit=AuditRules(required="probation", min_rate=0.2, min_probation_items=99))
    raised = audit_of(scenario, strict)
    assert (raised.rate, raised.probation_items, raised.before_seal) == (0.2, 99, "probation")
    assert audit_of(scenario, SubnetPolicy()) == scenario.run.audit
    more = run_job((strict, scenario, 1)).kinds["free rider"]
    less = run_job((POLICY, scenario, 1)).kinds["free rider"]
    assert sum(more.found_out_h) / len(more.found_out_h) < 0.6 * sum(less.found_out_h) / len(less.found_out_h)


# --- behaviours ----------------------------------------------------------------------------------------------------


def test_a_sleepers_first_mismatch_is_a_fault_the_second_a_conviction() -> None:
    scenario = only(small(60, 8.0), "honest slow", "sleeper")
    sleeper = msgspec.structs.replace(scenario.groups[1], options={"turns_after_days": 5.0})
    policy = SubnetPolicy(audit=AuditRules(fault_after_items=100))  # items that 5 days surely have redone
    found = run_job((policy, msgspec.structs.replace(scenario, groups=(scenario.groups[0], sleeper)), 1))
    book = found.kinds["sleeper"]
    assert book.faults == book.convictions == book.machines
    assert len(book.found_out_h) == 2 * book.machines


def test_who_is_price_sensitive_leaves_when_it_costs_more_than_it_pays_and_comes_back() -> None:
    scenario = only(small(60, 10.0), "honest fast", "honest slow", "price-sensitive")
    scenario = msgspec.structs.replace(scenario, economy=msgspec.structs.replace(scenario.economy, token_usd=250.0))
    found = run_job((POLICY, scenario, 1))
    assert found.departures > 0
    assert found.churn > 0
    away_h = found.churn * scenario.num_machines * num_tempos(scenario) * TEMPO_S / 3600
    book = found.kinds["price-sensitive"]
    assert book.machine_h + away_h == pytest.approx(book.machines * num_tempos(scenario) * TEMPO_S / 3600)
    rich = msgspec.structs.replace(scenario, economy=msgspec.structs.replace(scenario.economy, token_usd=4000.0))
    assert run_job((POLICY, rich, 1)).departures == 0


def test_who_copies_weights_earns_no_more_than_who_counts() -> None:
    found = simulate_policy(POLICY, small(60, 3.0), 2)
    assert found.copying_dividends is not None
    assert 0 < found.copying_dividends.mean < found.honest_dividends.mean


def test_a_machine_that_is_down_does_no_work_and_is_back_under_its_name() -> None:
    scenario = only(small(20, 1.0), "flaky")
    machines = make_machines(scenario, 1, 86_400.0)
    assert machines == make_machines(scenario, 1, 86_400.0) != make_machines(scenario, 2, 86_400.0)
    timeline = Timeline(machines, 600.0, 144)
    for number, machine in enumerate(machines):
        assert all(a[1] < b[0] for a, b in zip(machine.outages, machine.outages[1:], strict=False))
        down_s = sum(min(up, 86_400.0) - down for down, up in machine.outages)
        assert (1 - timeline.up_IM[:, number]).sum() * 600.0 == pytest.approx(down_s)
    world = World(POLICY, scenario, 1, rules_of(POLICY))
    for tempo in range(world.tempos):
        world.pass_tempo(tempo)
    assert all(seat.book.registrations == seat.book.machines for seat in world.seats)
    absent = [entry.absent_s for entry in world.pay.accounts.data.entries.values()]
    assert max(absent) > 0


def test_a_new_behaviour_is_one_small_class() -> None:
    @behaviour("test_weekend")
    class Weekend(Behaviour, frozen=True):
        """Works two days of seven."""

        def act(self, view: View) -> Conduct:
            return Conduct() if view.now_s % (7 * 86_400) < 2 * 86_400 else AWAY

    hardware = small().hardware
    groups = (
        Group(name="all week", behaviour="honest", hardware="slow", count=4),
        Group(name="weekend", behaviour="test_weekend", hardware="slow", count=4),
    )
    found = simulate(POLICY, Scenario(hardware=hardware, groups=groups, days=7.0), 1, rules_of(POLICY)).kinds
    assert found["weekend"].machine_h == pytest.approx(found["all week"].machine_h * 2 / 7, rel=0.05)
    assert 0 < found["weekend"].income_usd < found["all week"].income_usd


# --- two policies ----------------------------------------------------------------------------------------------------


def test_a_policy_compared_with_itself_changes_nothing() -> None:
    found = compare_policies(POLICY, SubnetPolicy(), small(24, 1.0), 2)
    assert not found.changed
    for one in found.kinds:
        assert (one.income_change.mean, one.income_change.low, one.income_change.high) == (0.0, 0.0, 0.0)


def test_a_change_that_hits_the_uptime_farmer_and_spares_the_slow() -> None:
    """The story of docs/subnet_owner.md, in small."""
    b = SubnetPolicy(score=ScorePolicy(half_life_s=14_400.0, deadline_exponent=2))
    found = {one.name: one for one in compare_policies(POLICY, b, small(100, 4.0), 2).kinds}
    farmer, slow = found["uptime farmer"].income_ratio, found["honest slow"].income_ratio
    assert farmer is not None
    assert slow is not None
    assert farmer.mean < 0.5
    assert slow.mean > 0.99


def test_bands_and_gini_by_hand() -> None:
    found = band([1.0, 2.0, 3.0])
    assert found is not None
    assert (found.mean, found.high - found.mean) == (2.0, pytest.approx(2.920 / math.sqrt(3)))
    assert band([]) is None
    assert gini([1.0] * 5) == 0.0
    assert gini([0.0, 0.0, 0.0, 1.0]) == pytest.approx(0.75)
    assert gini([1.0, 3.0]) == pytest.approx(0.25)
