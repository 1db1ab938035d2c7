"""The SDK with a real swarm: steps come live, to the bit as elsewhere, in scripts, notebooks and asyncio, and after Ctrl-C."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

import iota
from benchmarks.determinism import reference_of, trained_root
from iota.cli.main import main
from iota.prepare import prepare_data
from iota.processes import ProcessFailed
from iota.sdk.local import OwnSwarm
from iota.swarm import SwarmOptions
from subnet.errors import ConfigError, DeadlinePassed, NotFound, Refused
from subnet.timing import Deadline

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
ITEMS = iota.Pretrain(seq_len=32, batch_items=4, item_rows=2)
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("book") / "book.txt"
    path.write_text((ROOT / "iota" / "assets" / "moby_dick.txt").read_text(encoding="utf-8")[:60_000], encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnSwarm]:
    options = SwarmOptions(device="cpu", measure_costs=False, start_s=240.0)
    with iota.local(miners=3, directory=tmp_path_factory.mktemp("swarm"), options=options) as running:
        assert isinstance(running, OwnSwarm)
        yield running


def train(swarm: iota.Swarm, book: Path, name: str, steps: int = 4, **more: object) -> iota.Run:
    return swarm.train(
        iota.Model.from_config(MODEL),
        iota.Data.from_files(book),
        ITEMS,
        iota.AdamW(lr=1e-2),
        iota.Cosine(steps=steps),
        stages=2,
        name=name,
        evaluation={"every_steps": 2, "rows": 4},
        **more,  # pyright: ignore[reportArgumentType]
    )


class Recorder(iota.Callback):
    def __init__(self) -> None:
        self.told: list[str] = []

    def on_prepare(self, text: str) -> None:
        self.told.append("prepare")

    def on_run_begin(self, run: iota.Run) -> None:
        self.told.append("begin")

    def on_step_end(self, run: iota.Run, report: iota.StepReport) -> None:
        self.told.append(f"step {report.step}")

    def on_evaluate(self, run: iota.Run, evaluation: iota.Evaluation) -> None:
        self.told.append(f"evaluate {evaluation.step}")

    def on_disruption(self, run: iota.Run, disruption: iota.Disruption) -> None:
        self.told.append(disruption.kind)

    def on_run_end(self, run: iota.Run) -> None:
        self.told.append("end")

    def on_detach(self, run: iota.Run) -> None:
        self.told.append("detach")


def test_a_run_is_trained_told_and_given_back(swarm: OwnSwarm, book: Path, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    recorder = Recorder()
    callbacks = [recorder, iota.TensorBoard(tmp_path / "logs"), iota.ProgressBar()]
    run = train(swarm, book, "first", callbacks=callbacks, snapshot={"every_steps": 2})
    with pytest.raises(NotFound, match="no root yet"):
        run.root()
    reports = list(run)
    assert [report.step for report in reports] == [1, 2, 3, 4]
    assert reports[-1].loss < reports[0].loss
    assert [report.tokens for report in reports] == [256] * 4
    told = [line for line in recorder.told if line != "prepare"]
    assert told == [
        "begin", "evaluate 0", "step 1", "step 2", "evaluate 2", "step 3", "step 4", "evaluate 4", "end",
    ]  # fmt: skip
    assert recorder.told[0] == "prepare"
    written = EventAccumulator(str(tmp_path / "logs" / "first")).Reload()
    losses = [(event.step, event.value) for event in written.Scalars("train/loss")]
    assert losses == [(report.step, pytest.approx(report.loss)) for report in reports]
    assert [event.step for event in written.Scalars("holdout/loss")] == [0, 2, 4]
    assert run.state() == "finished"
    assert run.evaluate().step == 4
    assert run.evaluate().loss < (reports[0].holdout_loss or 0)
    config = run.settings()
    assert config["optimizer"]["learning_rate"] == 1e-2

    prepared = prepare_data([book], tmp_path / "data", vocab_size=300, holdout_fraction=0.05)
    expected = trained_root(reference_of(run._config, prepared, prepared.directory), 4)  # pyright: ignore
    assert run.root() == expected

    model = run.model()
    assert model.num_parameters() == swarm.run("first").model().num_parameters() == 39_840
    assert run.model() is model
    assert run.model(step=2) is not model
    torch_state = __import__("torch").random.get_rng_state()
    one, two = run.sample("The whale", max_new_tokens=8), run.sample("The whale", max_new_tokens=8)
    assert one == two
    assert one.startswith("The whale")
    assert (torch_state == __import__("torch").random.get_rng_state()).all()
    assert run.tokenizer()("whale").input_ids
    done = run.export(tmp_path / "model", step=2)
    assert (done.step, done.directory) == (2, tmp_path / "model")
    assert list(run) == []


def test_a_submission_that_fails_says_why_and_the_next_one_works(swarm: OwnSwarm, book: Path) -> None:
    with pytest.raises(ConfigError, match=r"pipeline\.stages = 3"):
        swarm.train(iota.Model.from_config(MODEL), iota.Data.from_files(book), ITEMS, stages=3, name="thirds")
    assert [run.name for run in swarm.runs()] == ["first"]
    run = train(swarm, book, "second", steps=2)
    assert [report.step for report in run.reports(timeout_s=300)] == [1, 2]


@pytest.mark.slow
async def test_asyncio_iterates_and_awaits_while_a_second_run_queues(swarm: OwnSwarm, book: Path) -> None:
    one, two = [await asyncio.to_thread(train, swarm, book, name, steps=3) for name in ("one", "two")]
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0.01)

    ticking = asyncio.create_task(tick())
    assert [report.step async for report in one] == [1, 2, 3]
    assert await two is two
    assert two.last is not None
    assert two.last.step == 3
    ticking.cancel()
    assert ticks > 10  # the loop was free
    assert one.root() == two.root()  # blocking calls work here too, as in a notebook


def test_ctrl_c_stops_the_looking_and_says_how_to_look_again(
    swarm: OwnSwarm, book: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = Recorder()
    run = train(swarm, book, "interrupted", steps=20, callbacks=[recorder])

    def iterate() -> None:
        for report in run:
            if report.step == 2:
                threading.Timer(0.05, lambda: os.kill(os.getpid(), signal.SIGINT)).start()

    with pytest.raises(KeyboardInterrupt):
        iterate()
    said = capsys.readouterr().err
    assert 'swarm.run("interrupted")' in said
    assert recorder.told[-1] == "detach"
    with pytest.raises(DeadlinePassed, match="hasn't finished within 0 s"):
        list(run.reports(timeout_s=0.0))
    again = swarm.run("interrupted").skip_to(3)
    assert next(iter(again)).step == 4
    assert next(iter(again.reports())).step > 4
    assert [report.step for report in again][-1] == 20
    with pytest.raises(NotFound, match="it has: first"):
        iota.attach(swarm.url, "unknown", warn=False)


def test_a_run_is_paused_resumed_and_stopped_by_its_owner(swarm: OwnSwarm, book: Path, tmp_path: Path) -> None:
    run = train(swarm, book, "stopped", steps=500)
    reports = iter(run)
    assert next(reports).step == 1
    assert run.pause().name == "stopped"
    paused = _standing(run)
    assert run.state() == "paused"
    time.sleep(1.0)
    assert run.status().summary.step == paused
    wallet = ["--validator.url", swarm.url, "--wallet.name", "owner", "--wallet.path", str(swarm.directory / "wallets")]
    assert main(["run", "resume", "stopped", *wallet]) == 0
    while next(reports).step <= paused:
        pass
    ends = run.stop().steps
    assert paused < ends < 500
    assert [report.step for report in reports][-1] == ends
    assert (run.state(), run.evaluate().step) == ("finished", ends)
    with pytest.raises(Refused, match="has finished") as refused:
        run.pause()
    assert refused.value.code == "run_over"
    prepared = prepare_data([book], tmp_path / "data", vocab_size=300, holdout_fraction=0.05)
    reference = reference_of(run._config, prepared, prepared.directory)  # pyright: ignore
    assert run.root() == trained_root(reference, ends)
    assert run.model().num_parameters() == 39_840


def _standing(run: iota.Run) -> int:
    """The step at which it stands still, once the open one is sealed."""
    deadline = Deadline.after(240)
    while (summary := run.status().summary).waiting_for != "its owner, who has paused it":
        deadline.check(f"the open step to be sealed: {summary.waiting_for}")
        time.sleep(0.2)
    return summary.step


@pytest.mark.slow
def test_a_swarm_that_is_elsewhere_is_warned_of_once(swarm: OwnSwarm, book: Path) -> None:
    """The same validator by its URL: another process submits, with the owner's wallet."""
    with iota.connect(swarm.url, "owner", wallet_path=swarm.directory / "wallets", same_class=True) as elsewhere:
        with pytest.warns(iota.DataIsVisible, match="will see this run's text"):
            run = train(elsewhere, book, "elsewhere", steps=2)
        assert run.wait(timeout_s=300).last is not None
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(ConfigError, match=r"pipeline\.stages"):
                elsewhere.train(iota.Model.from_config(MODEL), iota.Data.from_files(book), ITEMS, stages=3)
            attached = iota.attach(swarm.url, "elsewhere", "owner", wallet_path=swarm.directory / "wallets", warn=False)
        assert [report.step for report in attached] == [1, 2]
        assert attached.model().num_parameters() == 39_840


@pytest.mark.slow
def test_wandb_keeps_a_run_offline(swarm: OwnSwarm, book: Path, tmp_path: Path) -> None:
    """In a process of its own: it starts one, and keeps it."""
    pytest.importorskip("wandb")
    train(swarm, book, "kept", steps=2)
    code = (
        "import sys, iota\n"
        "run = iota.attach(sys.argv[1], 'kept', warn=False,"
        " callbacks=[iota.WandB('t', mode='offline', directory=sys.argv[2])])\n"
        "run.wait(timeout_s=100)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, swarm.url, str(tmp_path)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb")), done.stderr


def test_a_swarm_whose_validator_died_says_so(tmp_path: Path, swarm: OwnSwarm, book: Path) -> None:
    """The last one: it ends the module's swarm."""
    run = train(swarm, book, "orphan", steps=1000)
    reports = iter(run)
    assert next(reports).step == 1
    swarm.processes.kill(swarm.processes.leader)
    with pytest.raises(ProcessFailed, match="validator was ended by signal 9"):
        list(reports)


@pytest.mark.slow
def test_the_page_of_the_sdk_runs(book: Path, tmp_path: Path) -> None:
    """Every block of ``docs/sdk.md``, in order, as one program."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "sdk.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) >= 6
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "book.txt").write_bytes(book.read_bytes())
    (tmp_path / "page.py").write_text("\n".join(blocks))
    done = subprocess.run(
        [sys.executable, "page.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=550,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for name in iota.__all__:
        assert f"iota.{name}" in (ROOT / "docs" / "sdk.md").read_text(encoding="utf-8") or name in ("Run", "Swarm")
