"""The runner on a swarm that is only pretended: targets, order, what is undone, what is journaled; time is moved by hand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos_cases import FakeGround, Stage, one, status_of

from iota.chaos.faults import NoEffect
from iota.chaos.plan import PROCESS, Kind, make_plan
from iota.chaos.proxy import PASS, Policy
from iota.chaos.runner import PATIENCE_S, Rules, lone_members


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path / "chaos" / "journal.ndjson")
    with made.journal:
        yield made


# ---- each kind


def test_kill_is_started_again_after_it_has_ended(stage: Stage) -> None:
    chaos = stage.begin(one(Kind.KILL, choice=0.5, back_s=2.0))
    stage.go(0.95)
    assert stage.ground.log == []
    stage.go(0.1)
    assert stage.ground.log == ["SIGKILL miner-1"]
    assert stage.ground.expected == ["miner-1"]
    stage.go(1.8)
    assert stage.ground.log == ["SIGKILL miner-1"]
    stage.go(0.4)
    assert stage.ground.log == ["SIGKILL miner-1", "restart miner-1"]
    (done,) = chaos.done
    assert (done.target, done.hotkey, done.happened) == ("miner-1", "hotkey of miner-1", True)
    assert done.ended_s is not None
    assert done.ended_s - done.began_s == pytest.approx(2.0, abs=0.2)
    assert chaos.over
    assert [(e.what, e.target, e.pid) for e in stage.entries()] == [
        ("started", "", None),
        ("began", "miner-1", 107),
        ("ended", "miner-1", 107),
    ]
    assert stage.said == ["kill miner-1 back after 2.0 s"]


@pytest.mark.parametrize(("leave_s", "signals"), [(0.2, ["SIGTERM"]), (5.0, ["SIGTERM", "SIGKILL"])])
def test_preempt_kills_who_did_not_leave_in_time(stage: Stage, leave_s: float, signals: list[str]) -> None:
    stage.ground.leave_s = leave_s
    chaos = stage.begin(one(Kind.PREEMPT, notice_s=1.0, back_s=1.0))
    stage.go(5)
    assert stage.ground.log == [*(f"{name} miner-0" for name in signals), "restart miner-0"]
    assert chaos.done[0].outcome.startswith("killed" if len(signals) > 1 else "left in time")


def test_pause_reaches_the_group_and_is_undone_at_an_early_end(stage: Stage) -> None:
    chaos = stage.begin(one(Kind.PAUSE, for_s=3.0), one(Kind.PAUSE, at_s=10.0, number=1, for_s=50.0))
    stage.go(2)
    assert stage.ground.stopped == {"miner-0"}
    stage.go(3)
    assert stage.ground.stopped == set()
    stage.go(10)
    assert stage.ground.stopped == {"miner-0"}
    chaos.close()
    assert stage.ground.stopped == set()
    assert stage.ground.log == ["SIGSTOP miner-0 group", "SIGCONT miner-0 group"] * 2
    assert [done.outcome for done in chaos.done] == ["resumed", "let go at the end"]
    assert chaos.over


def test_a_slow_process_runs_part_of_the_time_and_its_heartbeat_all_of_it(stage: Stage) -> None:
    stage.begin(one(Kind.SLOW, link=PROCESS, share=0.4, for_s=2.0))
    stage.go(1)
    stopped = 0.0
    for _ in range(200):
        stage.go(0.01)
        stopped += 0.01 * bool(stage.ground.stopped)
    assert stopped == pytest.approx(2.0 * 0.6, abs=0.25)
    stage.go(1)
    assert not stage.ground.stopped
    assert all("group" not in line for line in stage.ground.log[:-1])


def test_links_are_healed(stage: Stage) -> None:
    ground, reset = stage.ground, Policy(mode="reset")
    stage.begin(
        one(Kind.PARTITION, link="both", mode="reset", for_s=1.0),
        one(Kind.SLOW, choice=0.4, number=1, link="both", mode="slow", delay_ms=5, kbit_per_s=9, for_s=1.0),
        one(Kind.STORE_OUTAGE, number=2, link="store", mode="truncate", truncate_after=7, for_s=1.0),
        one(Kind.PARTITION, at_s=5.0, number=3, link="peers", mode="blackhole", for_s=1.0),
    )
    stage.go(1.5)
    slow = Policy(delay_ms=5, kbit_per_s=9)
    assert ground.links == {
        "miner-0/validator": reset,
        "miner-0/peers": reset,
        "miner-1/validator": slow,  # miner-0 is taken: of the two others, the first
        "miner-1/peers": slow,
        "store": Policy(truncate_after=7),
    }
    stage.go(2)
    assert set(ground.links.values()) == {PASS}
    stage.go(2)
    assert ground.links["miner-0/peers"] == Policy(mode="blackhole")
    assert stage.chaos is not None
    stage.chaos.close()
    assert set(ground.links.values()) == {PASS}


def test_corruption_counts_only_if_bytes_were_inverted(stage: Stage) -> None:
    kind = {"link": "peers", "num_bytes": 2, "every_bytes": 9, "for_s": 2.0}
    chaos = stage.begin(one(Kind.CORRUPT, **kind), one(Kind.CORRUPT, at_s=10.0, number=1, **kind))
    stage.go(5)
    assert stage.ground.links == {"miner-0/peers": PASS}
    stage.go(6)
    assert stage.ground.links == {"miner-0/peers": Policy(flip_bytes=2, flip_every=9)}
    stage.ground.flipped["miner-0/peers"] = 2
    stage.go(0.2)
    assert [(done.happened, done.outcome) for done in chaos.done] == [
        (False, "too few bytes passed within 2 s"),
        (True, "2 bytes inverted"),
    ]


def test_join_leave_and_rejoin(stage: Stage) -> None:
    chaos = stage.begin(
        one(Kind.JOIN),
        one(Kind.LEAVE, at_s=2.0, number=1, choice=0.99),
        one(Kind.REJOIN, at_s=4.0, number=2, choice=0.0, back_s=1.0),
    )
    stage.go(8)
    assert [done.outcome for done in chaos.done] == ["miner-3 started", "left", "left, started again"]
    assert stage.ground.miners() == ("miner-0", "miner-1", "miner-2")
    assert stage.ground.log == ["SIGTERM miner-3", "SIGTERM miner-0", "restart miner-0"]


def test_the_validator_is_killed_twice_in_a_row(stage: Stage) -> None:
    chaos = stage.begin(one(Kind.VALIDATOR_KILL, back_s=2.0), one(Kind.VALIDATOR_KILL, at_s=1.1, number=1, back_s=1.0))
    stage.go(2)
    assert stage.ground.log == ["SIGKILL validator"]  # the second waits until there is one again
    stage.go(4)
    assert stage.ground.log == ["SIGKILL validator", "restart validator"] * 2
    assert len(chaos.done) == 2


# ---- who


def test_nobody_has_two_disruptions_at_once_and_who_finds_none_waits(stage: Stage) -> None:
    pauses = [one(Kind.PAUSE, number=n, choice=0.0, for_s=2.0) for n in range(4)]
    chaos = stage.begin(*pauses)
    stage.go(1.1)
    assert [done.target for done in chaos.active] == ["miner-0", "miner-1", "miner-2"]
    stage.go(3)
    assert [done.target for done in chaos.active] == ["miner-0"]
    stage.go(3)
    assert chaos.over
    assert len(chaos.done) == 4


def test_who_finds_no_target_for_long_is_given_up(stage: Stage) -> None:
    for name in stage.ground.miners():
        del stage.ground.up[name]
    chaos = stage.begin(one(Kind.KILL))
    stage.go(PATIENCE_S)
    assert not chaos.over
    stage.go(2)
    assert chaos.over
    assert chaos.done == []
    ((skipped, why),) = chaos.skipped
    assert skipped.kind is Kind.KILL
    assert "no target" in why
    assert stage.entries()[-1].what == "skipped"


def test_the_last_replica_of_a_stage_is_kept_where_asked_for(stage: Stage) -> None:
    status = status_of(0, 0, 1)
    assert lone_members(status) == {"hotkey of miner-2"}
    chaos = stage.begin(
        *(one(Kind.KILL, number=n, choice=0.99, back_s=0.1, at_s=1.0 + 3 * n) for n in range(3)),
        rules=Rules(keep_last_replica=True),
    )
    stage.go(12, status)
    assert {done.target for done in chaos.done} == {"miner-1"}
    other = stage.begin(one(Kind.KILL, choice=0.99, back_s=0.1))
    stage.go(3, status)
    assert {done.target for done in other.done} == {"miner-2"}


def test_nobody_leaves_for_good_where_too_few_would_stay(stage: Stage) -> None:
    chaos = stage.begin(*(one(Kind.LEAVE, number=n, at_s=1.0 + n) for n in range(3)), rules=Rules(min_miners=2))
    stage.go(PATIENCE_S + 10)
    assert len(chaos.done) == 1
    assert len(chaos.skipped) == 2


def test_steps_trigger_too_and_only_once_they_are_there(stage: Stage) -> None:
    chaos = stage.begin(one(Kind.PAUSE, at_s=0.5, at_step=3, for_s=0.1), one(Kind.PAUSE, number=1, at_s=0.0, at_step=5))
    stage.go(5, status_of(0, step=2))
    assert chaos.done == []
    stage.go(0.4, status_of(0, step=3))
    assert chaos.done == []
    stage.go(1, status_of(0, step=3))
    assert len(chaos.done) == 1
    stage.go(1, status_of(0, step=9))
    assert len(chaos.done) == 2


def test_release_lets_miners_go_and_brings_the_validator_back(stage: Stage) -> None:
    chaos = stage.begin(
        one(Kind.PAUSE, for_s=100.0), one(Kind.VALIDATOR_KILL, number=1, back_s=3.0), one(Kind.KILL, 2.0, number=2)
    )
    stage.go(1.5)
    chaos.release()
    assert [done.kind for done in chaos.active] == [Kind.VALIDATOR_KILL]
    assert not stage.ground.stopped
    stage.go(5)
    assert chaos.over
    assert stage.ground.running("validator")
    assert "SIGKILL miner-0" not in stage.ground.log


def test_a_target_that_is_gone_in_that_moment_is_no_disruption(stage: Stage) -> None:
    class Vanishing(FakeGround):
        def signal(self, name: str, number: int, *, group: bool = False) -> int:
            raise NoEffect(f"{name} has just ended")

    stage.ground = Vanishing(stage.clock)
    chaos = stage.begin(one(Kind.KILL))
    stage.go(2)
    assert not chaos.done[0].happened
    assert stage.ground.expected == []  # its end stays an unexpected one
    assert stage.entries()[-1].outcome == "no effect: miner-0 has just ended"


def test_the_same_seed_does_the_same_things_to_the_same_fleet(tmp_path: Path) -> None:
    logs: list[list[str]] = []
    for number in range(2):
        stage = Stage(tmp_path / str(number))
        with stage.journal:
            chaos = stage.begin(*make_plan(11, 60, 3, tuple(Kind)))
            stage.go(150)
            assert chaos.over
            assert not stage.ground.stopped
            assert set(stage.ground.links.values()) <= {PASS}
        logs.append(stage.ground.log)
    assert logs[0] == logs[1]
    assert len(logs[0]) > 10
