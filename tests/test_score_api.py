"""Every miner can ask why it has the score it has and what keeps it from work, and anyone recomputes it from the log store."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from journal_cases import records_of
from lead_cases import FIRST, Keys, Run, submission
from ledger_cases import with_audits
from score_cases import put_schedule

from iota.cli.main import main
from iota.cli.scores import _policy
from iota.score_recompute import Recomputed, recompute_run
from iota.score_tables import print_detail
from neurons.validator import build_parser, settings_from
from subnet.errors import ConfigError, Corrupt, InputError, NotFound, Refusal, Refused
from subnet.net.border import Listener, listen
from subnet.net.client import SignedClient
from subnet.net.http import create_app
from subnet.policy.policy import SubnetPolicy
from subnet.protocol.signing import RequestVerifier
from subnet.run import events as ev
from subnet.run.apply import apply
from subnet.run.audits import CaseState, OpenAudit
from subnet.run.config import AuditSection
from subnet.run.state import RunState, new_state
from subnet.score.api import ScoreDetail, ScoreList, Standing
from subnet.score.policy import ScorePolicy, WorkPolicy
from subnet.score.score import Score
from subnet.score.timeline import Timeline
from subnet.timing import Deadline, ManualClock
from subnet.words import Member
from validator.journal_file import SqliteJournal
from validator.journal_store import JournalStore
from validator.policy import AuditPolicy
from validator.refusals import KEPT_EACH, MAX_HOTKEYS, Refusals
from validator.run_registry import plan_submission
from validator.score_api import ScoreDesk, score_routes, standing
from validator.score_files import NAME, keep_book, load_books
from validator.score_holds import holds_of, where_of
from validator.scoring import ScoreBook

NOW_S = 1_700_000_000.0
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


def words(
    session: Session, hotkey: str, registrations: dict[str, int] | None = None, score: Score | None = None
) -> str:
    """All holds, a line each: what, why, until when."""
    where = standing(session, hotkey)
    holds = holds_of(hotkey, NOW_S, score, where, (), registrations, AuditPolicy())
    return "\n".join([where_of(where), *(f"{hold.what}: {hold.why}; until {hold.ends}" for hold in holds)])


def test_where_a_hotkey_stands_and_what_it_waits_for():
    session = Session(half_way())
    state = session.audit_state
    member, info = next((m, i) for m, i in state.members.items() if state.work is not None and m in state.work.held)
    said = words(session, member.hotkey)
    assert f"a member of run toy: stage {info.stage}, 1 items leased and not done" in said
    assert "probation: new or suspected: 12 of 16 items were redone and right, each sum before its seal" in said
    assert "until 4 more items are redone and right" in said
    state.audits.clean[member.hotkey] = 16
    assert "probation" not in words(session, member.hotkey)
    found = standing(session, member.hotkey)
    assert found is not None
    assert found.audit_rate == 0.03
    state.audits.marks[member.hotkey] = 1
    assert "redone with probability 0.12" in words(session, member.hotkey)
    state.audits.open[4] = OpenAudit(0, info.stage, 0, (member,), "leader")
    assert f"audit: audit 4 redoes its sum of step 0, stage {info.stage}; until at most" in words(
        session, member.hotkey
    )
    assert words(session, "stranger") == "not a member of run toy\nprobation: new or suspected: 0 of 16 items were " + (
        "redone and right, each sum before its seal; until 16 more items are redone and right"
    )
    session.back_off, state.absences["gone"], session.waits = 7.6, 3, "stage 1: nobody serves it"
    assert "back-off: gone silently 3 times: a join isn't heard yet; until in 8 s" in words(session, "gone")
    assert "the run waits for stage 1" in words(session, "gone")


def test_cases_quarantine_and_conviction():
    session = Session(half_way())
    audits = session.audit_state.audits
    who = Member("liar", 1, 1)
    audits.cases[2] = CaseState("liar", who, "c", 3, 0, "partial", "b", "d", sealed=True, branch=0)
    audits.quarantined["liar"] = 2
    said = words(session, "liar")
    assert (
        "quarantine: case 2 is open (step 3, stage 0): its sum isn't that of its items; until case 2 is closed" in said
    )
    assert "at most 3 third parties are asked" in said
    del audits.quarantined["liar"]
    audits.cases[2].outcome = "convicted"
    session.audit_state.convicted.add("liar")
    audits.unopened["liar"] = 2
    said = words(session, "liar")
    assert "quarantine" not in said
    assert (
        "convicted: convicted of a lie in run toy: it can't join; until the run ends, or an appeal is granted" in said
    )
    assert "unopened: 2 times it didn't open evidence" in said
    found = standing(session, "liar")
    assert found is not None
    assert (found.cases[0].outcome, found.cases[0].upheld) == ("convicted", True)


def test_a_conviction_in_the_score_says_when_it_is_forgotten():
    from score_cases import Journal, member

    j = Journal().join("a").join("b").seal(0, {member("a"): 2, member("b"): 2}).add(ev.Gone(member("a"), "liar"))
    score = j.scores()["a"]
    assert score.convicted_until_s == pytest.approx(j.now_s + 3000.0)
    found = holds_of("a", j.now_s + 1000.0, score, None, (), None, AuditPolicy())
    assert (found[0].what, found[0].ends_in_s) == ("convicted", pytest.approx(2000.0))
    assert "its sums contradict their fingerprints: its score is 0" in found[0].why
    assert "1970-01-01 01:06:40 UTC" in found[0].ends


def test_a_new_registration_and_none_are_said():
    from score_cases import Journal, member

    session, score = Session(half_way()), Journal().join("a").seal(0, {member("a"): 2}).scores()["a"]
    assert "registration" not in words(session, "a", {"a": 7}, score)
    assert "registration" not in words(session, "a", None, score)
    again = words(session, "a", {"a": 9}, score)
    assert "what it earned belongs to its registration at block 7; now it is that of block 9: no weight" in again
    assert "it isn't registered on the subnet" in words(session, "a", {"b": 9}, score)


def test_no_run_no_standing():
    assert standing(Session(new_state()), "a") is None
    holds = holds_of("a", NOW_S, None, None, (), None, AuditPolicy())
    assert [(hold.what, hold.ends) for hold in holds] == [("no run", "one is submitted")]


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


def test_scores_are_added_up_once_a_second_however_often_they_are_asked_for():
    clock, book, asked = ManualClock(), ScoreBook(), list[float]()
    for record in records_of(54):
        book.run("toy-1").note(msgspec.structs.replace(record, time_ns=clock.wall_ns()))
    real = book.scores
    book.scores = lambda now_s: asked.append(now_s) or real(now_s)  # type: ignore[method-assign, assignment, return-value]
    desk = ScoreDesk(book, lambda: None, Refusals(), clock)
    for _ in range(5):
        assert desk.list().scores == tuple(sorted(real(asked[-1]).values(), key=lambda s: (-s.total, s.hotkey)))
        desk.detail("hot0")
    clock.advance(1.0)
    assert desk.list().time_s == asked[-1] == clock.wall_ns() / 1e9
    assert len(asked) == 2


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
    assert [term.name for term in detail.terms][-3:] == ["reliability", "worth", "score"]
    assert detail.terms[-1].value == found.scores[0].total


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
        r"^hot0: place \d of \d",
        r"^uptime +[01]\S* +\(\S+ \+ 900\) / \(",
        r"^deadlines +\S+ +\(\S+ - \S+\) / \(\S+ \+ 16\)",
        r"^reliability +\S+ +\S+\^1 x \S+\^1 x \S+\^2",
        r"^score +\S+ +\S+ / \S+, everybody's worth",
        r"^refused +back_off at 20\S+ \S+ UTC: gone silently once +in 30 s it may ask again +wait$",
    ):
        assert re.search(part, text, re.MULTILINE), part
    told = json.loads(await iota("explain", "hot0", "--json"))
    assert told["hotkey"] == "hot0"
    assert {"what", "why", "ends", "ends_in_s", "hint"} <= set(told["holds"][0])
    served.session = None
    text = await iota("explain", "nobody1")
    assert "no score: never a member here, or forgotten" in text
    assert re.search("^no run +no run is active +one is submitted", text, re.MULTILINE)


def test_unpaid_sums_are_named(capsys: pytest.CaptureFixture[str]):
    from score_cases import Journal, member

    j = Journal().join("a").seal(3, {member("a"): 4}).audit(3, failed=(member("a"),))
    detail = ScoreDetail(
        hotkey="a",
        time_s=0.0,
        policy=j.policy,
        score=None,
        place=0,
        num_scores=1,
        terms=(),
        unpaid=j.book.unpaid("a"),
        refusals=(),
        standing=Standing(run="toy", stage=None),
        where="",
        holds=(),
    )
    print_detail(detail)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["3", "0", "4", "4096", "failed", "1", "toy"] in lines


# --- from the log store --------------------------------------------------------------------------------------------


def in_store(seed: int = 54, name: str = "tiny", run_id: str = "") -> tuple[Keys, Run, ScoreBook]:
    """A random schedule's journal as its leader's signed segments, and the book that saw the same records."""
    run, book = Run(Keys(), name, run_id), ScoreBook()
    put_schedule(run, seed)
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
    path = tmp_path / "policy.toml"
    path.write_text("[score]\nhalf_life_s = 7\n[work]\nwitness_pay = 0.5")
    assert _policy(path) == Timeline.of(ScorePolicy(half_life_s=7.0), WorkPolicy(witness_pay=0.5))
    assert _policy(None) is None
    for bad in (b"{", b"[score]\nhalf_life_s = 0", b"[score]\nhalflife = 1"):
        path.write_bytes(bad)
        with pytest.raises(ConfigError):
            _policy(path)
    with pytest.raises(ConfigError):
        _policy(tmp_path / "nothing")


# --- after a restart -----------------------------------------------------------------------------------------------


def test_what_was_earned_in_finished_runs_counts_after_a_restart(tmp_path: Path):
    """From its file; where that is spoilt, missing or of another policy from the journal beside it; without that it is lost."""
    journal, stored = tmp_path / "journal.db", SimpleNamespace(run_id="toy-1")
    entry = SimpleNamespace(finished=True, directory=tmp_path, stored=stored, journal=lambda: SqliteJournal(journal))
    registry = SimpleNamespace(entries={"toy": entry})

    def loaded(policy: ScorePolicy | None = None) -> dict[str, Score]:
        book = ScoreBook(policy)
        load_books(registry, book)  # type: ignore[arg-type]
        return book.scores(5.0)

    _, run, book = in_store(run_id="toy-1")
    keep_book(tmp_path, book.run("toy-1"))
    assert loaded() == book.scores(5.0) != {}
    (tmp_path / NAME).write_bytes(b"\x91spoilt")
    assert loaded() == {}
    JournalStore.create(journal, run.records, run.segments)
    assert loaded() == book.scores(5.0)
    assert (tmp_path / NAME).read_bytes() != b"\x91spoilt", "what was counted anew wasn't kept"
    (tmp_path / NAME).unlink()
    assert loaded() == book.scores(5.0)
    quick = ScorePolicy(half_life_s=60.0)
    fresh = ScoreBook(quick)
    for data in run.records:
        fresh.run("toy-1").note(msgspec.msgpack.decode(data, type=ev.Record))
    assert loaded(quick) == fresh.scores(5.0) != book.scores(5.0)


# --- settings ------------------------------------------------------------------------------------------------------


def test_a_validator_takes_its_policy_from_a_file(tmp_path: Path):
    path = tmp_path / "policy.toml"
    path.write_text("[score]\nhalf_life_s = 7200")
    settings = settings_from(build_parser().parse_args(["--policy", str(path)]))
    assert settings.policy == SubnetPolicy(score=ScorePolicy(half_life_s=7200.0))
    assert settings_from(build_parser().parse_args([])).policy is None
    path.write_text("[score]\nhalf_life_s = 0.5")
    with pytest.raises(ConfigError, match=r"score.half_life_s = 0.5 is not allowed"):
        settings_from(build_parser().parse_args(["--policy", str(path)]))


@pytest.mark.parametrize("flops", [float("nan"), float("inf"), -1.0, 1e31])
def test_a_run_whose_flops_are_no_numbers_is_refused(flops: float):
    good = submission("tiny")
    plan_submission(good)
    bad = msgspec.structs.replace(good, unit_flops_per_token=(flops, *good.unit_flops_per_token[1:]))
    with pytest.raises(InputError, match="FLOPs per token are no number"):
        plan_submission(bad)
