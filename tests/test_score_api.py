"""Every miner can ask why it has the score it has and what keeps it from work, and anyone recomputes it from the log store."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from journal_cases import records_of
from lead_cases import FIRST, Keys, Run
from ledger_cases import with_audits

from iota.cli.main import main
from iota.cli.scores import _policy, explained
from iota.score_recompute import Recomputed, recompute_run
from subnet.errors import ConfigError, Corrupt, NotFound, Refusal, Refused
from subnet.net.border import Listener, listen
from subnet.net.client import SignedClient
from subnet.net.http import create_app
from subnet.protocol.signing import RequestVerifier
from subnet.run import events as ev
from subnet.run.apply import apply
from subnet.run.audits import CaseState, OpenAudit
from subnet.run.config import AuditSection
from subnet.run.state import RunState, new_state
from subnet.score.api import ScoreDetail, ScoreList, Standing
from subnet.score.policy import ScorePolicy
from subnet.timing import Deadline, ManualClock
from subnet.words import Member
from validator.refusals import KEPT_EACH, MAX_HOTKEYS, Refusals
from validator.score_api import ScoreDesk, in_words, score_routes, standing
from validator.score_files import NAME, keep_book, load_books
from validator.scoring import ScoreBook

AUDIT = AuditSection(rate=0.03, before_seal="probation", probation_items=16)


class Session:
    """A run in which the journal's members are at work, as far as step 0's first merge."""

    run_name = "toy"

    def __init__(self, state: RunState) -> None:
        self.audit_state, self.back_off, self.waits = state, 0.0, ""

    def back_off_left(self, hotkey: str) -> float:
        return self.back_off if hotkey == "gone" else 0.0

    def waiting_for(self) -> str:
        return self.waits


def half_way(seed: int = 54) -> RunState:
    state = new_state()
    for record in records_of(seed):
        event = record.event
        apply(state, with_audits(event, AUDIT) if isinstance(event, ev.RunPlanned) else event)
        if isinstance(event, ev.Joined):
            state.audits.clean[event.member.hotkey] = 12
        if isinstance(event, ev.Leased):
            return state
    raise AssertionError("nothing was leased")


def words(session: Session, hotkey: str) -> str:
    return "\n".join(in_words(standing(session, hotkey)))


def test_where_a_hotkey_stands_and_what_it_waits_for():
    session = Session(half_way())
    state = session.audit_state
    member, info = next((m, i) for m, i in state.members.items() if state.work is not None and m in state.work.held)
    said = words(session, member.hotkey)
    assert f"a member of run toy: stage {info.stage}, 1 items leased and not done" in said
    assert "on probation: 12 of 16 items until its word is taken" in said
    state.audits.clean[member.hotkey] = 16
    assert "on probation" not in words(session, member.hotkey)
    assert "redone with probability 0.03" in words(session, member.hotkey)
    state.audits.marks[member.hotkey] = 1
    assert "redone with probability 0.12" in words(session, member.hotkey)
    state.audits.open[4] = OpenAudit(0, info.stage, 0, (member,), "leader")
    assert f"audit 4 of its sum of step 0, stage {info.stage} is open" in words(session, member.hotkey)
    assert "not a member of run toy; it may join" in words(session, "stranger")
    session.back_off, state.absences["gone"], session.waits = 7.6, 3, "stage 1: nobody serves it"
    assert "gone silently 3 times: a join is heard in 8 s" in words(session, "gone")
    assert "it may join" not in words(session, "gone")
    assert "the run waits for stage 1" in words(session, "gone")


def test_cases_quarantine_and_conviction():
    session = Session(half_way())
    audits = session.audit_state.audits
    who = Member("liar", 1, 1)
    audits.cases[2] = CaseState("liar", who, "c", 3, 0, "partial", "b", "d", sealed=True, branch=0)
    audits.quarantined["liar"] = 2
    assert "in quarantine until case 2 is closed" in words(session, "liar")
    assert "case 2 (partial, step 3, stage 0): open" in words(session, "liar")
    del audits.quarantined["liar"]
    audits.cases[2].outcome = "convicted"
    session.audit_state.convicted.add("liar")
    audits.unopened["liar"] = 2
    said = words(session, "liar")
    assert "convicted: it can't join" in said
    assert "case 2 (partial, step 3, stage 0): convicted" in said
    assert "2 times it didn't open evidence" in said
    audits.cases[2].upheld = False
    assert "convicted, overturned by an appeal" in words(session, "liar")


def test_no_run_no_standing():
    assert standing(Session(new_state()), "a") is None
    assert in_words(None) == ("no run is active",)


def test_refusals_are_counted_and_bounded():
    refusals = Refusals()
    for second in range(3):
        refusals.note("a", Refusal("back_off", f"gone silently {second} times", 10.0), float(second))
    refusals.note("a", Refusal("hardware_class", "golden task 0 differs", None, "one class"), 5.0)
    found = refusals.of("a", 6.0)
    assert [(view.code, view.times, view.retry_after_s) for view in found] == [
        ("back_off", 3, 6.0),
        ("hardware_class", 1, None),
    ]
    assert refusals.of("a")[0].retry_after_s == 10.0
    for number in range(2 * KEPT_EACH):
        refusals.note("a", Refusal(f"code{number}", "", 1.0), 7.0)
    assert len(refusals.of("a")) == KEPT_EACH
    for number in range(MAX_HOTKEYS):
        refusals.note(f"h{number}", Refusal("x", "", 1.0), 8.0)
    assert refusals.of("a") == ()


# --- over HTTP and on the command line -----------------------------------------------------------------------------


class Served:
    listener: Listener
    book: ScoreBook
    session: Session | None


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    served = Served()
    served.book, refusals, clock = ScoreBook(), Refusals(), ManualClock()
    for record in records_of(54):
        served.book.run("toy-1").note(msgspec.structs.replace(record, time_ns=clock.wall_ns()))
    served.session = Session(half_way())
    refusals.note("hot0", Refusal("back_off", "gone silently once", 30.0, "wait"), clock.wall_ns() / 1e9)
    desk = ScoreDesk(served.book, lambda: served.session, refusals, clock)
    verifier = RequestVerifier(FIRST.hotkey, is_known=lambda hotkey: True)
    served.listener = await listen(create_app(score_routes(desk), verifier), "127.0.0.1", 0)
    try:
        yield served
    finally:
        await served.listener.close()


async def test_scores_are_public_best_first_and_sum_to_one(served: Served):
    async with SignedClient(served.listener.url) as client:
        found = await client.request("GET", "/v1/scores", None, ScoreList, deadline=Deadline.after(20), signed=False)
        best = found.scores[0].hotkey
        detail = await client.request(
            "GET", f"/v1/scores/{best}", None, ScoreDetail, deadline=Deadline.after(20), signed=False
        )
        with pytest.raises(Refused) as refused:
            await client.request("GET", "/v1/scores/a-b", None, ScoreDetail, deadline=Deadline.after(20), signed=False)
    assert refused.value.code == "bad_input"
    assert found.runs == ("toy-1",)
    assert [s.total for s in found.scores] == sorted((s.total for s in found.scores), reverse=True)
    assert sum(score.total for score in found.scores) == pytest.approx(1.0)
    assert (detail.score, detail.place, detail.num_scores) == (found.scores[0], 1, len(found.scores))
    assert detail.policy == found.policy == ScorePolicy()
    assert any(line.startswith("worth = ") for line in detail.arithmetic)


async def test_the_command_line_explains(served: Served, capsys: pytest.CaptureFixture[str]):
    async def iota(*arguments: str) -> str:
        status = await asyncio.to_thread(main, ["score", *arguments, "--validator.url", served.listener.url])
        out = capsys.readouterr()
        assert status == 0, out.err
        return out.out

    listed = await iota("list")
    assert "hot0" in listed
    assert json.loads(await iota("list", "--json"))["runs"] == ["toy-1"]
    text = await iota("explain", "hot0")
    for part in (
        "hot0: place",
        "Score",
        "uptime = (",
        "reliability = ",
        "Standing",
        "Refused joins",
        "back_off: gone silently once",
    ):
        assert part in text
    assert json.loads(await iota("explain", "hot0", "--json"))["hotkey"] == "hot0"
    served.session = None
    assert "no run is active" in await iota("explain", "nobody1")


def test_unpaid_sums_are_named():
    from score_cases import Journal, member

    j = Journal().join("a").seal(3, {member("a"): 4}).audit(3, failed=(member("a"),))
    detail = ScoreDetail(
        hotkey="a",
        time_s=0.0,
        policy=j.policy,
        score=None,
        place=0,
        num_scores=1,
        arithmetic=(),
        unpaid=j.book.unpaid("a"),
        refusals=(),
        standing=Standing(run="toy", stage=None),
        said=(),
    )
    assert any("step 3, stage 0: 4 items" in line and "failed (audit 1, run toy)" in line for line in explained(detail))


# --- from the log store --------------------------------------------------------------------------------------------


def in_store(seed: int = 54, name: str = "tiny", run_id: str = "") -> tuple[Keys, Run, ScoreBook]:
    """A random schedule's journal as its leader's signed segments, and the book that saw the same records."""
    run, book = Run(Keys(), name, run_id), ScoreBook()
    events = list[ev.AnyEvent]()
    for record in records_of(seed):
        event = record.event
        if isinstance(event, ev.TermStarted):
            event = msgspec.structs.replace(event, hotkey=FIRST.hotkey)
        events.append(event)
        if isinstance(event, ev.QUORUM_EVENTS):
            run.put(*events)
            events = []
    for data in run.records:
        book.run(run.run_id).note(msgspec.msgpack.decode(data, type=ev.Record))
    return run.keys, run, book


async def test_anyone_recomputes_the_validators_scores_from_the_log_store():
    keys, run, book = in_store()
    for name in (run.name, run.run_id):
        found = await recompute_run(keys, name, ScorePolicy())
        assert isinstance(found, Recomputed)
        assert {score.hotkey: score for score in found.scores} == book.scores(found.time_s)
        assert (found.run_id, found.num_records) == (run.run_id, len(run.records))
        assert found.scores
    later = await recompute_run(keys, run.name, ScorePolicy(), at_s=found.time_s + 3600)
    assert {score.hotkey: score for score in later.scores} == book.scores(found.time_s + 3600)


async def test_a_journal_that_was_tampered_with_gives_no_scores():
    keys, run, _ = in_store()
    with pytest.raises(NotFound, match="no run 'other'"):
        await recompute_run(keys, "other", ScorePolicy())
    _, second, _ = in_store(run_id="tiny-00000002")
    keys.keys |= second.keys.keys
    with pytest.raises(ConfigError, match="2 runs"):
        await recompute_run(keys, "tiny", ScorePolicy())
    run.spoil(2, hotkey="somebody else")
    with pytest.raises(Corrupt, match="segment 2"):
        await recompute_run(keys, run.run_id, ScorePolicy())


def test_a_policy_file(tmp_path: Path):
    path = tmp_path / "policy.json"
    path.write_bytes(msgspec.json.encode(ScorePolicy(half_life_s=7.0)))
    assert _policy(path) == ScorePolicy(half_life_s=7.0)
    assert _policy(None) == ScorePolicy()
    for bad in (b"{", b'{"half_life_s": 0}', b'{"halflife": 1}'):
        path.write_bytes(bad)
        with pytest.raises(ConfigError):
            _policy(path)
    with pytest.raises(ConfigError):
        _policy(tmp_path / "nothing")


# --- after a restart -----------------------------------------------------------------------------------------------


def test_what_was_earned_in_finished_runs_counts_after_a_restart(tmp_path: Path):
    entry = SimpleNamespace(finished=True, directory=tmp_path, stored=SimpleNamespace(run_id="toy-1"))
    registry = SimpleNamespace(entries={"toy": entry})
    _, _, book = in_store(run_id="toy-1")
    keep_book(tmp_path, book.run("toy-1"))
    again = ScoreBook()
    load_books(registry, again)  # type: ignore[arg-type]
    assert again.scores(5.0) == book.scores(5.0) != {}
    (tmp_path / NAME).write_bytes(b"\x91spoilt")
    empty = ScoreBook()
    load_books(registry, empty)  # type: ignore[arg-type]
    assert empty.scores(5.0) == {}
