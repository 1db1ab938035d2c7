"""Random schedules: with all rules on nothing breaks; with any one rule removed something does."""

from __future__ import annotations

import pytest
from schedule_nodes import Bad
from schedule_rules import COSTS, RULES, hunt
from schedule_sim import LIES, Sim, run_many


def broken(seeds: range, **options: object) -> dict[str, int]:
    """First seed of each kind of failure."""
    return run_many(seeds, **options)[1]


@pytest.mark.parametrize("first", range(0, 120, 20))
def test_every_schedule_ends_right(first: int) -> None:
    assert broken(range(first, first + 20)) == {}


@pytest.mark.parametrize("profile", ["void", "takeover", "stale", "rivals", "calm"])
def test_schedules_of_one_kind_of_trouble_end_right(profile: str) -> None:
    assert broken(range(1000, 1030), profile=profile, checks_all=False) == {}


@pytest.mark.parametrize("lie", LIES)
def test_no_lie_stops_the_run_or_gets_an_honest_member_convicted(lie: str) -> None:
    assert broken(range(2000, 2003), lie=lie, checks_all=False) == {}


def test_the_schedules_go_where_it_hurts() -> None:
    """A test of the test: what the rules are for does happen."""
    outcomes, examples = run_many(range(3000, 3040), checks_all=False)
    assert examples == {}
    for kind in ("Voided", "Revoking", "Gone", "ReplayLeased", "MicrobatchSkipped", "StoreRouted"):
        assert outcomes[kind] > 0, kind
    assert outcomes["tainted"] < 40 / 4


def test_the_sim_sees_a_wrong_sum() -> None:
    """The reference isn't the production code's own opinion: a sum that differs in one microbatch is found."""
    sim = Sim(1, checks_all=False)
    real = sim.reference.counted
    sim.reference.counted = lambda step, skipped: real(step, skipped)[1:]  # type: ignore[method-assign]
    with pytest.raises(Bad, match="wrong"):
        sim.run()


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_ten_thousand_schedules_end_right() -> None:
    outcomes, examples = run_many(range(10_000, 20_000), checks_all=False)
    assert examples == {}
    assert outcomes["ok"] == 10_000


FOUND: dict[str, tuple[str, str, int]] = {
    "segread": ("", "", 13),
    "nonce": ("rivals", "", 12),
    "effective": ("takeover", "", 0),
    "cursor": ("takeover", "", 0),
    "headrule": ("takeover", "", 32),
    "incterm": ("rivals", "", 507),
    "boot": ("stale", "", 3),
    "backoff": ("calm", "mute", 4),
    "replay": ("", "", 36),
    "skipseal": ("", "", 5),
    "skipvoid": ("", "", 5),
    "skiplone": ("", "", 3),
    "remember": ("void", "", 14),
    "epoch": ("", "", 3),
    "commitset": ("stale", "", 1),
    "have": ("calm", "nopub", 1),
    "ver": ("stale", "", 75),
    "via": ("calm", "withhold", 0),
    "seedver": ("void", "crafty", 27),
    "checkall": ("", "owner", 42),
    "ack": ("", "", 58),
}
"""By rule: profile, lie and seed of a schedule that fails without the rule.

Where a change of the schedules has made it end right, the test looks for another, which takes long:
``python tests/schedule_rules.py`` prints new ones.
"""

HUNTED = 300


@pytest.mark.parametrize("rule", sorted(FOUND))
def test_without_a_rule_a_schedule_fails(rule: str) -> None:
    profile, lie, seed = FOUND[rule]
    Sim(seed, profile=profile, lie=lie, checks_all=False, ahead=False).run()
    found = hunt(rule, profile, lie, [seed, *range(HUNTED)])
    assert found is not None, "no schedule fails without the rule"
    assert found[1].partition(":")[0] in ("Bad", "InvariantBroken", "KeyError")


def test_every_rule_is_tried() -> None:
    assert set(FOUND) == set(RULES)


@pytest.mark.parametrize("rule", sorted(COSTS))
def test_without_a_cheaper_rule_the_run_ends_right_but_costs_more(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    remove, kind, profile = COSTS[rule]
    seeds = range(12)
    before = run_many(seeds, profile=profile, checks_all=False)[0][kind]
    remove(monkeypatch, None)
    outcomes, examples = run_many(seeds, profile=profile, checks_all=False)
    assert examples == {}
    assert outcomes[kind] > 1.3 * before


def test_a_coordinator_dies_at_any_event() -> None:
    """Crashes right after an event is on disk and before anything is sent happen, and are survived."""
    restarts = 0
    for seed in range(30):
        sim = Sim(seed, checks_all=False)
        real = sim.restart

        def counted(old: object, real: object = real) -> None:
            nonlocal restarts
            restarts += 1
            real(old)  # type: ignore[operator]

        sim.restart = counted  # type: ignore[method-assign,assignment]
        sim.run()
    assert restarts > 0
