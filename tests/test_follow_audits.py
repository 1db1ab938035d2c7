"""A follower's own audits: what its seed draws is asked for, redone and entered into its scores; the leader is believed nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from follow_cases import AUDIT, Audited, Published, block_hash
from lead_cases import FIRST, SECOND, Keys

from subnet.audit.case import Case, Findings, RedonePartial
from subnet.audit.draw import drawn
from subnet.errors import NotFound, Refusal, Refused, Unreachable
from subnet.protocol import wire
from subnet.protocol.audit_api import AuditsRequest, WitnessRequest
from subnet.run import events as ev
from subnet.run.audits import OpenAudit
from subnet.run.state import RunState
from subnet.timing import ManualClock
from subnet.words import Member, Want
from validator import follow_asking as asking
from validator import follow_audits as audits_module
from validator.audit_runner import Keep
from validator.decision import Accused, AuditResult
from validator.follow_audits import FollowAudits
from validator.follow_findings import Accusation, FindingsShelf
from validator.follow_reader import LIST_S, FollowReader
from validator.follow_run import FollowedRun
from validator.scoring import ScoreBook

EVERY = msgspec.structs.replace(AUDIT, rate=1.0, before_seal="all", window_steps=64)
"""One window, the whole run; everything in it is drawn."""
END_S = 1_700_001_000.0


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "LOOK_S", 0.001)
    for module in (asking, audits_module):
        monkeypatch.setattr(module, "Backoff", lambda *waits: _NoWait())


class _NoWait:
    def next_s(self) -> float:
        return 0.0


class Blocks:
    block = 0

    def __init__(self) -> None:
        self.block_hashes: dict[int, str] = {}


class Line:
    """The leader: what it was asked, and what it says to that."""

    def __init__(self) -> None:
        self.audits: list[AuditsRequest] = []
        self.words: list[WitnessRequest] = []
        self.refuses: Exception | None = None

    async def ask_audit(self, leader: str, request: AuditsRequest) -> None:
        self.audits.append(request)
        if self.refuses is not None:
            raise self.refuses

    async def testify(self, leader: str, request: WitnessRequest) -> None:
        self.words.append(request)


def right(member: Member) -> RedonePartial:
    return RedonePartial(member, (), (), (), ())


def findings(*partials: RedonePartial, digest: str = "right") -> Findings:
    return Findings(digest, partials, None, (), 0.0, 0.0, 0)


class Files:
    """Of a bundle: one blob."""

    def __init__(self) -> None:
        self.sizes = {"cd" * 32: 4}

    def read(self, blob: str) -> bytes:
        return b"blob"


class Runner:
    """What replays give; ``answer`` may be changed."""

    def __init__(self) -> None:
        self.asked: list[OpenAudit] = []
        self.answer: Callable[[OpenAudit], AuditResult | None] = lambda opened: AuditResult(
            0, findings(*(right(member) for member in opened.members))
        )
        self.replay: Callable[[str], tuple[Case, Findings]] = lambda bundle: (_ for _ in ()).throw(NotFound("no case"))
        self.closed = False

    def bind(self, watch: object, clock: object, evidence_s: float) -> None: ...

    async def redo(
        self, audit: int, opened: OpenAudit, state: RunState, *, case: Case | None = None
    ) -> AuditResult | None:
        self.asked.append(opened)
        return self.answer(opened)

    async def replay_case(self, bundle: str, keep: Keep | None = None) -> tuple[Case, Findings]:
        case, findings = self.replay(bundle)
        if keep is not None:
            await keep(case, findings, Files())
        return case, findings

    async def close(self) -> None:
        self.closed = True


class World:
    """``journal``: so much of it as there is to follow; the run's end comes with ``finish``."""

    def __init__(self, directory: Path, journal: Audited) -> None:
        self.clock, self.scores = ManualClock(), ScoreBook(leader_audits=False)
        self.directory, self.journal = directory, journal
        self.line, self.runner, self.blocks = Line(), Runner(), Blocks()
        self.keys = Keys()
        self.audits: FollowAudits | None = None

    async def follow(self, count: int | None = None) -> FollowedRun:
        published = Published(self.keys, self.journal.records[:count])
        self.keys.keys = {name: data for name, data in self.keys.keys.items() if "journal" not in name}
        published.send()
        reader = FollowReader(self.keys, self.directory, self.scores, clock=self.clock)
        self.clock.advance(LIST_S + 60)
        while await reader.look():
            pass
        (self.run,) = reader.runs.values()
        self.reader = reader
        shelf = FindingsShelf(None, self.run.run_id, self.run.directory, lambda: self.run.signed_head)
        self.audits = FollowAudits(self.run, self.runner, shelf, self.line, SECOND, self.blocks, self.clock)
        return self.run

    async def until(self, done: Callable[[], bool]) -> None:
        for _ in range(2000):
            self.audits.look()
            if done():
                return
            await asyncio.sleep(0.001)
        raise AssertionError("nothing comes of it")

    async def until_idle(self) -> None:
        self.blocks.block_hashes = {number: block_hash(number) for number in self.audits.wanted_blocks}
        await self.until(lambda: self.audits.idle)
        await self.audits.close()

    @property
    def outcomes(self) -> dict[str, int]:
        names = ("passed", "failed", "undecided", "refused")
        return {n: sum(len(getattr(audit, n)) for audit in self.run.audits.items) for n in names}


def unfinished(journal: Audited) -> int:
    """Without the end: everything up to where the window is closed."""
    return next(n for n, event in enumerate(journal.events) if isinstance(event, ev.WindowClosed)) + 1


def partials(journal: Audited) -> int:
    return sum(len(event.entries) for event in journal.events if isinstance(event, ev.StageSealed))


async def test_all_that_is_drawn_is_asked_for_and_redone_by_its_own_seed(tmp_path: Path) -> None:
    journal = Audited(5, EVERY)
    world = World(tmp_path, journal)
    run = await world.follow(unfinished(journal))
    world.audits.look()
    assert world.line.audits == []  # nobody knows the block yet
    (block,) = world.audits.wanted_blocks
    assert block == 100
    world.line.refuses = Unreachable("not now")  # what is in the store already is enough
    monotone = world.clock.advance

    async def late() -> None:
        await asyncio.sleep(0.02)
        monotone(asking.ASK_S + 1)

    clock = asyncio.create_task(late())
    await world.until_idle()
    await clock
    ledger = run.watch.audits.ledger
    (due,) = [event for event in journal.events if isinstance(event, ev.WindowClosed)]
    draws = drawn(run.state, ledger, due, block_hash(block), SECOND.hotkey, skip_passed=False)
    assert sorted((o.step, o.stage, o.members) for o in world.runner.asked) == [
        (d.step, d.stage, d.members) for d in sorted(draws, key=lambda d: (d.step, d.stage))
    ]
    assert {(r.step, r.stage) for r in world.line.audits} == {(d.step, d.stage) for d in draws}
    assert world.outcomes == {"passed": partials(journal), "failed": 0, "undecided": 0, "refused": 0}
    assert world.runner.closed


async def test_another_seed_draws_other_partials(tmp_path: Path) -> None:
    journal = Audited(5, msgspec.structs.replace(EVERY, rate=0.4))
    run = await World(tmp_path, journal).follow(unfinished(journal))
    (due,) = [event for event in journal.events if isinstance(event, ev.WindowClosed)]
    found = [
        drawn(run.state, run.watch.audits.ledger, due, block_hash(due.block), signer.hotkey, skip_passed=False)
        for signer in (FIRST, SECOND)
    ]
    assert found[0] != found[1]


async def test_a_leader_that_refuses_is_counted_and_nobody_else_pays(tmp_path: Path) -> None:
    journal = Audited(5, EVERY)
    world = World(tmp_path, journal)
    run = await world.follow(unfinished(journal))
    before = world.scores.scores(END_S)
    world.line.refuses = Refused(Refusal("not_for_you", "no", None))
    await world.until_idle()
    assert world.outcomes == {"passed": 0, "failed": 0, "undecided": 0, "refused": partials(journal)}
    assert "not_for_you" in run.audits.items[0].why
    assert {h: s.total for h, s in world.scores.scores(END_S).items()} == {h: s.total for h, s in before.items()}


async def test_what_fails_is_unpaid_and_accused_under_a_signature(tmp_path: Path) -> None:
    journal = Audited(5, EVERY)
    world = World(tmp_path, journal)
    run = await world.follow(unfinished(journal))
    liar = next(event for event in journal.events if isinstance(event, ev.StageSealed)).entries[0].member
    bundle, fails = wire.blob_hash(b"case"), [0]

    def answer(opened: OpenAudit) -> AuditResult:
        partials = tuple(
            msgspec.structs.replace(right(k), wrong=("its slices",)) if k == liar else right(k) for k in opened.members
        )
        wrong = liar in opened.members and not fails[0]
        fails[0] += wrong
        accused = (Accused(liar, "partial", bundle, "right"),) if wrong else ()
        return AuditResult(0, findings(*partials) if wrong else findings(*map(right, opened.members)), accused=accused)

    world.runner.answer = answer
    before = world.scores.scores(END_S)[liar.hotkey]
    world.line.refuses = Refused(Refusal("late", "the run is over", 0.0))  # retryable: asked until the deadline
    run.state.finished = ev.RunFinished(1, "root")  # and a run that is over refuses nothing
    world.clock.advance(0)

    async def late() -> None:
        await asyncio.sleep(0.02)
        world.clock.advance(asking.ASK_S + 1)

    clock = asyncio.create_task(late())
    await world.until_idle()
    await clock
    assert world.outcomes["failed"] == 1
    assert world.outcomes["passed"] == partials(journal) - 1
    score = world.scores.scores(END_S)[liar.hotkey]
    assert score.sealed_work < before.sealed_work
    assert score.audits_failed > 0
    assert not score.convicted  # one may be a fault
    path = run.directory / "findings" / bundle / "accusation.msgpack"
    accusation = wire.decode(path.read_bytes(), Accusation, limit_bytes=1 << 20, what="accusation")
    assert accusation.is_signed
    assert (accusation.member, accusation.hotkey) == (liar, SECOND.hotkey)
    assert accusation.journal is not None
    assert accusation.journal[2] == FIRST.hotkey
    assert not msgspec.structs.replace(accusation, step=accusation.step + 1).is_signed


async def test_two_failures_convict(tmp_path: Path) -> None:
    journal = Audited(5, EVERY)
    world = World(tmp_path, journal)
    run = await world.follow(unfinished(journal))
    seals = [event for event in journal.events if isinstance(event, ev.StageSealed)]
    liar = seals[0].entries[0].member
    world.runner.answer = lambda opened: AuditResult(
        0,
        findings(*(right(k) for k in opened.members if k != liar)),
        accused=tuple(Accused(k, "partial", wire.blob_hash(b"case"), "right") for k in opened.members if k == liar),
    )
    run.state.finished = ev.RunFinished(1, "root")
    await world.until_idle()
    assert world.outcomes["failed"] > 1
    assert world.scores.scores(END_S)[liar.hotkey].convicted
    assert world.scores.scores(END_S)[liar.hotkey].total == 0


async def test_lost_evidence_is_nobodys_lie(tmp_path: Path) -> None:
    journal = Audited(5, EVERY)
    world = World(tmp_path, journal)
    await world.follow(unfinished(journal))
    world.run.state.finished = ev.RunFinished(1, "root")
    world.runner.answer = lambda opened: AuditResult(0, None, missing=(Want(0, 0, False, "ab" * 32),))
    await world.until_idle()
    assert world.outcomes == {"passed": 0, "failed": 0, "undecided": partials(journal), "refused": 0}


async def test_outcomes_survive_a_restart_and_are_entered_once(tmp_path: Path) -> None:
    journal = Audited(5, EVERY)
    world = World(tmp_path, journal)
    run = await world.follow(unfinished(journal))
    run.state.finished = ev.RunFinished(1, "root")
    await world.until_idle()
    scores, outcomes = world.scores.scores(END_S), world.outcomes
    for copied in (False, True):
        again = World(tmp_path, journal)
        await again.follow(unfinished(journal))
        assert again.outcomes == outcomes
        assert again.scores.scores(END_S) == scores
        await again.until_idle()  # all of it is done
        assert again.runner.asked == []
        if not copied:
            await again.reader.close()


# --- cases of the leader -------------------------------------------------------------------------------------------


async def case_world(tmp_path: Path, change: Callable[[Case], Case] = lambda case: case, digest: str = "leader"):
    """A case against the author of a sealed sum, convicted by the leader; ``change``: what the bundle says instead."""
    from subnet.audit import build

    journal = Audited(5, EVERY)
    end = unfinished(journal)
    seal = next(event for event in journal.events if isinstance(event, ev.StageSealed) and event.step >= 0)
    liar, stage = seal.entries[0].member, seal.entries[0].stage
    part = Audited.__new__(Audited)
    part.events = journal.events[:end]
    part.events = [
        *part.events,
        ev.Gone(liar, "accused"),
        ev.CaseOpened(1, liar.hotkey, liar, seal.step, stage, "partial", "ab" * 32, "leader", True),
        ev.WitnessSaid(1, "third", "leader"),
        ev.CaseClosed(1, "convicted"),
    ]
    live = {event.member for event in journal.events[:end] if isinstance(event, ev.Joined)}
    assert liar in live
    world = World(tmp_path, part)
    run = await world.follow()
    made = build.case_after_seal(run.state, run.watch.audits.ledger, seal.step, stage, [liar])
    bundle = change(build.accusation(made, liar))
    wrong = msgspec.structs.replace(right(liar), wrong=("its sum",))
    world.runner.replay = lambda name: (bundle, findings(wrong, digest=digest))
    run.todo.window_done(run.todo.windows[0])
    return world, liar


async def test_a_conviction_counts_once_the_bundle_was_replayed_here(tmp_path: Path) -> None:
    world, liar = await case_world(tmp_path)
    assert not world.scores.scores(END_S)[liar.hotkey].convicted
    await world.until(lambda: world.audits.idle)
    assert world.scores.scores(END_S)[liar.hotkey].convicted
    (verdict,) = world.run.verdicts.items
    assert (verdict.confirmed, verdict.digest, verdict.why) == (True, "leader", "")
    assert world.line.words == [WitnessRequest(1, "leader", world.run.run_id)]


async def test_a_bundle_that_is_not_the_journals_convicts_nobody(tmp_path: Path) -> None:
    def framed(case: Case) -> Case:
        partial = case.partials[0]
        items = tuple(msgspec.structs.replace(item, forward="cd" * 32) for item in partial.items)
        return msgspec.structs.replace(case, partials=(msgspec.structs.replace(partial, items=items),))

    world, liar = await case_world(tmp_path, framed)
    await world.until(lambda: world.audits.idle)
    assert not world.scores.scores(END_S)[liar.hotkey].convicted
    (verdict,) = world.run.verdicts.items
    assert not verdict.confirmed
    assert "claims" in verdict.why
    assert world.line.words == []


async def test_a_replay_that_finds_the_work_right_convicts_nobody(tmp_path: Path) -> None:
    world, liar = await case_world(tmp_path)
    case, _ = world.runner.replay("")
    world.runner.replay = lambda name: (case, findings(right(liar), digest="claimed"))
    await world.until(lambda: world.audits.idle)
    assert not world.scores.scores(END_S)[liar.hotkey].convicted
    assert world.line.words == [WitnessRequest(1, "claimed", world.run.run_id)]
