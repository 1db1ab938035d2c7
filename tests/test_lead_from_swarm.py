"""The validator is gone with its disk: another leads its run from the log store, the miners find it, and no bit changes."""

from __future__ import annotations

import asyncio
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from test_swarm import ROOT, RUN, RUN_S, START_S, changed, root_of

from iota.swarm import LocalSwarm, SwarmOptions
from subnet.protocol.api import RunStatus
from subnet.protocol.signing import load_wallet
from subnet.run.config import RunConfig
from subnet.run.events import Record, StageSealed
from subnet.run.runfile import parse_run
from subnet.store.embedded import EmbeddedStore
from subnet.store.signed_urls import load_or_create_secret
from subnet.timing import Deadline
from subnet.words import short
from validator.log_reader import read_log
from validator.run_archive import PREFIX, group_keys

pytestmark = pytest.mark.timeout(900)
NUM_MINERS = 4


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    directory = tmp_path_factory.mktemp("book")
    book = (ROOT / "iota" / "assets" / "moby_dick.txt").read_text(encoding="utf-8")
    (directory / "book.txt").write_text(book[:60_000], encoding="utf-8")
    return parse_run(RUN, directory)


@pytest.fixture(scope="module")
def swarm(config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSwarm]:
    options = SwarmOptions(device="cpu", measure_costs=False, start_s=START_S, spare_miners=0, spare_validators=1)
    with LocalSwarm(tmp_path_factory.mktemp("swarm") / "swarm", config, NUM_MINERS, options) as running:
        yield running


def at_work(swarm: LocalSwarm, name: str) -> RunStatus:
    """Midway: a step is done, everybody is there, and the run isn't over."""
    status = swarm.wait_until(
        lambda s: s.summary.name == name and s.summary.step >= 1 and len(s.members) == NUM_MINERS,
        Deadline.after(RUN_S),
        poll_s=0.05,
    )
    assert status.summary.state == "running"
    return status


async def leaders_of(swarm: LocalSwarm, run_id: str) -> list[str]:
    """Who led the run, from its journal in the log store: one chain, folded without a contradiction, each seal once."""
    secret = load_or_create_secret(swarm.directory / "store-secret")
    async with EmbeddedStore(swarm.store_url, secret) as store:
        keys = group_keys(await store.list_named(PREFIX, deadline=Deadline.after(30)))
        log = await read_log(store, keys[run_id])
    events = [msgspec.msgpack.decode(data, type=Record).event for data in log.records]
    seals = [(event.step, event.group) for event in events if isinstance(event, StageSealed)]
    assert len(seals) == len(set(seals))
    assert log.state.finished is not None
    return log.leaders


def test_another_validator_leads_from_the_log_store(swarm: LocalSwarm, config: RunConfig) -> None:
    calm_root = root_of(swarm, "calm")
    swarm.submit(changed(config, "orphaned"))
    before = at_work(swarm, "orphaned")
    swarm.kill("validator")
    assert swarm.wait_end("validator", Deadline.after(30)) == -signal.SIGKILL
    shutil.rmtree(swarm.directory / "validator")

    swarm.start_validator("validator-1", lead_from=True)
    assert root_of(swarm, "orphaned") == calm_root
    after = swarm.status(steps=100)
    assert after is not None
    assert after.summary.run_id == before.summary.run_id
    assert [view.step for view in after.steps] == list(range(config.run.steps))
    other = load_wallet("validator-1", "default", swarm.directory / "wallets").hotkey
    assert any(line.endswith(f"term 2 led by {short(other)}") for line in after.events)
    assert asyncio.run(leaders_of(swarm, after.summary.run_id))[1:] == [other]
    assert [run.name for run in swarm.runs()] == ["orphaned"]  # a finished run is left alone


@pytest.mark.slow
def test_a_leader_that_was_only_paused_finds_itself_deposed(swarm: LocalSwarm, config: RunConfig) -> None:
    """SIGSTOP, another leads (the first one's hotkey, on an empty disk), SIGCONT: the paused one ends, nothing is sealed twice."""
    calm_root = root_of(swarm, "orphaned")
    swarm.submit(changed(config, "rivalled"))
    at_work(swarm, "rivalled")
    swarm.kill("validator-1", signal.SIGSTOP)
    swarm.start_validator("validator", lead_from=True)
    assert root_of(swarm, "rivalled") == calm_root
    swarm.kill("validator-1", signal.SIGCONT)
    assert swarm.wait_end("validator-1", Deadline.after(60)) == 1
    words = [line for line in Path(swarm.log_of("validator-1")).read_text().splitlines() if line.startswith("error: ")]
    assert len(words) == 1
    assert "another validator leads this run" in words[0]
    status = swarm.status()
    assert status is not None
    assert len(asyncio.run(leaders_of(swarm, status.summary.run_id))) == 2
