"""``GET /v1/scores`` and ``GET /v1/scores/HOTKEY``: every miner gets the terms of its score and of whatever keeps it from work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from aiohttp import web

from subnet.audit.draw import rate_of
from subnet.errors import InputError
from subnet.net.http import Call, Route, answer
from subnet.run import audits
from subnet.run.state import DONE, RunState, config, works
from subnet.score.api import CaseLine, ScoreDetail, ScoreList, Standing
from subnet.score.score import arithmetic
from subnet.timing import Clock
from validator.refusals import Refusals
from validator.scoring import ScoreBook

MAX_HOTKEY_CHARS = 64


class ScoreSession(Protocol):
    """What the desk needs of an active run."""

    @property
    def run_name(self) -> str: ...

    @property
    def audit_state(self) -> RunState: ...

    def back_off_left(self, hotkey: str) -> float:
        """Seconds until a hotkey that was gone silently may join again; 0 or less: it may."""
        ...

    def waiting_for(self) -> str: ...


class ScoreDesk:
    """``session``: the active run, if there is one."""

    def __init__(
        self, scores: ScoreBook, session: Callable[[], ScoreSession | None], refusals: Refusals, clock: Clock
    ) -> None:
        self._scores, self._session, self._refusals, self._clock = scores, session, refusals, clock

    def list(self) -> ScoreList:
        now_s = self._clock.wall_ns() / 1e9
        found = sorted(self._scores.scores(now_s).values(), key=lambda score: (-score.total, score.hotkey))
        return ScoreList(now_s, self._scores.policy, self._scores.runs, tuple(found))

    def detail(self, hotkey: str) -> ScoreDetail:
        now_s = self._clock.wall_ns() / 1e9
        scores, session = self._scores.scores(now_s), self._session()
        score = scores.get(hotkey)
        place = 0 if score is None else 1 + sum(other.total > score.total for other in scores.values())
        where = None if session is None else standing(session, hotkey)
        return ScoreDetail(
            hotkey=hotkey,
            time_s=now_s,
            policy=self._scores.policy,
            score=score,
            place=place,
            num_scores=len(scores),
            arithmetic=arithmetic(self._scores.policy, scores, hotkey),
            unpaid=self._scores.unpaid(hotkey),
            refusals=self._refusals.of(hotkey, now_s),
            standing=where,
            said=in_words(where),
        )


def score_routes(desk: ScoreDesk) -> list[Route]:
    async def scores(call: Call) -> web.StreamResponse:
        return answer(desk.list())

    async def score(call: Call) -> web.StreamResponse:
        hotkey = call.request.match_info["hotkey"]
        if len(hotkey) > MAX_HOTKEY_CHARS or not hotkey.isalnum():
            raise InputError(f"{hotkey[:MAX_HOTKEY_CHARS]!r} is no hotkey")
        return answer(desk.detail(hotkey))

    return [
        Route("GET", "/v1/scores", scores, signed=False),
        Route("GET", "/v1/scores/{hotkey}", score, signed=False),
    ]


# --- where a hotkey stands -----------------------------------------------------------------------------------------


def standing(session: ScoreSession, hotkey: str) -> Standing | None:
    """In the session's run, as far as it has begun."""
    state = session.audit_state
    if state.run is None:
        return None
    member = next((member for member in state.members if member.hotkey == hotkey), None)
    found, audit = state.audits, config(state).audit
    marks = found.marks.get(hotkey, 0)
    return Standing(
        run=session.run_name,
        stage=None if member is None else state.members[member].stage,
        leases=0 if member is None else _open_leases(state, hotkey),
        convicted=hotkey in state.convicted,
        quarantine=found.quarantined.get(hotkey),
        on_probation=audit.on and audits.in_probation(state, hotkey),
        items_right=found.clean.get(hotkey, 0),
        items_needed=audit.probation_items if audit.on else 0,
        audited_before_seal=audit.on and audits.must_audit(state, hotkey),
        audit_rate=rate_of(audit, marked=marks > 0),
        marks=marks,
        unopened=found.unopened.get(hotkey, 0),
        absences=state.absences.get(hotkey, 0),
        back_off_s=max(0.0, session.back_off_left(hotkey)),
        open_audits=tuple(
            (number, opened.step, opened.stage)
            for number, opened in sorted(found.open.items())
            if any(other.hotkey == hotkey for other in opened.members)
        ),
        cases=tuple(
            CaseLine(number, case.charge, case.step, case.stage, case.outcome, case.upheld)
            for number, case in sorted(found.cases.items())
            if case.hotkey == hotkey
        ),
        waiting_for=session.waiting_for(),
    )


def _open_leases(state: RunState, hotkey: str) -> int:
    count = 0
    for work in works(state):
        for member, held in work.held.items():
            if member.hotkey == hotkey and member in state.members:
                items = work.items[state.members[member].stage]
                count += sum(items[m].status != DONE for m in held)
    return count


def in_words(where: Standing | None) -> tuple[str, ...]:
    """The standing for a person, a line for each thing that there is to say."""
    if where is None:
        return ("no run is active",)
    lines: list[str] = []
    if where.stage is not None:
        lines.append(f"a member of run {where.run}: stage {where.stage}, {where.leases} items leased and not done")
    elif not where.convicted and where.quarantine is None and where.back_off_s <= 0:
        lines.append(f"not a member of run {where.run}; it may join")
    if where.convicted:
        lines.append("convicted: it can't join this run, and its work counts nothing; an appeal replays the bundle")
    if where.quarantine is not None:
        lines.append(f"in quarantine until case {where.quarantine} is closed")
    if where.back_off_s > 0:
        lines.append(f"gone silently {where.absences} times: a join is heard in {where.back_off_s:.0f} s")
    if where.on_probation:
        lines.append(
            f"on probation: {where.items_right} of {where.items_needed} items until its word is taken; until then each "
            "sum is redone before it is sealed"
        )
    elif where.items_needed:
        before = "every sum is redone before its seal, and " if where.audited_before_seal else ""
        lines.append(f"{before}a sealed sum is redone with probability {where.audit_rate:.3g}")
    if where.marks:
        lines.append(
            f"{where.marks} unpaid mismatches or released quarantines in its record: it is looked at more often"
        )
    if where.unopened:
        lines.append(
            f"{where.unopened} times it didn't open evidence that it had receipted: the third time is a conviction"
        )
    lines += [f"audit {number} of its sum of step {s}, stage {stage} is open" for number, s, stage in where.open_audits]
    for case in where.cases:
        outcome = (case.outcome if case.upheld else f"{case.outcome}, overturned by an appeal") or "open"
        lines.append(f"case {case.case} ({case.charge}, step {case.step}, stage {case.stage}): {outcome}")
    if where.waiting_for:
        lines.append(f"the run waits for {where.waiting_for}")
    return tuple(lines)
