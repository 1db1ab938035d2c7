"""``iota doctor --chain``: what fits and what doesn't, one line each, through both libraries and on the local chain."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from loopback.pallets import GENESIS_MS
from loopback.worlds import KINDS, MINER, OWNER, STRANGER, VALIDATOR, Worlds, genesis, recorded_or_skip

from iota.cli.main import main
from subnet.chain.fit import Findings, Operator, check_chain
from subnet.protocol.signing import create_wallet
from subnet.timing import Deadline


@pytest.fixture
async def worlds(tmp_path: Path) -> AsyncIterator[Worlds]:
    made = Worlds(tmp_path)
    yield made
    await made.close()


@pytest.fixture(params=["bittensor", "substrate"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


async def look(chain, netuid: int = 1, *, hotkey: str = "", version_key: int = 0, clock_off_s: float = 0.0) -> Findings:
    block = await chain.block()
    now_s = GENESIS_MS / 1000 + block * 0.25 + clock_off_s
    operator = Operator(hotkey, "btcli register ...", version_key)
    return await check_chain(chain, netuid, operator, Deadline.after(60), wall_s=lambda: now_s)


def bad(findings: Findings) -> list[str]:
    lines = [str(finding) for finding in findings.found if finding.level == "bad"]
    assert all("\n" not in line for line in lines)
    assert findings.fits == (not lines)
    return lines


async def test_a_network_that_fits(worlds: Worlds, kind: str):
    world = await worlds.make(kind, genesis(commit_reveal=True))
    findings = await look(world.chain(), hotkey=VALIDATOR.hotkey)
    assert bad(findings) == []
    said = "\n".join(map(str, findings.found))
    assert "spec 461" in said
    assert "holds a validator permit" in said
    assert "weights are sealed, version 4" in said
    assert world.node.submitted == [], "nothing is sent"


async def test_what_does_not_fit_is_named(worlds: Worlds, kind: str):
    newer = await worlds.make(kind, spec_version=999, recorded=recorded_or_skip().without("WeightsSetRateLimit"))
    findings = await look(newer.chain())
    assert any("this is 999" in str(finding) for finding in findings.found)
    lines = bad(findings)
    assert any("no storage SubtensorModule.WeightsSetRateLimit" in line for line in lines)
    renamed = await worlds.make(kind, recorded=recorded_or_skip().without("set_mechanism_weights"))
    lines = bad(await look(renamed.chain()))
    assert [line for line in lines if "call SubtensorModule.set_mechanism_weights" in line]


async def test_clock_netuid_registration_stake_and_version_are_looked_at(worlds: Worlds, kind: str):
    start = genesis(stake_threshold=100.0, weights_version_key=7)
    world = await worlds.make(kind, start)
    chain = world.chain()
    (line,) = bad(await look(chain, clock_off_s=-300.0))
    assert "-300 s apart" in line
    (line,) = bad(await look(chain, 9))
    assert "there is no subnet 9" in line
    (line,) = bad(await look(chain, hotkey=STRANGER.hotkey))
    assert "isn't registered on subnet 1 (register it: btcli register ...)" in line
    (line,) = bad(await look(chain, hotkey=VALIDATOR.hotkey, version_key=3))
    assert "version key 7, set is 3" in line
    findings = await look(chain, hotkey=MINER.hotkey, version_key=7)
    assert bad(findings) == []
    assert any("holds no validator permit" in str(finding) for finding in findings.found)
    assert bad(await look(chain, hotkey=OWNER.hotkey, version_key=7)) == []


async def test_a_node_of_another_network_is_named(worlds: Worlds, kind: str):
    world = await worlds.make(kind)
    world.server.spec_name = "polkadot"
    assert "runs polkadot, not node-subtensor" in bad(await look(world.chain()))[0]


@pytest.mark.parametrize("chain_kind", KINDS)
async def test_the_command_says_it_in_lines_and_in_its_status(worlds: Worlds, chain_kind: str, tmp_path: Path, capsys):
    world = await worlds.make(chain_kind)
    prefix = "substrate+" if chain_kind == "substrate" else ""
    create_wallet("me", "hot", tmp_path / "wallets")
    where = ["--subtensor.chain_endpoint", prefix + world.url]
    wallet = ["--wallet.name", "me", "--wallet.hotkey", "hot", "--wallet.path", str(tmp_path / "wallets")]
    status = await asyncio.to_thread(main, ["doctor", "--chain", *where, *wallet])
    out = capsys.readouterr().out
    assert status == 1
    command = "iota chain register" if chain_kind == "local" else "btcli subnets register"
    assert f"isn't registered on subnet 1 (register it: {command} --netuid 1" in out
    assert "doesn't fit" in out
    status = await asyncio.to_thread(main, ["doctor", "--chain", "--netuid", "5", *where])
    assert status == 1
    assert "there is no subnet 5" in capsys.readouterr().out


def test_an_endpoint_that_is_none_is_one_line(capsys):
    assert main(["doctor", "--chain", "--subtensor.chain_endpoint", "ws://127.0.0.1:1"]) == 1
    out = capsys.readouterr().out
    assert "BAD" in out
    assert "127.0.0.1:1" in out
    assert len(out.strip().splitlines()) == 2
    assert main(["doctor", "--chain", "--subtensor.network", "finny"]) == 2
    assert "names no chain" in capsys.readouterr().err
