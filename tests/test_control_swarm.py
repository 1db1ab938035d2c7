"""A swarm whose run is changed while it trains: rate, length, back to a step; a fork of it. Every root is the reference's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

import iota
from benchmarks.determinism import reference_of
from iota.cli.main import main
from iota.prepare import PreparedData, prepare_data
from iota.sdk.local import OwnSwarm
from iota.swarm import SwarmOptions
from subnet.errors import Refused
from subnet.run.config import RunConfig
from subnet.run.runfile import load_run_file

ROOT = Path(__file__).resolve().parent.parent
MODEL = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    directory = tmp_path_factory.mktemp("text")
    words = (ROOT / "iota" / "assets" / "moby_dick.txt").read_text(encoding="utf-8")
    sources = [directory / "sea.txt", directory / "land.txt"]
    sources[0].write_text(words[:50_000], encoding="utf-8")
    sources[1].write_text(words[500_000:550_000], encoding="utf-8")
    return prepare_data([str(source) for source in sources], directory / "data", vocab_size=300)


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnSwarm]:
    options = SwarmOptions(device="cpu", measure_costs=False, start_s=240.0)
    with iota.local(miners=2, directory=tmp_path_factory.mktemp("swarm"), options=options) as running:
        assert isinstance(running, OwnSwarm)
        yield running


def run_of(swarm: OwnSwarm, data: PreparedData, name: str, **more: object) -> iota.Run:
    return swarm.train(
        iota.Model.from_config(MODEL),
        iota.Data.from_files(data.directory),
        iota.Pretrain(seq_len=32, batch_items=2, item_rows=2),
        iota.AdamW(lr=8e-3),
        iota.Constant(steps=200),
        stages=2,
        name=name,
        evaluation={"every_steps": 2, "rows": 4},
        snapshot={"every_steps": 2, "keep_steps": 100},
        audit={"before_seal": "none", "rate": 0.0},
        **more,  # pyright: ignore[reportArgumentType]
    )


def filed(swarm: OwnSwarm, name: str) -> RunConfig:
    return load_run_file(swarm.cache / "runs" / f"{name}.toml")


def test_rate_length_and_a_rollback_are_the_owners_to_the_bit(
    swarm: OwnSwarm, data: PreparedData, tmp_path: Path
) -> None:
    run = run_of(swarm, data, "changed")
    for report in run.reports(timeout_s=540):
        assert report.learning_rate == pytest.approx(8e-3)
        if report.step >= 3:
            break
    run.set_learning_rate(value=1e-3)  # forgotten by the rollback
    back = run.rollback(2)
    assert (back.step, back.state) == (2, "paused")
    assert run.set_learning_rate(factor=0.5).state == "paused"
    assert run.extend(5).steps == 5
    with pytest.raises(Refused, match="made 2 updates"):
        run.rollback(4)
    run.resume()
    rates = {report.step: report.learning_rate for report in run.reports(timeout_s=540)}
    assert [rates[step] for step in (3, 4, 5)] == pytest.approx([4e-3] * 3)

    config = filed(swarm, "changed")
    reference = reference_of(config, data, data.directory)
    reference.calibrate()
    for step in range(5):
        if step == 2:
            half = msgspec.structs.replace(config.optimizer, learning_rate=4e-3)
            reference.config = msgspec.structs.replace(config, optimizer=half)
        reference.step(step)
    assert run.root() == reference.state_root()

    found = run.holdout()
    assert found.step == 5
    assert set(found.sources) == {"sea.txt", "land.txt"}
    assert sum(found.sources.values()) / 2 == pytest.approx(found.loss)


@pytest.mark.slow
def test_a_fork_goes_on_with_weights_and_moments(swarm: OwnSwarm, data: PreparedData) -> None:
    """Its scales are new, so it is near what the run would have been, not equal."""
    run = run_of(swarm, data, "parent", steps=5)
    run.wait(timeout_s=540)
    config = filed(swarm, "parent")
    fork = run.fork("forked", step=4, run={"steps": 3}).wait(timeout_s=540)
    assert fork.last is not None
    losses = {report.step: report.loss for report in iota.attach(swarm.url, "forked", warn=False).reports(timeout_s=60)}
    reference = reference_of(config, data, data.directory)
    reference.calibrate()
    whole = [reference.step(step).loss for step in range(7)]
    assert [losses[step] for step in (1, 2, 3)] == pytest.approx(whole[4:7], rel=2e-3)


def test_a_wrong_word_says_what_is_allowed(capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        (["set-lr", "x"], "factor or a value"),
        (["set-lr", "x", "--factor", "0"], "above 0"),
        (["extend", "x", "--steps", "0"], "1 or more"),
    ):
        assert main(["run", *words]) == 2
        assert said in capsys.readouterr().err


def test_words_as_json_are_one_object(swarm: OwnSwarm, data: PreparedData, capsys: pytest.CaptureFixture[str]) -> None:
    run_of(swarm, data, "told")
    run = swarm.run("told")
    next(iter(run.reports(timeout_s=540)))
    wallet = [*("--wallet.name", swarm._wallet), *("--wallet.hotkey", swarm._wallet_hotkey or "default")]
    where = ["--validator.url", swarm.url, "--wallet.path", str(swarm._wallet_path), "--json"]
    capsys.readouterr()
    assert main(["run", "stop", "told", *wallet, *where]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["name"], said["steps"] < 200) == ("told", True)
    run.wait(timeout_s=540)
