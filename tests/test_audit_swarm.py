"""Audits in a whole swarm of real processes: they change no bit of honest work, survive a dead validator, and undo a lie."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from benchmarks.cheats import cheating, lies_told
from iota.audit_fetch import fetch_case, list_cases
from iota.swarm import LocalSwarm, SwarmOptions
from subnet.protocol.api import RunStatus
from subnet.run import events as ev
from subnet.run.config import NO_AUDITS, AuditSection, RunConfig
from subnet.run.runfile import parse_run
from subnet.timing import Deadline

ROOT = Path(__file__).resolve().parent.parent
START_S, RUN_S = 240.0, 400.0
pytestmark = pytest.mark.timeout(900)  # the waits are deadlines, not expectations: a machine may be busy
AUDITS = AuditSection(rate=0.5, before_seal="probation", probation_items=4, window_steps=2)
EVERYTHING = AuditSection(rate=0.0, before_seal="all", window_steps=2)
REWINDING = AuditSection(rate=1.0, before_seal="probation", probation_items=1, window_steps=2, rewind=True)

RUN = """
[run]
name = "off"
steps = 4
[model.config]
model_type = "llama"
vocab_size = 300
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 2
num_attention_heads = 2
max_position_embeddings = 64
[data]
sources = ["book.txt"]
sequence_length = 32
holdout_fraction = 0.1
[optimizer]
learning_rate = 1e-2
[pipeline]
stages = 2
microbatches = 4
microbatch_rows = 2
[snapshot]
every_steps = 2
[evaluation]
rows = 4
"""


def audited(config: RunConfig, name: str, audit: AuditSection) -> RunConfig:
    return msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, name=name), audit=audit)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    directory = tmp_path_factory.mktemp("book")
    book = (ROOT / "iota" / "assets" / "moby_dick.txt").read_text(encoding="utf-8")
    (directory / "book.txt").write_text(book[:60_000], encoding="utf-8")
    return audited(parse_run(RUN, directory), "off", NO_AUDITS)


@pytest.fixture(scope="module")
def swarm(config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSwarm]:
    options = SwarmOptions(device="cpu", measure_costs=False, start_s=START_S)
    with LocalSwarm(tmp_path_factory.mktemp("swarm") / "swarm", config, 4, options) as running:
        yield running


def finished(swarm: LocalSwarm, name: str) -> RunStatus:
    return swarm.wait_until(
        lambda status: status.summary.name == name and status.summary.state == "finished", Deadline.after(RUN_S)
    )


@pytest.fixture(scope="module")
def true_root(swarm: LocalSwarm) -> str | None:
    status = finished(swarm, "off")
    assert status.audits is None, "a run without audits has none"
    return status.summary.root


def journal_of(swarm: LocalSwarm, name: str) -> list[ev.AnyEvent]:
    path = swarm.directory / "validator" / "runs" / name / "journal.db"
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        rows = [data for (data,) in connection.execute("SELECT data FROM records ORDER BY number")]
    return [msgspec.msgpack.decode(data, type=ev.Record).event for data in rows]


def test_honest_work_passes_and_not_a_bit_changes(swarm: LocalSwarm, config: RunConfig, true_root: str | None) -> None:
    swarm.submit(audited(config, "audited", AUDITS))
    status = finished(swarm, "audited")
    assert status.summary.root == true_root
    costs = status.audits
    assert costs is not None
    assert (costs.open, costs.cases, costs.repeated) == (0, 0, 0)
    events = journal_of(swarm, "audited")
    opened = {event.audit: event for event in events if isinstance(event, ev.AuditOpened)}
    closed = {event.audit: event for event in events if isinstance(event, ev.AuditClosed)}
    assert set(opened) == set(closed)
    assert costs.done >= len(opened) > 0
    assert any(event.number for event in opened.values()), "some were before the seal"
    for number, event in closed.items():
        assert event.passed == opened[number].members, event
    windows = [event.window for event in events if isinstance(event, ev.WindowClosed)]
    assert windows == [event.window for event in events if isinstance(event, ev.WindowAudited)] == [0, 1]
    assert costs.compute_s > 0
    assert costs.receipted_s > 0
    assert costs.read_bytes > 0
    assert costs.evidence_bytes > 0


def test_open_audits_go_on_after_the_validator_died(
    swarm: LocalSwarm, config: RunConfig, true_root: str | None
) -> None:
    name = "interrupted"
    swarm.submit(audited(config, name, EVERYTHING))
    swarm.wait_until(
        lambda s: s.summary.name == name and s.audits is not None and (s.audits.open > 0 or s.audits.done > 1),
        Deadline.after(RUN_S),
        poll_s=0.05,
    )
    swarm.kill("validator")
    assert swarm.wait_end("validator", Deadline.after(30)) == -signal.SIGKILL
    swarm.start_validator()
    assert finished(swarm, name).summary.root == true_root
    failed = [e for e in journal_of(swarm, name) if isinstance(e, ev.AuditClosed) and (e.failed or e.unopened)]
    assert not failed


def test_a_lie_is_found_undone_and_can_be_run_again_by_anyone(
    swarm: LocalSwarm, config: RunConfig, true_root: str | None, tmp_path: Path
) -> None:
    """A member whose gradients are wrong is convicted with a third party's word; the run ends as if it had never been."""
    options = SwarmOptions(
        device="cpu",
        measure_costs=False,
        start_s=START_S,
        before_miners={0: cheating("wrong_backward", tmp_path / "notes")},
    )
    lied = audited(config, "lied", EVERYTHING)
    with LocalSwarm(tmp_path / "swarm", lied, 4, options) as running:
        status = finished(running, "lied")
        assert status.summary.root == true_root
        assert status.audits is not None
        assert status.audits.convicted == 1
        (view,) = list_cases(running.validator_url, Deadline.after(30))
        assert (view.hotkey, view.charge, view.state) == (running.miner_hotkey(0), "partial", "convicted")
        assert view.digest in dict(view.witnesses).values()
        out = tmp_path / "bundle"
        fetched = fetch_case(running.validator_url, view.case, out, Deadline.after(60))
        assert fetched.fetched_bytes > 0
    replayed = subprocess.run(
        [sys.executable, "-m", "iota.cli.main", "audit", "replay", str(out)],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=ROOT,
    )
    assert replayed.returncode == 1, replayed.stdout + replayed.stderr


def test_a_sealed_lie_is_rewound_though_the_validator_dies_with_its_case_open(
    swarm: LocalSwarm, config: RunConfig, true_root: str | None, tmp_path: Path
) -> None:
    """A member that lies once its probation is over: its work is sealed, found out, and undone on another branch."""
    notes, name = tmp_path / "notes", "rewound"
    cheat = cheating("scaled_gradient", notes, honest_while="probation")
    options = SwarmOptions(device="cpu", measure_costs=False, start_s=START_S, before_miners={0: cheat})
    with LocalSwarm(tmp_path / "swarm", audited(config, name, REWINDING), 4, options) as running:
        running.wait_until(
            lambda status: status.audits is not None and status.audits.cases > 0, Deadline.after(RUN_S), poll_s=0.05
        )
        running.kill("validator")
        assert running.wait_end("validator", Deadline.after(30)) == -signal.SIGKILL
        running.start_validator()
        status = finished(running, name)
        assert lies_told(notes), "it did lie"
        assert status.summary.root == true_root
        events = journal_of(running, name)
        rewound = [event for event in events if isinstance(event, ev.Rewound)]
        assert [event.branch for event in rewound] == list(range(1, len(rewound) + 1))
        assert rewound
        cases = [event for event in events if isinstance(event, ev.CaseOpened)]
        assert {case.hotkey for case in cases} == {running.miner_hotkey(0)}
        assert cases[0].sealed
        assert [event.outcome for event in events if isinstance(event, ev.CaseClosed)][-1] == "convicted"
        (view, *_) = list_cases(running.validator_url, Deadline.after(60), run=name)
        assert (view.hotkey, view.state) == (running.miner_hotkey(0), "convicted")
