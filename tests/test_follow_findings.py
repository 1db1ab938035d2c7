"""What a follower notices of a leader beyond a wrong record: records withheld, evidence refused, stamps of the future."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from follow_cases import AUDIT, Audited, Published, block_hash, journal_of, with_records
from lead_cases import SECOND, Keys

from subnet.audit.draw import Draw
from subnet.errors import IotaError, NotFound, Refusal, Refused, Unreachable
from subnet.protocol import wire
from subnet.protocol.audit_api import AuditsRequest
from subnet.run import events as ev
from subnet.timing import ManualClock
from validator import follow_asking as module
from validator.follow_asking import NO_PERMIT, Asked, Asking
from validator.follow_reader import LIST_BUSY_S, RECHECK_S, FollowReader
from validator.follow_run import AHEAD_S, FollowedRun
from validator.follow_todo import DueWindow
from validator.follow_withheld import PATIENCE_S, Lag, WithheldWatch
from validator.log_publisher import segment_key
from validator.scoring import ScoreBook

END_S = 1_700_001_000.0


class World:
    def __init__(self, directory: Path, keys: Keys) -> None:
        self.clock, self.scores = ManualClock(), ScoreBook(leader_audits=False)
        self.reader = FollowReader(keys, directory, self.scores, clock=self.clock)

    async def catch_up(self, seconds: float = LIST_BUSY_S + 1) -> FollowedRun:
        self.clock.advance(seconds)
        while await self.reader.look():
            pass
        (run,) = self.reader.runs.values()
        return run


# --- records that aren't there -------------------------------------------------------------------------------------


async def test_a_segment_that_is_missing_before_later_ones_is_named_until_it_is_there(tmp_path: Path) -> None:
    published = Published(Keys(), journal_of(5))
    published.send()
    withheld = published.keys.keys.pop(segment_key(published.run_id, 4))
    world = World(tmp_path, published.keys)
    run = await world.catch_up()
    run = await world.catch_up()
    assert run.folded.num_segments == 4
    assert run.view().trouble_code == "missing"
    assert "segment 4" in run.view().trouble
    published.keys.keys[segment_key(published.run_id, 4)] = withheld
    run = await world.catch_up()
    assert run.finished
    assert run.view().trouble_code == run.view().trouble == ""


async def test_a_segment_that_is_damaged_after_it_was_taken_is_named(tmp_path: Path) -> None:
    published = Published(Keys(), journal_of(5))
    published.send(4)
    world = World(tmp_path, published.keys)
    await world.catch_up()
    published.keys.keys[segment_key(published.run_id, 3)] = b"\x93junk"
    run = await world.catch_up(RECHECK_S + 1)
    assert run.view().trouble_code == "changed"
    assert world.reader.distrusted == {}  # damage is no signature
    published.send()
    run = await world.catch_up()
    assert run.finished  # what was taken was good


def test_a_leader_may_be_ahead_of_its_journal_for_a_moment_and_by_a_step() -> None:
    lag = Lag()
    assert lag.look(0.0, theirs=5, ours=4, delay=0) == ""
    assert lag.look(0.0, theirs=6, ours=4, delay=1) == ""
    assert lag.look(0.0, theirs=6, ours=4, delay=0) == ""
    assert lag.look(PATIENCE_S - 1, theirs=9, ours=4, delay=0) == ""
    assert "step 9" in lag.look(PATIENCE_S, theirs=9, ours=4, delay=0)
    assert lag.look(PATIENCE_S, theirs=9, ours=8, delay=0) == ""
    assert lag.look(PATIENCE_S + 1, theirs=10, ours=8, delay=0) == ""  # begins anew


class Says:
    """A leader that says where it is."""

    def __init__(self, step: int) -> None:
        self.step, self.error = step, None

    async def step_of(self, leader: str, run: str) -> int:
        if self.error is not None:
            raise self.error
        return self.step


async def test_a_leader_that_tells_others_more_than_the_log_store_has(tmp_path: Path) -> None:
    published = Published(Keys(), journal_of(5))
    published.send(6)
    world = World(tmp_path, published.keys)
    run = await world.catch_up()
    line, away = Says(run.state.next_step + 2), [""]
    watch = WithheldWatch(line, lambda: [run], lambda: away[0], world.clock)
    await watch.look(run)
    world.clock.advance(PATIENCE_S + 1)
    away[0] = "the store is down"  # then nobody can have put anything there
    await watch.look(run)
    assert run.view().trouble == ""
    away[0] = ""
    await watch.look(run)
    world.clock.advance(PATIENCE_S + 1)
    line.error = Unreachable("not now")
    await watch.look(run)
    assert run.view().trouble == ""  # silence says nothing
    line.error = None
    await watch.look(run)
    assert run.view().trouble_code == "withheld"
    assert f"only at step {run.state.next_step}" in run.view().trouble
    published.send(1)
    await world.catch_up()
    assert run.view().trouble == ""


# --- stamps --------------------------------------------------------------------------------------------------------


async def test_a_record_of_the_future_ends_what_counts_also_after_a_restart(tmp_path: Path) -> None:
    published = Published(Keys(), journal_of(5))
    segment, before = published.segments[4], published.segments[3].head
    *records, last = segment.records
    record = wire.decode(last, ev.Record, limit_bytes=1 << 20, what="record")
    late_ns = 1_700_000_000 * 10**9 + int((AHEAD_S + 10_000) * 1e9)
    published.segments[4] = with_records(
        segment, before, [*records, wire.encode(ev.Record(record.number, late_ns, record.event))]
    )
    published.send(5)
    world = World(tmp_path, published.keys)
    run = await world.catch_up()
    (breach,) = run.breaches.items
    assert (breach.code, breach.wrong, breach.number) == ("clock", True, record.number)
    assert run.counted_to == record.number
    scores = world.scores.scores(END_S)
    again = World(tmp_path, published.keys)
    again.clock.advance(AHEAD_S + 20_000)  # by now it isn't the future any more
    run = await again.catch_up()
    assert run.counted_to == record.number
    assert again.scores.scores(END_S) == scores


# --- evidence ------------------------------------------------------------------------------------------------------


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.001)
    monkeypatch.setattr(module, "Backoff", lambda *waits: SimpleNamespace(next_s=lambda: 0.001))


class Line:
    """A leader that answers with these errors, the last for ever; after a None it accepts."""

    def __init__(self, *answers: IotaError | None, clock: ManualClock | None = None) -> None:
        self.answers, self.asked, self.clock = list(answers), list[AuditsRequest](), clock

    async def ask_audit(self, leader: str, request: AuditsRequest) -> None:
        self.asked.append(request)
        if self.clock is not None:
            self.clock.advance(1.0)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if answer is not None:
            raise answer


def no(code: str, retry_after_s: float | None = None) -> Refused:
    return Refused(Refusal(code, "no", retry_after_s))


async def asking(directory: Path, *answers: IotaError | None, permitted: bool = True):
    """(asking, its line, a window that is due, a draw of it with all members of one stage)."""
    audit = msgspec.structs.replace(AUDIT, rate=1.0, window_steps=64)
    journal = Audited(5, audit)
    end = next(n for n, event in enumerate(journal.events) if isinstance(event, ev.WindowClosed)) + 1
    published = Published(Keys(), journal.records[:end])
    published.send()
    world = World(directory, published.keys)
    run = await world.catch_up()
    line = Line(*answers, clock=world.clock)
    made = Asking(run, line, SECOND.hotkey, block_hash, world.clock, lambda: permitted)
    (due,) = run.todo.windows
    partials = run.watch.audits.ledger.partials(0, 0)
    draw = Draw(0, 0, tuple(record.member for record in partials), whole=True)
    return made, line, due, draw


@pytest.mark.parametrize("code", ["not_found", "not_allowed", "wrong_moment"])
@pytest.mark.usefixtures("_quick")
async def test_what_may_be_a_matter_of_moments_is_asked_again(tmp_path: Path, code: str) -> None:
    made, line, due, draw = await asking(tmp_path, no(code), no("busy", 0.001), Unreachable("gone"), None)
    assert await made.ask(due, draw) == Asked(draw.members, accepted=True)
    assert len(line.asked) == 4


@pytest.mark.parametrize("code", ["not_found", "not_allowed", "wrong_moment"])
@pytest.mark.usefixtures("_quick")
async def test_and_is_the_leaders_word_in_the_end(tmp_path: Path, code: str) -> None:
    made, line, due, draw = await asking(tmp_path, no(code))
    asked = await made.ask(due, draw)
    assert asked.refusal.startswith(code)
    assert len(line.asked) > 10


@pytest.mark.parametrize("answer", [no("busy", 0.001), Unreachable("gone"), NotFound("no address")])
@pytest.mark.usefixtures("_quick")
async def test_a_leader_that_is_busy_or_away_refuses_nothing(tmp_path: Path, answer: IotaError) -> None:
    made, _, due, draw = await asking(tmp_path, answer)
    asked = await made.ask(due, draw)
    assert asked.refusal == ""
    assert asked.why
    assert not asked.accepted


@pytest.mark.usefixtures("_quick")
async def test_whoever_holds_no_permit_blames_nobody(tmp_path: Path) -> None:
    made, line, due, draw = await asking(tmp_path, None, permitted=False)
    made._clock = SimpleNamespace(now_s=_seconds())
    assert await made.ask(due, draw) == Asked(draw.members, why=NO_PERMIT)
    assert line.asked == []


def _seconds():
    times = iter(range(0, 10_000, 10))
    return lambda: float(next(times))


@pytest.mark.usefixtures("_quick")
async def test_a_draw_that_only_a_mark_explains_is_asked_for_without_the_marked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, line, due, draw = await asking(tmp_path, no("not_drawn"), None)
    monkeypatch.setattr(made, "_certain", lambda due, draw: draw.members[:1])
    assert await made.ask(due, draw) == Asked(draw.members[:1], accepted=True)
    assert [request.hotkeys for request in line.asked] == [
        tuple(member.hotkey for member in draw.members),
        (draw.members[0].hotkey,),
    ]


@pytest.mark.usefixtures("_quick")
async def test_a_leader_that_denies_a_certain_draw_refuses(tmp_path: Path) -> None:
    made, line, due, draw = await asking(tmp_path, no("not_drawn"))  # at rate 1 everything is drawn
    assert (await made.ask(due, draw)).refusal.startswith("not_drawn")
    assert len(line.asked) == 1


@pytest.mark.usefixtures("_quick")
async def test_evidence_past_its_time_is_nobodys_refusal(tmp_path: Path) -> None:
    made, line, due, draw = await asking(tmp_path, None)
    gone = Draw(77, 0, draw.members, whole=True)
    asked = await made.ask(due, gone)
    assert (asked.accepted, asked.refusal) == (False, "")
    assert "too late" in asked.why
    assert line.asked == []


async def opening(
    directory: Path, monkeypatch: pytest.MonkeyPatch, *, at_once: int = 8, opens: bool = False, takeover: bool = False
) -> str:
    """The leader has accepted, and its journal goes on; what is to be said of it."""
    monkeypatch.setattr(module, "MOVED_STEPS", 1)
    monkeypatch.setattr(module, "OPENED_S", 5.0)
    monkeypatch.setattr(module, "AT_ONCE", at_once)
    audit = msgspec.structs.replace(AUDIT, rate=0.0, window_steps=1, open_windows=3, before_seal="all")
    journal = Audited(5, audit)
    windows = [n for n, event in enumerate(journal.events) if isinstance(event, ev.WindowClosed)]
    first, member = windows[0] + 1, next(e for e in journal.events if isinstance(e, ev.StageSealed)).entries[0].member
    if takeover:
        journal.events[first:] = [ev.TermStarted(2, "another", "nonce"), ev.RunFinished(0, "")]
    end = next(n for n in range(len(journal.events)) if isinstance(journal.events[n], ev.RunFinished))
    published = Published(Keys(), journal.records[:end])
    sent = sum(segment.first + len(segment.records) <= first for segment in published.segments)
    published.send(sent)
    world = World(directory, published.keys)
    run = await world.catch_up()
    made = Asking(run, Line(None), SECOND.hotkey, block_hash, world.clock)
    due = DueWindow(journal.events[windows[0]], 0)
    if opens:
        run.promises._data.opened.setdefault(0, set()).add((0, SECOND.hotkey, member))
    task = asyncio.create_task(made.until_opened(due, Draw(0, 0, (member,), whole=False), (member,)))
    await asyncio.sleep(0.01)
    assert task.done() == opens
    published.send()
    await world.catch_up()
    assert not run.finished
    return await asyncio.wait_for(task, 10)


@pytest.mark.usefixtures("_quick")
async def test_what_was_accepted_and_never_opened_is_a_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert await opening(tmp_path, monkeypatch) == "accepted, and never opened"


@pytest.mark.usefixtures("_quick")
async def test_unless_the_leader_has_its_hands_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert await opening(tmp_path, monkeypatch, at_once=0) == ""


@pytest.mark.usefixtures("_quick")
async def test_and_what_is_opened_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert await opening(tmp_path, monkeypatch, opens=True) == ""


@pytest.mark.usefixtures("_quick")
async def test_a_new_leader_is_asked_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert await opening(tmp_path, monkeypatch, takeover=True) == "again"
