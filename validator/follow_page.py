"""The run's page as a follower serves it: what it has checked of the journals of others, and its own scores.

It keeps no records, so the journal can't be searched here; how long members are silent, and what the store is asked, only the
leader knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from subnet.errors import NotFound
from subnet.model.plan import ModelUnits
from subnet.protocol.api import RunStatus
from subnet.run.state import RunState
from validator.follow_run import FollowedRun
from validator.history import History
from validator.merge_lines import MergeLine
from validator.page_desk import PageDesk
from validator.page_sight import RunFacts, RunSight, facts_of
from validator.score_api import ScoreDesk

if TYPE_CHECKING:
    from validator.follow_node import FollowerNode


@dataclass
class FollowedSight:
    run: FollowedRun
    node: FollowerNode

    @property
    def run_id(self) -> str:
        return self.run.run_id

    @property
    def facts(self) -> RunFacts:
        planned = self.run.state.run
        if planned is None:
            raise NotFound(f"nothing of run {self.run.name} is checked yet", hint="its journal's first segment is read")
        units = ModelUnits(planned.unit_tensors, planned.unit_flops_per_token, planned.tied)
        return facts_of(planned.config, planned.cuts, units)

    @property
    def history(self) -> History:
        return self.run.history

    @property
    def state(self) -> RunState | None:
        return self.run.state

    def status(self) -> RunStatus:
        from validator.follow_api import status_of

        return status_of(self.node, self.run.run_id, 0).led()

    def peak_flops_per_s(self) -> float | None:
        return None

    def merges(self) -> tuple[MergeLine, ...]:
        return ()

    def journal_span(self) -> tuple[int, int]:
        return self.run.number, self.run.number

    def records(self, first: int, end: int) -> Sequence[bytes]:
        return ()


def follower_desk(node: FollowerNode, scores: ScoreDesk) -> PageDesk:
    from validator.follow_api import summary_of

    def find(name: str) -> RunSight:
        runs = node.reader.runs.values()
        run = next((run for run in runs if name in (run.name, run.run_id)), None)
        if run is None:
            known = ", ".join(run.name for run in runs) or "none"
            raise NotFound(f"run {name!r} isn't followed here", hint=f"followed: {known}")
        return FollowedSight(run, node)

    return PageDesk(
        find,
        lambda: tuple(summary_of(node, run) for run in node.reader.runs.values()),
        scores,
        lambda: node.side.weights_said,
        node.clock,
    )
