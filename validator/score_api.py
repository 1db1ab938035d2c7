"""``GET /v1/scores`` and ``GET /v1/scores/HOTKEY``: every miner gets the terms of its score and of whatever keeps it from work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from aiohttp import web

from subnet.audit.draw import rate_of
from subnet.chain.base import Metagraph
from subnet.errors import InputError
from subnet.net.http import Call, Route, answer
from subnet.policy.api import PolicyLine, PolicyView
from subnet.policy.policy import AuditRules
from subnet.run import audits
from subnet.run.state import DONE, RunState, config, works
from subnet.score.api import CaseLine, ScoreDetail, ScoreList, Standing
from subnet.score.score import whole_worth
from subnet.score.terms import terms_of
from subnet.timing import Clock
from validator.policy import AuditPolicy, with_rules
from validator.refusals import Refusals
from validator.score_holds import holds_of, where_of
from validator.scoring import Score, ScoreBook

MAX_HOTKEY_CHARS = 64
FRESH_S = 1.0


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
    """``session``: the active run, if there is one. ``registrations``: blocks by registered hotkey; None: unknown."""

    def __init__(
        self,
        scores: ScoreBook,
        session: Callable[[], ScoreSession | None],
        refusals: Refusals,
        clock: Clock,
        *,
        registrations: Callable[[], Mapping[str, int] | None] = lambda: None,
        policies: Callable[[], PolicyView] | None = None,
    ) -> None:
        self._scores, self._session, self._refusals, self._clock = scores, session, refusals, clock
        self._registrations, self._policies = registrations, policies
        self._known: tuple[float, dict[str, Score]] | None = None

    def _now(self) -> tuple[float, dict[str, Score]]:
        """(time, scores), at most ``FRESH_S`` old: anybody may ask as often as it likes, and adding up costs time."""
        now_s = self._clock.wall_ns() / 1e9
        if self._known is None or not 0 <= now_s - self._known[0] < FRESH_S:
            self._known = now_s, self._scores.scores(now_s)
        return self._known

    def list(self) -> ScoreList:
        now_s, scores = self._now()
        found = sorted(scores.values(), key=lambda score: (-score.total, score.hotkey))
        policy = self._scores.policy_at(now_s)
        return ScoreList(now_s, policy, self._scores.runs, tuple(found), self._in_force())

    def _in_force(self) -> PolicyLine | None:
        return self._policies().in_force if self._policies is not None else None

    def detail(self, hotkey: str) -> ScoreDetail:
        (now_s, scores), session, in_force = self._now(), self._session(), self._in_force()
        policy, rules = self._scores.policy_at(now_s), in_force.policy.audit if in_force is not None else AuditRules()
        audit = with_rules(AuditPolicy(), rules)
        score, refusals = scores.get(hotkey), self._refusals.of(hotkey, now_s)
        where = None if session is None else standing(session, hotkey)
        return ScoreDetail(
            hotkey=hotkey,
            time_s=now_s,
            policy=policy,
            score=score,
            place=0 if score is None else 1 + sum(other.total > score.total for other in scores.values()),
            num_scores=len(scores),
            terms=() if score is None else terms_of(policy, score, whole_worth(scores)),
            unpaid=self._scores.unpaid(hotkey),
            refusals=refusals,
            standing=where,
            where=where_of(where),
            holds=holds_of(hotkey, now_s, score, where, refusals, self._registrations(), audit),
            in_force=in_force,
        )


def registrations_of(metagraph: Metagraph | None) -> Mapping[str, int] | None:
    """Block by registered hotkey; None before the chain was first read."""
    return None if metagraph is None else {neuron.hotkey: neuron.registered_at_block for neuron in metagraph.neurons}


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
