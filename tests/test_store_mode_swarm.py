"""A swarm of processes whose tensors go through the store: the root of straight links, and of the reference in one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from benchmarks.reference import Reference
from benchmarks.setting import stream_tokens
from iota.prepare import PreparedData, prepare_data
from iota.swarm import LocalSwarm, SwarmOptions
from subnet.protocol.api import RunStatus
from subnet.protocol.wire import blob_hash
from subnet.run.config import (
    NO_AUDITS,
    DataSection,
    EvaluationSection,
    ModelSection,
    OptimizerSection,
    PipelineSection,
    RunConfig,
    RunSection,
    SnapshotSection,
)
from subnet.timing import Deadline

ROOT = Path(__file__).resolve().parent.parent
START_S, RUN_S = 240.0, 240.0
STEPS, MICROBATCHES = 3, 4
CLOSED_PORT = 1
pytestmark = pytest.mark.timeout(600)  # the waits are deadlines, not expectations: a machine may be busy

MODEL = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreparedData, Path]:
    directory = tmp_path_factory.mktemp("book")
    book = (ROOT / "iota" / "assets" / "moby_dick.txt").read_text(encoding="utf-8")
    (directory / "book.txt").write_text(book[:60_000], encoding="utf-8")
    prepared = directory / "data"
    return prepare_data([directory / "book.txt"], prepared, vocab_size=300, holdout_fraction=0.1), prepared


def a_config(data: Path, name: str, *, boundaries: str = "straight", stages: int = 2) -> RunConfig:
    return RunConfig(
        audit=NO_AUDITS,
        run=RunSection(name=name, seed=3, steps=STEPS),
        model=ModelSection(config=MODEL),
        data=DataSection(sources=(str(data),), sequence_length=32),
        optimizer=OptimizerSection(learning_rate=1e-2),
        pipeline=PipelineSection(stages=stages, microbatches=MICROBATCHES, microbatch_rows=2, boundaries=boundaries),
        snapshot=SnapshotSection(every_steps=2),
        evaluation=EvaluationSection(rows=4),
    )


@pytest.fixture(scope="module")
def swarm(data: tuple[PreparedData, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSwarm]:
    options = SwarmOptions(device="cpu", measure_costs=False, start_s=START_S, spare_miners=1)
    first = a_config(data[1], "by-store", boundaries="store", stages=3)
    with LocalSwarm(tmp_path_factory.mktemp("swarm") / "swarm", first, 4, options) as running:
        yield running


def finished(swarm: LocalSwarm, name: str) -> RunStatus:
    return swarm.wait_until(
        lambda status: status.summary.name == name and status.summary.state == "finished", Deadline.after(RUN_S)
    )


@pytest.fixture(scope="module")
def reference_root(data: tuple[PreparedData, Path]) -> str:
    prepared, directory = data
    files = {blob_hash(path.read_bytes()): path for path in directory.iterdir() if path.is_file()}

    def read(blob: str) -> bytes:
        return next(path for name, path in files.items() if name == blob).read_bytes()

    streams = [
        stream_tokens(prepared.manifest, part, read) for part in (prepared.manifest.train, prepared.manifest.holdout)
    ]
    reference = Reference(a_config(directory, "reference", stages=1), dict(MODEL), *streams)
    reference.calibrate()
    for step in range(STEPS):
        reference.step(step)
    return reference.state_root()


def test_a_run_by_store_with_a_kill_has_the_references_root_and_is_counted(
    swarm: LocalSwarm, reference_root: str
) -> None:
    at_work = swarm.wait_until(
        lambda status: status.summary.step >= 1 and len(status.members) == 4, Deadline.after(RUN_S + START_S)
    )
    swarm.kill(next(i for i in range(4) if swarm.miner_hotkey(i) == at_work.members[-1].hotkey))
    status = finished(swarm, "by-store")
    assert status.summary.root == reference_root
    assert status.num_gone >= 1, "the fault did happen"
    assert status.store is not None
    boundaries = 2 * 2 * MICROBATCHES * (STEPS + 1)
    used, granted = status.store.reported, status.store.granted
    assert used.puts >= boundaries
    assert used.gets >= boundaries
    assert used.bytes_up >= boundaries * 2 * 32 * 32 * 4
    assert granted.puts >= boundaries


def test_one_that_nobody_can_connect_to_takes_part_by_store(
    swarm: LocalSwarm, data: tuple[PreparedData, Path], reference_root: str
) -> None:
    """It announces a port where nobody listens; the others go straight with each other."""
    hidden = swarm.num_miners
    settings = msgspec.structs.replace(swarm._miner_settings(hidden), announce_port=CLOSED_PORT)
    swarm._request(f"miner-{hidden}", "miner", settings)
    swarm.num_miners += 1
    swarm.submit(a_config(data[1], "mixed"))
    hotkey = swarm.miner_hotkey(hidden)
    done: dict[str, int] = {}

    def note(status: RunStatus) -> None:
        if status.summary.name == "mixed":
            done.update((member.hotkey, member.items_done) for member in status.members)

    swarm.wait_until(
        lambda status: status.summary.name == "mixed" and status.summary.state == "finished",
        Deadline.after(RUN_S),
        seen=note,
    )
    status = finished(swarm, "mixed")
    assert status.summary.root == reference_root
    assert "not reachable at" in swarm.log_of(hidden).read_text()
    assert done.get(hotkey, 0) > 0, "it worked"
    assert status.store is not None
    assert status.store.reported.puts > 0
