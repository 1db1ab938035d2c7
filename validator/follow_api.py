"""The HTTP interface of a follower: public reads, and its own policy. Whoever wants something led asks a validator that leads.

``GET /v1/hello``, ``/v1/status``, ``/v1/runs``, the scores (:mod:`validator.score_api`) and the run's page.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from subnet.errors import NotFound
from subnet.net.http import Call, Route, answer, create_app
from subnet.net.limits import RequestLimits
from subnet.protocol.api import MemberView, RunSummary
from subnet.protocol.follow_api import FOLLOWER, FollowedView, FollowerStatus
from subnet.protocol.messages import Hello
from subnet.protocol.signing import RequestVerifier
from subnet.run.state import RunState, end_step, works
from subnet.words import PROTOCOL_OLDEST, PROTOCOL_VERSION
from validator.follow_page import follower_desk
from validator.follow_run import FollowedRun
from validator.http_api import number_of
from validator.http_pages import PageApi
from validator.policy_desk import policy_routes
from validator.refusals import Refusals
from validator.score_api import ScoreDesk, registrations_of, score_routes

if TYPE_CHECKING:
    from validator.follow_node import FollowerNode

MAX_BREACHES = 50
MAX_VERDICTS = 50


def follower_app(node: FollowerNode, verifier: RequestVerifier) -> web.Application:
    async def hello(call: Call) -> web.StreamResponse:
        return answer(hello_of(node))

    async def status(call: Call) -> web.StreamResponse:
        return answer(status_of(node, call.request.query.get("run"), number_of(call, "steps", 20)))

    async def runs(call: Call) -> web.StreamResponse:
        return answer(tuple(summary_of(node, run) for run in node.reader.runs.values()))

    scores = _score_desk(node)
    page = PageApi(follower_desk(node, scores))
    routes = [
        Route("GET", "/v1/hello", hello, signed=False),
        Route("GET", "/v1/status", status, signed=False),
        Route("GET", "/v1/runs", runs, signed=False),
        *score_routes(scores),
        *policy_routes(node.policy_desk),
    ]
    app = create_app([*routes, *page.routes()], verifier, RequestLimits())
    app.on_shutdown.append(page.close)
    return app


def _score_desk(node: FollowerNode) -> ScoreDesk:
    return ScoreDesk(
        node.scores,
        lambda: _session(node),
        Refusals(),
        node.clock,
        registrations=lambda: registrations_of(node.side.metagraph),
        policies=node.policy_desk.view,
    )


class FollowedSession:
    """A followed run as the desk of scores wants it: what only its leader knows is left out."""

    def __init__(self, run: FollowedRun) -> None:
        self._run = run

    @property
    def run_name(self) -> str:
        return self._run.name

    @property
    def audit_state(self) -> RunState:
        return self._run.state

    def back_off_left(self, hotkey: str) -> float:
        return 0.0

    def waiting_for(self) -> str:
        return self._run.trouble


def _session(node: FollowerNode) -> FollowedSession | None:
    run = node.reader.current
    return None if run is None else FollowedSession(run)


def hello_of(node: FollowerNode) -> Hello:
    """Term 0: it leads nothing, so no miner works for it."""
    return Hello(
        protocol_min=PROTOCOL_OLDEST,
        protocol_max=PROTOCOL_VERSION,
        time_ns=node.clock.wall_ns(),
        hotkey=node.signer.hotkey,
        term=0,
        head_number=0,
        run=None,
        waiting_for="nothing: it follows the runs of others",
    )


def summary_of(node: FollowerNode, run: FollowedRun) -> RunSummary:
    state, history = run.state, run.history
    steps = end_step(state) if state.run is not None else 0
    return RunSummary(
        name=run.name,
        run_id=run.run_id,
        state="finished" if state.finished is not None else "running" if state.members else "waiting",
        place=0,
        step=max(0, state.next_step),
        steps=steps,
        loss=history.steps[-1].loss if history.steps else None,
        root=history.root,
        waiting_for=view_of(node, run).trouble,
    )


def view_of(node: FollowerNode, run: FollowedRun) -> FollowedView:
    """With the log store's own trouble, where it is that."""
    view, away = run.view(), node.reader.away
    if view.trouble or run.finished or not away:
        return view
    return msgspec.structs.replace(view, trouble=f"the log store can't be read: {away}", trouble_code="store")


def status_of(node: FollowerNode, name: str | None, num_steps: int) -> FollowerStatus:
    runs = node.reader.runs.values()
    run = next((run for run in runs if name in (run.name, run.run_id)), None) if name else node.reader.current
    if run is None:
        asked = f"run {name!r} isn't followed here" if name else "no run is followed yet"
        raise NotFound(asked, hint=node.reader.away or f"followed: {', '.join(run.name for run in runs) or 'none'}")
    history = run.history
    return FollowerStatus(
        role=FOLLOWER,
        summary=summary_of(node, run),
        time_ns=node.clock.wall_ns(),
        members=_members(run),
        steps=tuple(history.steps)[-num_steps:] if num_steps else (),
        tokens_per_s=history.tokens_per_s(),
        num_merges=history.num_merges,
        num_voids=history.num_voids,
        num_gone=history.num_gone,
        num_joined=history.num_joined,
        events=tuple(history.lines)[-50:],
        journal_length=run.number,
        journal_head=run.folded.head,
        store_bytes=0,
        weights=node.side.weights_said,
        final_holdout_loss=history.final_holdout,
        final_holdout_items=history.final_items,
        followed=tuple(view_of(node, one) for one in runs),
        breaches=tuple(run.breaches.items[-MAX_BREACHES:]),
        num_breaches=dict(sum((run.counts for run in runs), Counter[str]())),
        distrusted=tuple((hotkey, *where) for hotkey, where in sorted(node.reader.distrusted.items())),
        own_audits=_outcomes(run),
        verdicts=tuple(run.verdicts.items[-MAX_VERDICTS:]),
        proofs=str(node.directory),
    )


def _outcomes(run: FollowedRun) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for audit in run.audits.items:
        for outcome in ("passed", "failed", "undecided", "refused"):
            counts[outcome] += len(getattr(audit, outcome))
    return dict(counts)


def _members(run: FollowedRun) -> tuple[MemberView, ...]:
    """As the journal has them; how long they have been silent only their leader knows."""
    state = run.state
    return tuple(
        MemberView(
            hotkey=member.hotkey,
            incarnation=f"{member.term}.{member.number}",
            stage=info.stage,
            ready_for_step=info.version if info.version is not None else -2,
            leases=sum(len(work.held.get(member, ())) for work in works(state)),
            items_done=run.book.items_done(member.hotkey),
            seconds_per_item=None,
            heard_s_ago=0.0,
        )
        for member, info in sorted(state.members.items(), key=lambda pair: (pair[1].stage, pair[0]))
    )
