"""Rounds of local steps in a whole swarm: what comes out is what one process computes, whoever died, joined or was cut how."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from benchmarks.cheats import cheating
from benchmarks.determinism import reference_of, trained_root
from iota.audit_fetch import list_cases
from iota.prepare import prepare_data
from iota.swarm import LocalSwarm, SwarmOptions
from subnet.run.config import AuditSection, RunConfig
from subnet.run.runfile import parse_run
from subnet.timing import Deadline

ROOT = Path(__file__).resolve().parent.parent
START_S, RUN_S, POLL_S = 240.0, 900.0, 0.02
pytestmark = pytest.mark.timeout(2400)  # the waits are deadlines, not expectations: a machine may be busy

RUN = """
[run]
name = "lanes"
steps = 3
[model.config]
model_type = "llama"
vocab_size = 300
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 3
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
microbatches = 2
microbatch_rows = 2
[lanes]
count = 3
inner_steps = 3
[audit]
rate = 0.0
before_seal = "none"
[snapshot]
every_steps = 2
[evaluation]
rows = 4
"""


AUDITS = AuditSection(rate=0.5, before_seal="probation", probation_items=2, window_steps=2)
EVERYTHING = AuditSection(rate=0.0, before_seal="all", window_steps=2)


def changed(config: RunConfig, name: str, **pipeline: int) -> RunConfig:
    return msgspec.structs.replace(
        config,
        run=msgspec.structs.replace(config.run, name=name),
        pipeline=msgspec.structs.replace(config.pipeline, **pipeline),
    )


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    directory = tmp_path_factory.mktemp("book")
    book = (ROOT / "iota" / "assets" / "moby_dick.txt").read_text(encoding="utf-8")
    (directory / "book.txt").write_text(book[:60_000], encoding="utf-8")
    return parse_run(RUN, directory)


@pytest.fixture(scope="module")
def swarm(config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSwarm]:
    options = SwarmOptions(device="cpu", measure_costs=False, start_s=START_S, spare_miners=2)
    with LocalSwarm(tmp_path_factory.mktemp("swarm") / "swarm", config, 3, options) as running:
        yield running


def root_of(swarm: LocalSwarm, name: str) -> str:
    """The root of a run, once it is the finished one."""
    status = swarm.wait_until(
        lambda status: status.summary.name == name and status.summary.state == "finished", Deadline.after(RUN_S)
    )
    assert status.summary.root is not None
    return status.summary.root


@pytest.fixture(scope="module")
def calm_root(swarm: LocalSwarm) -> str:
    return root_of(swarm, "lanes")


def test_a_run_of_rounds_gives_the_references_bits(
    swarm: LocalSwarm, config: RunConfig, calm_root: str, tmp_path: Path
) -> None:
    """The reference: plain ``transformers`` in one process."""
    status = swarm.status(steps=100)
    assert status is not None
    losses = [view.loss for view in status.steps if view.step >= 0]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    data = prepare_data([Path(config.data.sources[0])], tmp_path / "data", vocab_size=300, holdout_fraction=0.1)
    prepared = msgspec.structs.replace(
        config, data=msgspec.structs.replace(config.data, sources=(str(tmp_path / "data"),))
    )
    try:
        assert calm_root == trained_root(reference_of(prepared, data, tmp_path / "data"), 3)
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)


def test_other_cuts_change_no_bit(swarm: LocalSwarm, config: RunConfig, calm_root: str) -> None:
    swarm.submit(changed(config, "three", stages=3))
    assert root_of(swarm, "three") == calm_root


def test_a_kill_in_the_middle_of_a_round_and_a_join_change_no_bit(
    swarm: LocalSwarm, config: RunConfig, calm_root: str
) -> None:
    swarm.submit(changed(config, "stormy"))
    at_work = swarm.wait_until(
        lambda status: status.summary.name == "stormy" and status.summary.step >= 1 and len(status.members) >= 2,
        Deadline.after(RUN_S),
        poll_s=POLL_S,
    )
    stages = [member.stage for member in at_work.members]
    alone = next(member for member in at_work.members if stages.count(member.stage) == 1)  # so somebody has to join
    victim = next(i for i in range(3) if swarm.miner_hotkey(i) == alone.hotkey)
    swarm.kill(victim)
    swarm.add_miner()
    assert swarm.wait_end(victim, Deadline.after(20)) == -signal.SIGKILL
    assert root_of(swarm, "stormy") == calm_root
    status = swarm.status()
    assert status is not None
    assert status.num_gone >= 1  # the fault did happen


@pytest.mark.slow
def test_parts_through_the_store_change_no_bit(swarm: LocalSwarm, config: RunConfig, calm_root: str) -> None:
    """Nobody is connected to: each part is found by the hash that the journal names."""
    stored = changed(config, "stored")
    swarm.submit(msgspec.structs.replace(stored, pipeline=msgspec.structs.replace(stored.pipeline, boundaries="store")))
    assert root_of(swarm, "stored") == calm_root


def test_audits_redo_lanes_and_change_no_bit(swarm: LocalSwarm, config: RunConfig, calm_root: str) -> None:
    """The validator dies meanwhile, and what it had open goes on."""
    swarm.submit(msgspec.structs.replace(changed(config, "audited"), audit=AUDITS))
    swarm.wait_until(
        lambda status: status.summary.name == "audited" and status.audits is not None and status.audits.done > 0,
        Deadline.after(RUN_S),
        poll_s=POLL_S,
    )
    swarm.kill("validator")
    assert swarm.wait_end("validator", Deadline.after(30)) == -signal.SIGKILL
    swarm.start_validator()
    assert root_of(swarm, "audited") == calm_root
    status = swarm.status()
    assert status is not None
    assert status.audits is not None
    assert (status.audits.open, status.audits.cases) == (0, 0)


@pytest.mark.slow
def test_a_lie_about_a_lane_is_found_before_its_seal(
    swarm: LocalSwarm, config: RunConfig, calm_root: str, tmp_path: Path
) -> None:
    """One behaviour of one miner is altered: it goes back from other gradients than it was given."""
    cheat = cheating("wrong_backward", tmp_path / "notes")
    options = SwarmOptions(device="cpu", measure_costs=False, start_s=START_S, before_miners={0: cheat})
    lied = msgspec.structs.replace(changed(config, "lied"), audit=EVERYTHING)
    with LocalSwarm(tmp_path / "swarm", lied, 4, options) as running:
        assert root_of(running, "lied") == calm_root
        (view,) = list_cases(running.validator_url, Deadline.after(30))
        assert (view.hotkey, view.charge, view.state) == (running.miner_hotkey(0), "partial", "convicted")
        assert view.digest in dict(view.witnesses).values(), "a third party ran it"
