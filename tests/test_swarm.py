"""A whole swarm, real processes and sockets: what comes out doesn't depend on who died, joined, or where the model was cut."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from benchmarks.determinism import reference_of, trained_root
from iota.entries import StoreSettings
from iota.live import LiveView, headline, render, sparkline
from iota.prepare import prepare_data
from iota.swarm import LocalSwarm, SwarmOptions
from subnet.errors import ConfigError
from subnet.protocol.api import RunStatus
from subnet.run.config import RunConfig
from subnet.run.runfile import parse_run
from subnet.timing import Deadline

ROOT = Path(__file__).resolve().parent.parent
START_S, RUN_S = 240.0, 240.0
POLL_S = 0.02
"""Where a moment in the middle of a run is waited for: five steps may take less than half a second."""
pytestmark = pytest.mark.timeout(600)  # the waits are deadlines, not expectations: a machine may be busy

NO_AUDITS = """[audit]
rate = 0.0
before_seal = "none"
"""
RUN = f"""
[run]
name = "calm"
steps = 5
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
{NO_AUDITS}[snapshot]
every_steps = 2
[evaluation]
rows = 4
"""


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
    """Three miners; the first run is submitted with the start."""
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
    return root_of(swarm, "calm")


def test_a_run_trains_and_is_exported_for_plain_transformers(
    swarm: LocalSwarm, calm_root: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from iota.export import export_run

    status = swarm.status(steps=100)
    assert status is not None
    assert status.summary.steps == 5
    losses = [view.loss for view in status.steps if view.step >= 0]
    assert len(losses) == 5
    assert losses[-1] < losses[0]
    assert status.steps[0].holdout_loss is not None or status.steps[1].holdout_loss is not None
    done = export_run(swarm.remote(), "calm", tmp_path / "model", deadline=Deadline.after(60))
    assert (done.step, done.root) == (5, calm_root)
    code = (
        "import sys, transformers as t, torch\n"
        "m = t.AutoModelForCausalLM.from_pretrained(sys.argv[1]); k = t.AutoTokenizer.from_pretrained(sys.argv[1])\n"
        "ids = k('Call me Ishmael', return_tensors='pt').input_ids\n"
        "print(float(m(ids, labels=ids).loss), m.generate(ids, max_new_tokens=3, pad_token_id=0).shape[1] - ids.shape[1])\n"
        "assert not any(name.split('.')[0] in ('iota', 'subnet', 'miner', 'validator') for name in sys.modules)\n"
    )
    plain = subprocess.run(
        [sys.executable, "-P", "-c", code, str(done.directory)],
        capture_output=True,
        text=True,
        timeout=90,
        cwd=tmp_path,
    )
    assert plain.returncode == 0, plain.stderr
    loss, new = plain.stdout.split()
    assert 1.0 < float(loss) < 7.0
    assert 1 <= int(new) <= 3

    view = LiveView(plain=True)
    view.show(status)
    assert "step 5/5" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="not an empty directory"):
        export_run(swarm.remote(), "calm", tmp_path / "model", deadline=Deadline.after(10))


def test_a_kill_and_a_join_and_other_cuts_change_no_bit(swarm: LocalSwarm, config: RunConfig, calm_root: str) -> None:
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
    joiner = swarm.add_miner()
    assert swarm.wait_end(victim, Deadline.after(20)) == -signal.SIGKILL
    assert root_of(swarm, "stormy") == calm_root
    status = swarm.status()
    assert status is not None
    assert status.num_gone >= 1  # the fault did happen
    assert status.num_joined > at_work.num_joined
    assert joiner == 3

    swarm.submit(changed(config, "uncut", stages=1))
    assert root_of(swarm, "uncut") == calm_root
    assert root_of_other_seed(swarm, config) != calm_root  # the comparison can fail


def test_steps_that_overlap_give_the_references_bits_whoever_dies(
    swarm: LocalSwarm, config: RunConfig, calm_root: str, tmp_path: Path
) -> None:
    """``update_delay`` 1: a kill while two steps are open, and a join that has to come through the state before."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    steps, name = 8, "delayed"
    data = prepare_data([Path(config.data.sources[0])], tmp_path / "data", vocab_size=300, holdout_fraction=0.1)
    delayed = msgspec.structs.replace(
        changed(config, name, update_delay=1),
        run=msgspec.structs.replace(config.run, name=name, steps=steps),
        data=msgspec.structs.replace(config.data, sources=(str(tmp_path / "data"),)),
    )
    swarm.submit(delayed)
    at_work = swarm.wait_until(
        lambda status: status.summary.name == name and status.summary.step >= 2 and len(status.members) >= 2,
        Deadline.after(RUN_S),
        poll_s=POLL_S,
    )
    victim = at_work.members[0].hotkey
    swarm.kill(next(i for i in range(swarm.num_miners) if swarm.miner_hotkey(i) == victim))
    swarm.add_miner()
    found = root_of(swarm, name)
    status = swarm.status()
    assert status is not None
    assert status.num_gone >= 1  # the fault did happen
    try:
        assert found == trained_root(reference_of(delayed, data, tmp_path / "data"), steps)
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)
    assert found != calm_root


def root_of_other_seed(swarm: LocalSwarm, config: RunConfig) -> str:
    other = changed(config, "other", stages=1)
    swarm.submit(msgspec.structs.replace(other, run=msgspec.structs.replace(other.run, seed=5, steps=5)))
    return root_of(swarm, "other")


def test_the_validator_may_be_killed_and_a_miner_may_leave(
    swarm: LocalSwarm, config: RunConfig, calm_root: str
) -> None:
    """kill -9 of the validator, start it again on its journal; a miner hands its leases back on SIGTERM: the same bits."""
    name = "interrupted"
    leaver = swarm.add_miner()
    log, up = swarm.log_of(leaver), Deadline.after(RUN_S)
    while not log.exists() or "waiting for" not in log.read_text(encoding="utf-8"):
        up.check("the miner that will leave")
        time.sleep(0.1)
    swarm.submit(changed(config, name))
    swarm.wait_until(lambda s: s.summary.name == name and s.summary.step >= 1, Deadline.after(RUN_S), poll_s=POLL_S)
    swarm.kill("validator")
    assert swarm.wait_end("validator", Deadline.after(20)) == -signal.SIGKILL
    swarm.start_validator()
    swarm.wait_until(lambda s: s.summary.name == name and s.summary.step >= 2, Deadline.after(RUN_S), poll_s=POLL_S)
    swarm.kill(leaver, signal.SIGTERM)
    assert swarm.wait_end(leaver, Deadline.after(30)) == 0
    assert root_of(swarm, name) == calm_root


def test_the_store_may_be_away_for_a_while(swarm: LocalSwarm, config: RunConfig, calm_root: str) -> None:
    """Stopped, killed, started again without room, then with room: each is named, nobody goes, the same bits."""
    name = "storeless"
    swarm.submit(changed(config, name))
    before = swarm.wait_until(
        lambda s: s.summary.name == name and s.summary.step >= 1, Deadline.after(RUN_S), poll_s=POLL_S
    )
    swarm.kill("store", signal.SIGSTOP)
    swarm.wait_until(lambda s: s.summary.waiting_for.startswith("the store ("), Deadline.after(60))
    time.sleep(6)
    settings = StoreSettings(
        directory=swarm.directory / "store", port=swarm.ports.store, secret=swarm.directory / "store-secret"
    )
    for budget_bytes in (1, settings.budget_bytes):
        swarm.kill("store")
        assert swarm.wait_end("store", Deadline.after(20)) == -signal.SIGKILL
        swarm._request("store", "store", msgspec.structs.replace(settings, budget_bytes=budget_bytes))
        if budget_bytes == 1:
            swarm.wait_until(lambda s: s.summary.waiting_for.startswith("the store (full:"), Deadline.after(60))
    assert root_of(swarm, name) == calm_root
    status = swarm.status()
    assert status is not None
    assert (status.num_joined, status.num_voids) == (before.num_joined, before.num_voids), "nobody was late meanwhile"


def test_a_submission_that_fails_says_so(swarm: LocalSwarm, config: RunConfig, calm_root: str, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    data = msgspec.structs.replace(config.data, sources=(str(tmp_path / "empty.txt"),))
    swarm.submit(msgspec.structs.replace(changed(config, "empty"), data=data))
    with pytest.raises(ConfigError, match="submit: no text in"):
        swarm.wait_until(lambda status: False, Deadline.after(RUN_S))


def test_nothing_outlives_the_one_who_started_it(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from iota.swarm import LocalSwarm\n"
        "s = LocalSwarm(Path(sys.argv[1]), None, 1)\n"
        "s._first_miners = 0\n"
        "s.start()\n"
        "print(s.parent._process.pid, *[c.pid for c in s.parent.children.values()], flush=True)\n"
        "time.sleep(600)\n"
    )
    starter = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "swarm")], cwd=ROOT, stdout=subprocess.PIPE)
    assert starter.stdout is not None
    try:
        pids = [int(text) for text in starter.stdout.readline().split()]
        assert len(pids) == 4
        assert all(running(pid) for pid in pids)
    finally:
        starter.kill()
        starter.wait()
        starter.stdout.close()
    deadline = Deadline.after(40)
    while any(running(pid) for pid in pids):
        deadline.check(f"the end of {pids}")
        time.sleep(0.05)


def running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def test_the_views_of_a_status(calm_root: str, swarm: LocalSwarm) -> None:
    from rich.console import Console

    status = swarm.status()
    assert isinstance(status, RunStatus)
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(render(status))
    assert status.summary.name in console.export_text()
    assert status.summary.name in headline(msgspec.structs.replace(status, steps=()))


def test_a_sparkline_has_its_width_and_its_ends() -> None:
    line = sparkline([float(n) for n in range(1000)], 40)
    assert len(line) == 40
    assert (line[0], line[-1]) == ("▁", "█")
    assert sparkline([]) == sparkline([float("nan")]) == ""
    assert sparkline([2.0, 2.0]) == "▁▁"
