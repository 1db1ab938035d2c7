"""Real processes under a plan of faults: the same root as undisturbed, each fault did happen, nobody evicted without cause."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from test_swarm import ROOT, RUN, START_S

from iota.chaos.journal import ChaosJournal, read_journal
from iota.chaos.plan import Kind, Ranges, make_plan_counted, needs_network
from iota.chaos.run import ChaosOptions, last_status, storm
from iota.chaos.swarm import ChaosSwarm, OwnGround
from iota.chaos.verdict import Demands, judge
from iota.swarm import SwarmOptions
from subnet.protocol.api import RunStatus
from subnet.run.config import RunConfig
from subnet.run.runfile import parse_run
from subnet.timing import Deadline

RUN_S = 400.0
STEPS = 14
KINDS = (Kind.KILL, Kind.PREEMPT, Kind.PAUSE, Kind.VALIDATOR_KILL, Kind.STORE_OUTAGE, Kind.PARTITION)
QUICK = Ranges(pause=(1.0, 2.0), back=(0.3, 0.6), validator_back=(0.3, 0.6), partition=(1.0, 2.0), outage=(1.0, 2.0))
pytestmark = pytest.mark.timeout(900)


def config_of(directory: Path, name: str) -> RunConfig:
    book = (ROOT / "iota" / "assets" / "moby_dick.txt").read_text(encoding="utf-8")
    (directory / "book.txt").write_text(book[:60_000], encoding="utf-8")
    config = parse_run(RUN, directory)
    return msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, name=name, steps=STEPS))


def test_a_storm_changes_no_bit(tmp_path: Path) -> None:
    config = config_of(tmp_path, "storm")
    plan = make_plan_counted(5, len(KINDS), KINDS, num_steps=STEPS - 3, ranges=QUICK)
    assert needs_network(plan)
    options = SwarmOptions(device="cpu", measure_costs=False, start_s=START_S)
    said: list[str] = []
    with ChaosSwarm(tmp_path / "swarm", config, 4, options) as swarm, ChaosJournal(tmp_path / "chaos") as journal:

        def fetch() -> RunStatus | None:
            return swarm.status(run="storm")

        result = storm(OwnGround(swarm), plan, journal, fetch, ChaosOptions(), RUN_S, say=said.append)
        assert not result.error, (result, said)
        assert result.finished
        last = last_status(swarm, "storm")
        assert last is not None
        assert len(last.steps) == STEPS
        swarm.submit(msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, name="calm")))
        calm = swarm.wait_until(
            lambda status: status.summary.name == "calm" and status.summary.state == "finished",
            Deadline.after(RUN_S),
        )
    verdict = judge(result, Demands(root=calm.summary.root))
    assert verdict.ok, (verdict, result.done, result.events)
    assert set(verdict.by_kind) == {kind.value for kind in KINDS}, (verdict, result.done, result.skipped)
    assert verdict.false_evictions == ()
    assert verdict.num_disruptions == len(KINDS)
    journaled = [entry.number for entry in read_journal(tmp_path / "chaos") if entry.what == "ended"]
    assert sorted(number for number in journaled if number is not None) == list(range(len(KINDS)))
    proxy = swarm.proxy
    assert proxy is not None
    assert proxy.links["store"].num_bytes > 100_000  # it did go through
    assert any(link.num_bytes > 10_000 for name, link in proxy.links.items() if name.endswith("/peers"))
