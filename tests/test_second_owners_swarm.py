"""Two owners a partition in a whole swarm: the root of one owner a partition, also when an owner dies."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from iota.swarm import LocalSwarm, SwarmOptions
from subnet.run.config import MergeSection, RunConfig
from subnet.run.runfile import parse_run
from subnet.timing import Deadline

ROOT = Path(__file__).resolve().parent.parent
RUN_S, POLL_S = 500.0, 0.02
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

RUN = """
[run]
name = "one"
steps = 4
[model.config]
model_type = "llama"
vocab_size = 2048
hidden_size = 64
intermediate_size = 192
num_hidden_layers = 2
num_attention_heads = 2
max_position_embeddings = 64
[data]
sources = ["book.txt"]
sequence_length = 32
[pipeline]
stages = 1
microbatches = 6
microbatch_rows = 2
[audit]
rate = 0.0
before_seal = "none"
[evaluation]
rows = 4
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    directory = tmp_path_factory.mktemp("book")
    book = (ROOT / "iota" / "assets" / "moby_dick.txt").read_text(encoding="utf-8")
    (directory / "book.txt").write_text(book[:60_000], encoding="utf-8")
    return parse_run(RUN, directory)


@pytest.fixture(scope="module")
def swarm(config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSwarm]:
    options = SwarmOptions(device="cpu", measure_costs=False, start_s=240.0)
    with LocalSwarm(tmp_path_factory.mktemp("swarm") / "swarm", config, 3, options) as running:
        yield running


def root_of(swarm: LocalSwarm, name: str) -> str:
    status = swarm.wait_until(
        lambda status: status.summary.name == name and status.summary.state == "finished", Deadline.after(RUN_S)
    )
    assert status.summary.root is not None
    return status.summary.root


def with_two(config: RunConfig, name: str) -> RunConfig:
    run = msgspec.structs.replace(config.run, name=name)
    return msgspec.structs.replace(config, run=run, merge=MergeSection(owners=2))


def test_two_owners_give_the_root_of_one_also_when_one_dies(swarm: LocalSwarm, config: RunConfig) -> None:
    root = root_of(swarm, "one")
    swarm.submit(with_two(config, "two"))
    assert root_of(swarm, "two") == root
    swarm.submit(with_two(config, "stormy"))
    swarm.wait_until(
        lambda status: status.summary.name == "stormy" and status.summary.step >= 1 and len(status.members) == 3,
        Deadline.after(RUN_S),
        poll_s=POLL_S,
    )
    swarm.kill(0)
    assert swarm.wait_end(0, Deadline.after(20)) == -signal.SIGKILL
    assert root_of(swarm, "stormy") == root
    status = swarm.status()
    assert status is not None
    assert status.num_gone >= 1  # the fault did happen
