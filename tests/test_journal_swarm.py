"""A validator that is drained, moved to PostgreSQL, started there, drained and moved back, under live miners: the same bits."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from postgres_server import Server

from iota.cli.main import main
from iota.swarm import LocalSwarm
from subnet.run.config import RunConfig
from subnet.run.runfile import parse_run
from subnet.timing import Deadline
from validator.journal_move import move, show
from validator.journals import Journals

RUN_S, POLL_S = 240.0, 0.2
RUN = """
[run]
name = "calm"
steps = 8
[model.config]
model_type = "llama"
vocab_size = 300
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 4
num_attention_heads = 2
[data]
sources = ["book.txt"]
sequence_length = 32
holdout_fraction = 0.1
[pipeline]
stages = 2
microbatches = 4
microbatch_rows = 2
[audit]
rate = 0.0
before_seal = "none"
"""


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[LocalSwarm]:
    swarm = LocalSwarm(tmp_path / "swarm", None, 3)
    with swarm:
        yield swarm


def root_of(swarm: LocalSwarm, name: str) -> str:
    status = swarm.wait_until(
        lambda s: s.summary.name == name and bool(s.summary.root), Deadline.after(RUN_S), poll_s=POLL_S
    )
    assert status.summary.root is not None
    return status.summary.root


def drained(swarm: LocalSwarm, *, by_command: bool = False) -> None:
    if by_command:
        wallet = ("--wallet.name", "validator", "--wallet.path", str(swarm._keys.path))
        assert main(["validator", "drain", "--validator.url", swarm.validator_url, *wallet]) == 0
    else:
        swarm.kill("validator", signal.SIGUSR1)
    assert swarm.wait_end("validator", Deadline.after(60)) == 0


def start(swarm: LocalSwarm, journal_url: str) -> None:
    settings = msgspec.structs.replace(swarm._validator_settings("validator", None), journal_url=journal_url)
    swarm._request("validator", "validator", settings)


def step(swarm: LocalSwarm, name: str, at_least: int) -> None:
    swarm.wait_until(
        lambda s: s.summary.name == name and s.summary.step >= at_least, Deadline.after(RUN_S), poll_s=POLL_S
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_moved_there_and_back_without_losing_a_step(swarm: LocalSwarm, postgres: Server, tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("Call me Ishmael. Some years ago, never mind how long precisely. " * 400)
    config: RunConfig = parse_run(RUN, tmp_path)
    files, database = Journals(), Journals(postgres.url())
    swarm.submit(config)
    calm = root_of(swarm, "calm")
    swarm.submit(msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, name="moved")))
    directory = swarm._validator_settings("validator", None).directory.expanduser()
    step(swarm, "moved", 2)
    drained(swarm)
    before = {run.run: run for run in move(directory, files, database)}
    assert before["moved"].what == "moved"
    start(swarm, database.url)
    step(swarm, "moved", 5)
    drained(swarm, by_command=True)
    at = {run.run: run for run in show(directory, database)}
    assert at["moved"].place == "postgresql"
    assert at["moved"].records > before["moved"].records
    after = {run.run: run for run in move(directory, database, files)}
    assert (after["moved"].what, after["moved"].head) == ("moved", at["moved"].head)
    start(swarm, "")
    assert root_of(swarm, "moved") == calm
    status = swarm.status()
    assert status is not None
    assert status.num_voids == 0
    assert (directory / "runs" / "moved" / "journal.db").exists()
