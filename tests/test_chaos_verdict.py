"""What is said about a chaos run: evictions without cause, stalls, roots; lines and journals are read as they were written."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos_cases import Stage, one, status_of

from iota.chaos.plan import Kind
from iota.chaos.runner import Chaos
from iota.chaos.verdict import ChaosResult, Demands, Stall, false_evictions, judge, line_time, lines, parse_gone
from iota.chaos.watcher import EventLines, StatusWatcher
from subnet.errors import IotaError, Unreachable
from subnet.protocol.api import RunStatus


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path / "chaos" / "journal.ndjson")
    with made.journal:
        yield made


def test_a_torn_line_of_the_journal_is_left_out(stage: Stage) -> None:
    stage.begin()
    with stage.journal.path.open("ab") as file:
        file.write(b'{"time":1,"wh')
    assert [entry.what for entry in stage.entries()] == ["started"]


def done_of(stage: Stage, kind: Kind, **more: object) -> Chaos:
    chaos = stage.begin(one(kind, **more))
    stage.go(20)
    return chaos


def test_evictions_without_a_disruption_are_found(stage: Stage) -> None:
    chaos = done_of(stage, Kind.PAUSE, for_s=1.0)
    (done,) = chaos.done
    done = dataclasses.replace(done, hotkey="5AAAAAAAxyz")
    wall_s = done.began_s

    def at(offset_s: float, text: str) -> tuple[float, str]:
        return wall_s + offset_s, f"{time.strftime('%H:%M:%S', time.localtime(wall_s + offset_s))} {text}"

    events = (
        at(0.0, "5AAAAAAA#1.2 is gone: silent"),
        at(5.0, "5AAAAAAA#1.3 is gone: lost"),
        at(100.0, "5AAAAAAA#1.4 is gone: silent"),
        at(1.0, "5BBBBBBB#1.9 is gone: silent"),
        at(1.0, "5BBBBBBB#1.9 is gone: left"),
        at(1.0, "step 3 stage 1: work of 5BBBBBBB#1.9 void: gone"),
        at(-50.0, "5AAAAAAA#1.1 is gone: silent"),
    )
    result = ChaosResult(True, "ab", None, (done,), events=events)
    assert [line[9:] for line in false_evictions(result)] == [
        "5AAAAAAA#1.4 is gone: silent",
        "5BBBBBBB#1.9 is gone: silent",
        "5AAAAAAA#1.1 is gone: silent",
    ]
    verdict = judge(result, Demands(root="ab"))
    assert not verdict.ok
    assert "3 members were evicted" in verdict.reasons[0]
    assert judge(result, Demands(max_false_evictions=3)).ok
    attached = dataclasses.replace(result, began_s=wall_s - 10)  # what was before isn't ours
    assert len(false_evictions(attached)) == 2


def test_a_verdict_says_what_is_wrong(stage: Stage) -> None:
    chaos = done_of(stage, Kind.KILL, back_s=1.0)
    good = ChaosResult(
        True, "ab", status_of(0, step=5), tuple(chaos.done), progress=((0.0, 0), (1.0, 1), (9.0, 2)), ended_s=20.0
    )
    verdict = judge(good, Demands(root="ab"))
    assert verdict.ok
    assert (verdict.longest_stall_s, verdict.longest_stall_step) == (8.0, 1)
    assert verdict.by_kind == {"kill": 1}
    assert any("as expected" in line for line in lines(verdict))
    assert lines(verdict)[-1].endswith("nothing was lost")
    for changes, said in (
        ({"root": "cd"}, "root is cd"),
        ({"finished": False}, "didn't finish"),
        ({"died": ("miner-3 ended with status 1",)}, "nobody ended it, but miner-3"),
        ({"error": "the deadline has passed"}, "deadline"),
    ):
        bad = judge(dataclasses.replace(good, **changes), Demands(root="ab"))
        assert not bad.ok
        assert any(said in reason for reason in bad.reasons)
        assert any(said in line for line in lines(bad))
    unfinished = dataclasses.replace(good, finished=False)
    assert unfinished.stalls[0] == Stall(9.0, 11.0, 2)


def test_lines_of_the_status() -> None:
    assert parse_gone("12:00:01 5FP6LeoM#1.2 is gone: silent") == ("5FP6LeoM", "silent")
    assert parse_gone("12:00:01 5FP6LeoM#1.2 joined stage 1 from 127.0.0.1:5") is None
    noon = time.mktime((2026, 3, 1, 0, 0, 5, 0, 0, -1))
    assert noon - line_time("23:59:58 x", noon) == 7  # yesterday's
    assert line_time("garbage", 12.5) == 12.5


def test_event_lines_are_kept_once_each_over_overlaps_and_restarts() -> None:
    seen = EventLines()
    seen.take(1.0, ["a", "b", "b"])
    seen.take(2.0, ["b", "b", "c"])
    seen.take(3.0, ["a"])  # the validator has started again
    seen.take(4.0, ["b", "c", "d", "d"])
    assert seen.seen == [(1.0, "a"), (1.0, "b"), (1.0, "b"), (2.0, "c"), (4.0, "d"), (4.0, "d")]


def test_the_watcher_goes_on_over_silence_and_stops_at_a_bug() -> None:
    answers: list[RunStatus | Exception | None] = [
        None,
        Unreachable("down"),
        status_of(0, step=1, events=("a",)),
        status_of(0, step=1, events=("a", "b")),
        status_of(0, step=3, events=("b", "c")),
        ZeroDivisionError("a bug"),
    ]
    given = threading.Event()

    def fetch() -> RunStatus | None:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            if not isinstance(answer, IotaError):
                given.set()
            raise answer
        return answer

    with StatusWatcher(fetch, poll_s=0.001) as watcher:
        assert given.wait(30)
    with pytest.raises(ZeroDivisionError):
        watcher.latest()
    assert [step for _, step in watcher.progress()] == [1, 3]
    assert [line for _, line in watcher.events()] == ["a", "b", "c"]
    assert watcher.unanswered == ""
