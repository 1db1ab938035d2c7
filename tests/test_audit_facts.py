"""What benchmarks of audits read out of a journal: who was accused and convicted, which lies the end rests on; their tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import audit_facts
from benchmarks.adversaries import AFTER, PROBATION, SYBILS, trials, verdict
from benchmarks.audit_facts import CONVICTED, accused, convictions, facts_from, surviving_lies
from benchmarks.audit_swarm import SMALL
from benchmarks.cheats import CHEATS, Lie
from benchmarks.honest_audits import cost_config, cost_figures, honest_figures, shown_costs
from benchmarks.liars import FULL, KINDS, is_ok, report, roles
from benchmarks.parts import Parts, write_section
from subnet.run import events as ev
from subnet.words import Commitment, Member

ONE, TWO, OWN = Member("one", 1, 1), Member("two", 1, 2), "leader"


def records(*events: ev.AnyEvent) -> list[ev.Record]:
    return [ev.Record(number, 1000 * (number + 1), event) for number, event in enumerate(events)]


def case(number: int, member: Member, outcome: str) -> tuple[ev.AnyEvent, ev.AnyEvent]:
    opened = ev.CaseOpened(number, member.hotkey, member, 3, 0, "partial", "", "", False)
    return opened, ev.CaseClosed(number, outcome)


def sealed(step: int, *members: Member) -> ev.StageSealed:
    entries = tuple(Commitment(member, 0, (number,), ()) for number, member in enumerate(members))
    return ev.StageSealed(step, 0, 1, entries, (), (), "")


def test_a_fault_is_caught_and_no_conviction() -> None:
    facts = facts_from(
        records(*case(1, ONE, "fault"), *case(2, TWO, "convicted"), ev.Gone(Member("liar", 1, 3), "liar"))
    )
    assert accused(facts) == {"one", "two", "liar"}
    assert set(convictions(facts)) == {"one", "two", "liar"}
    assert set(convictions(facts, ("liar",), CONVICTED)) == {"two", "liar"}


def test_whoever_was_cleared_was_accused_all_the_same() -> None:
    appealed = facts_from(records(*case(1, ONE, "convicted"), ev.Appealed(1, False, "")))
    assert accused(appealed) == {"one"}
    assert convictions(appealed) == {}


def test_audits_are_counted_by_member_and_only_the_leaders() -> None:
    facts = facts_from(
        records(
            ev.TermStarted(1, OWN, ""),
            ev.AuditOpened(1, 0, 0, 5, (ONE, TWO), OWN, (), (2, 3)),
            ev.AuditClosed(1, passed=(ONE,), failed=(TWO,)),
            ev.AuditOpened(2, 0, 0, 0, (ONE,), "another", (), (2,)),
            ev.AuditClosed(2, passed=(ONE,)),
            ev.AuditOpened(3, 1, 0, 0, (ONE,), OWN, (), (4,)),
            ev.AuditClosed(3, undecided=(ONE,)),
        )
    )
    assert facts["audits_of"] == {"one": 1, "two": 1}
    assert facts["audits"] == {
        "passed": 1,
        "failed": 1,
        "undecided": 1,
        "unopened": 0,
        "before_seal": 2,
        "after_seal": 0,
    }
    assert facts["audited_items"] == 5


@pytest.mark.parametrize(
    ("events", "lie", "left"),
    [
        ((sealed(4, ONE),), Lie(500, 4, 0, 0), 1),
        ((sealed(4, TWO),), Lie(500, 4, 0, 0), 0),
        ((sealed(4, TWO, ONE),), Lie(500, 4, 0, 0), 0),
        ((sealed(4, ONE),), Lie(500, 4, -1, 0), 1),
        ((sealed(4, ONE),), Lie(500, 4, 0, 0, in_work=0), 0),
        ((sealed(4, ONE), ev.Rewound(2, 1, 1)), Lie(500, 4, 0, 0), 0),
        ((sealed(4, ONE), ev.Rewound(5, 1, 1)), Lie(500, 4, 0, 0), 1),
        ((sealed(4, ONE), ev.Rewound(2, 1, 1), sealed(4, ONE)), Lie(500, 4, 0, 0), 0),
        ((sealed(4, ONE), ev.Rewound(2, 1, 1), sealed(4, ONE)), Lie(2500, 4, 0, 0), 1),
    ],
    ids=[
        "sealed",
        "anothers",
        "another item",
        "of a step",
        "not in work",
        "undone",
        "before it",
        "honest again",
        "told again",
    ],
)
def test_a_lie_survives_in_what_was_sealed_and_not_undone(
    events: tuple[ev.AnyEvent, ...], lie: Lie, left: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(audit_facts, "run_records", lambda store: records(*events))
    assert len(surviving_lies(tmp_path, {"one": [lie]})) == left


# --- verdicts ----------------------------------------------------------------------------------------------------


def made_of(*events: ev.AnyEvent, **more: Any) -> dict[str, Any]:
    own = {
        "finished": True,
        "why": "",
        "root": "same",
        "seconds": 9.0,
        "hotkeys": {"0": "one", "1": "two"},
        "liars": ["one"],
    }
    told = {"lies": {"one": [3, 2, 1500]}, "surviving": [], "scores": {"one": 0.0, "two": 1.0}, "holdout": 2.0}
    return {**facts_from(records(*events)), **own, **told, "roles": {"0": []}, **more}


def test_a_cheat_is_caught_or_harmless_and_a_convict_is_unpaid() -> None:
    def ok(made: dict[str, Any]) -> bool:
        return verdict("no_work", made, {}, "same")["ok"]

    assert ok(made_of(*case(1, ONE, "convicted"), root="other"))
    assert ok(made_of(root="same"))
    assert not ok(made_of(root="other")), "neither"
    assert not ok(made_of(*case(1, ONE, "convicted"), scores={"one": 0.5, "two": 1.0})), "paid"
    assert not ok(made_of(*case(1, TWO, "cleared"))), "an innocent stood accused"
    assert not ok(made_of(finished=False))
    assert not ok(made_of(lies={})), "it never lied"


def test_the_end_of_a_run_with_liars() -> None:
    clean = {"root": "same", "holdout": 2.0}

    def ok(mode: str, made: dict[str, Any]) -> bool:
        return is_ok({"mode": mode, **report(made, clean, None)})

    guilty = case(1, ONE, "convicted")
    assert ok("all", made_of(*guilty))
    assert not ok("all", made_of(*guilty, root="other"))
    assert not ok("rewind", made_of(*guilty, root="other")), "convicted, and not undone"
    assert ok("rewind", made_of(*case(1, ONE, "fault"), root="other"))
    assert ok("rewind", made_of(root="other"))
    assert not ok("rewind", made_of(root="other", holdout=2.1))
    assert not ok("all", made_of(*guilty, *case(2, TWO, "cleared")))


def test_only_audits_of_the_honest_are_counted() -> None:
    audits = {"audits_of": {"one": 7, "two": 5}, "rewinds": [], "joined": {"one": 1, "two": 2}}
    found = honest_figures("run", made_of(*case(1, ONE, "convicted"), **audits), "same")
    assert (found["audits"], found["innocent"], found["root_equal"], found["incarnations"]) == (5, [], True, 3)
    assert honest_figures("run", made_of(*case(1, TWO, "cleared")), None)["innocent"] == ["two"]


def test_audit_costs_are_told_by_what_came_after_probation() -> None:
    def costs(receipted_s: float, compute_s: float, state_s: float) -> dict[str, Any]:
        bytes_ = {"evidence_bytes": 1000, "read_bytes": 5000}
        return {"receipted_s": receipted_s, "compute_s": compute_s, "state_s": state_s, **bytes_}

    made = made_of(
        steps=[-1, *range(80)],
        seen=[[0, costs(0, 0, 0)], [10, costs(10, 8, 1)], [20, costs(20, 9, 2)], [75, costs(90, 11, 3)]],
        costs=costs(100, 12, 4),
        items={"one": 60, "two": 40},
        audited_items=10,
    )
    found = cost_figures(made)
    assert found["compute_share"] == pytest.approx((12 - 9 + 4 - 2) / 80)
    assert found["state_share"] == pytest.approx(2 / 80)
    assert found["compute_share_in_all"] == pytest.approx(0.16)
    assert found["redone_item_over_item"] == pytest.approx((12 / 10) / (100 / 100))
    config = cost_config(80)
    one = 4 * config.pipeline.microbatch_rows * config.data.sequence_length * SMALL.hidden
    assert found["boundary_bytes"] == one * 2 * 2 * 16 * 81
    assert "6.25 %" in shown_costs(found)


# --- who does what -----------------------------------------------------------------------------------------------


def test_the_liars_of_a_run_are_of_mixed_kinds() -> None:
    assert FULL.liars / FULL.miners > 0.3
    for seed in range(1, 11):
        given = roles(seed, FULL)
        assert len(given) == FULL.liars == len({role.cheat for role in given.values()})
        assert sorted(role.share for role in given.values()) == [0.05, 1.0, 1.0, 1.0]
        assert [role.honest_while for role in given.values()].count("probation") == 1
        late = [number for number, role in given.items() if role.joins_at]
        assert late == [FULL.miners - 1], "it is the last to come"
        assert given == roles(seed, FULL)
    assert {role.cheat for seed in range(1, 11) for role in roles(seed, FULL).values()} == set(KINDS)


def test_every_cheat_is_tried_and_those_for_audits_twice() -> None:
    chosen = trials([*CHEATS, SYBILS])
    assert {trial.cheat for trial in chosen} == {*CHEATS, SYBILS}
    twice = {trial.cheat for trial in chosen if trial.when == AFTER} & {t.cheat for t in chosen if t.when == PROBATION}
    assert twice == {
        name
        for name, cheat in CHEATS.items()
        if cheat.caught_by == "audit" and cheat.slots == 1 and name != "watched_honesty"
    }
    assert len(set(chosen)) == len(chosen)


# --- parts -------------------------------------------------------------------------------------------------------


def test_a_part_is_made_once(tmp_path: Path) -> None:
    made: list[int] = []

    def make() -> dict[str, Any]:
        made.append(1)
        return {"value": len(made)}

    assert Parts(tmp_path).part("a", make) == {"value": 1}
    assert Parts(tmp_path).part("a", make) == {"value": 1}
    assert Parts(tmp_path).finished("a*") == [{"value": 1}]
    assert Parts(tmp_path, again=True).part("a", make) == {"value": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_a_section_of_a_page_is_replaced_and_nothing_else(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- a: begin -->\nold\n<!-- a: end -->\nafter\n")
    write_section(page, "a", "| new |\n")
    assert page.read_text() == "before\n<!-- a: begin -->\n| new |\n<!-- a: end -->\nafter\n"
    with pytest.raises(ValueError, match="no section b"):
        write_section(page, "b", "")
    assert [path.name for path in tmp_path.iterdir()] == ["page.md"]
