"""``iota doctor``: what it measures is measured, each finding says what to do, and only what would fail is bad."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import pytest

from iota.cli.main import main
from iota.doctor import machine
from iota.doctor.at_start import look_before_start
from iota.doctor.network import bandwidth, validator_way
from iota.doctor.spec import Network, load_spec
from iota.doctor.wallet import wallet_files
from miner.hardware import matmul_flops
from subnet.chain.fit import Findings
from subnet.errors import Busy, ConfigError, InputError
from subnet.net.client import SignedClient
from subnet.net.http import Call, Route, answer, create_app, listen
from subnet.protocol.bandwidth import LIMIT_PROBE_BYTES, BandwidthProbe
from subnet.protocol.messages import Hello
from subnet.protocol.reach import LIMIT_REACH_BYTES, ReachRequest
from subnet.protocol.signing import RequestVerifier, Signer, create_wallet
from subnet.timing import SYSTEM_CLOCK, ManualClock
from validator.http_home import EACH_BYTES, BandwidthDesk, bandwidth_route
from validator.reach import ReachDesk

MINER = load_spec().of("miner")
VALIDATOR = Signer.from_uri("//Validator")


def said(findings: Findings, level: str) -> list[str]:
    return [str(finding) for finding in findings.found if finding.level == level]


def found(look: Callable[[Findings], object]) -> Findings:
    findings = Findings()
    look(findings)
    return findings


def test_software_names_each_package_that_does_not_fit(monkeypatch: pytest.MonkeyPatch):
    assert found(machine.software).fits
    monkeypatch.setattr(metadata, "requires", lambda name: ["torch>=99", "no-such-package-at-all>=1", "numpy"])
    bad = said(found(machine.software), "bad")
    assert len(bad) == 2
    assert "torch" in bad[0]
    assert "isn't >=99" in bad[0]
    assert "no-such-package-at-all is missing (run scripts/install again)" in bad[1]


def test_memory_is_compared_with_the_spec():
    def of(gb: int) -> Findings:
        text = f"MemTotal: {gb * 10**6} kB\nMemAvailable: {gb * 5 * 10**5} kB\n"
        return found(lambda findings: machine.memory(findings, MINER, text))

    assert "less than the 8 GB" in said(of(4), "note")[0]
    assert "recommended: 32 GB" in said(of(16), "ok")[0]
    assert said(of(64), "ok") == ["64.0 GB of memory, 32.0 GB free"]


def test_a_full_disk_and_one_that_cannot_be_written_would_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    good = found(lambda findings: machine.disk(findings, tmp_path / "not" / "yet", MINER))
    assert good.fits
    assert any("MB/s" in str(finding) for finding in good.found)
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"
    usage = type("Usage", (), {"free": 1 << 20})
    monkeypatch.setattr("iota.doctor.machine.shutil.disk_usage", lambda place: usage)
    assert "at least 20 GB" in said(found(lambda f: machine.disk(f, tmp_path, MINER)), "bad")[0]
    with pytest.raises(ConfigError, match="iota doctor miner says more"):
        look_before_start(tmp_path)
    monkeypatch.setattr("iota.doctor.machine.os.access", lambda place, mode: False)
    assert "can't be written" in said(found(lambda f: machine.disk(f, tmp_path, MINER)), "bad")[0]


def test_a_miner_on_a_small_machine_starts_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    assert "less than the 2 cores" in said(found(lambda f: machine.processor(f, MINER)), "note")[0]
    look_before_start(tmp_path)


def test_the_device_is_measured_by_what_it_does():
    ticks = iter(range(1000))
    speed = matmul_flops("cpu", "fp32", seconds=3.0, size=768, clock=lambda: float(next(ticks)))
    assert speed == 2.0 * 768**3, "one second a product, by the clock that was given"
    findings = found(lambda f: machine.device(f, "cuda:7", MINER))
    assert "finds no CUDA device" in said(findings, "bad")[0]


def test_wallet_files_that_others_can_read_are_named(tmp_path: Path):
    created = create_wallet("me", "hot", tmp_path)
    hotkey = tmp_path / "me" / "hotkeys" / "hot"
    hotkey.chmod(0o644)
    findings = Findings()
    assert wallet_files(findings, "me", "hot", tmp_path).hotkey == created.hotkey  # type: ignore[union-attr]
    assert f"chmod 600 {hotkey}" in " ".join(said(findings, "note"))
    assert "keep the coldkey elsewhere" in " ".join(said(findings, "note"))
    hotkey.chmod(0o600)
    assert f"chmod 600 {hotkey}" not in " ".join(said(found(lambda f: wallet_files(f, "me", "hot", tmp_path)), "note"))
    assert wallet_files(Findings(), "you", "hot", tmp_path) is None


class Served:
    """The routes of a validator that the doctor asks, over the real desks."""

    def __init__(self) -> None:
        self.offset_ns = 0
        self.protocol = 1
        self.desk = ReachDesk(VALIDATOR)
        self.clock = ManualClock()
        self.bandwidth = BandwidthDesk(self.clock)
        self.known: set[str] = set()

    async def hello(self, call: Call):
        return answer(
            Hello(
                protocol_min=self.protocol,
                protocol_max=self.protocol,
                time_ns=SYSTEM_CLOCK.wall_ns() + self.offset_ns,
                hotkey=VALIDATOR.hotkey,
                term=1,
                head_number=0,
                run="whale",
                waiting_for="a miner for stage 0",
            )
        )

    async def reach(self, call: Call):
        return answer(await self.desk.look(call.hotkey, call.request.remote or "", call.decode(ReachRequest)))


@pytest.fixture
async def served() -> AsyncIterator[tuple[Served, str]]:
    one = Served()
    routes = [
        Route("GET", "/v1/hello", one.hello, signed=False),
        Route("POST", "/v1/reach", one.reach, body_limit_bytes=LIMIT_REACH_BYTES),
        bandwidth_route(one.bandwidth),
    ]
    app = create_app(routes, RequestVerifier(VALIDATOR.hotkey, is_known=lambda hotkey: hotkey in one.known))
    listener = await listen(app, "127.0.0.1", 0)
    yield one, listener.url
    await listener.close()


async def test_the_way_to_a_validator(served: tuple[Served, str]):
    one, url = served
    signer = Signer.from_uri("//Miner")
    one.known.add(signer.hotkey)
    findings = Findings()
    await validator_way(findings, url, signer)
    assert findings.fits
    text = " ".join(said(findings, "ok"))
    assert "clocks agree" in text
    assert "leads run whale; it waits for a miner for stage 0" in text
    assert "others reach this machine: reachable at 127.0.0.1" in text
    speeds = re.search(r"at least ([\d,]+) Mbit/s up and ([\d,]+) down to the validator", text)
    assert speeds is not None, said(findings, "note")
    assert all(int(speed.replace(",", "")) > 100 for speed in speeds.groups()), "over loopback"


async def test_a_slow_way_is_a_note_and_what_was_not_measured_is_said(served: tuple[Served, str]):
    one, url = served
    signer = Signer.from_uri("//Miner")
    one.known.add(signer.hotkey)
    async with SignedClient(url, signer, VALIDATOR.hotkey) as client:
        findings = Findings()
        await bandwidth(findings, client, Network(download_mbps=10**9, upload_mbps=1, inbound_port=True))
        assert "asks for 1 up and 1000000000 down" in said(findings, "note")[0]
        with suppress(Busy):
            for _ in range(EACH_BYTES // LIMIT_PROBE_BYTES + 1):
                one.bandwidth.probe(signer.hotkey, BandwidthProbe(b"", LIMIT_PROBE_BYTES))
                one.clock.advance(0.1)
        findings = Findings()
        await bandwidth(findings, client)
        assert "the bandwidth isn't known" in said(findings, "note")[0]


def test_a_validator_gives_bandwidth_away_in_small_pieces():
    clock = ManualClock()
    desk = BandwidthDesk(clock)
    whole = BandwidthProbe(bytes(LIMIT_PROBE_BYTES), LIMIT_PROBE_BYTES)
    assert len(desk.probe("a", whole).data) == LIMIT_PROBE_BYTES
    with pytest.raises(InputError, match="allowed: up to"):
        desk.probe("a", BandwidthProbe(b"", LIMIT_PROBE_BYTES + 1))
    for _ in range(7):
        desk.probe("a", whole)
    with pytest.raises(Busy, match="others measure"):
        desk.probe("b", whole)
    clock.advance(1.0)
    for _ in range(8):
        desk.probe("a", whole)
    clock.advance(1.0)
    with pytest.raises(Busy, match="enough for now") as refused:
        desk.probe("a", whole)
    assert refused.value.retry_after_s == pytest.approx(58.0)
    desk.probe("b", whole)
    clock.advance(58.0)
    desk.probe("a", whole)


async def test_what_is_wrong_on_the_way_is_said(served: tuple[Served, str]):
    one, url = served
    stranger = Signer.from_uri("//Stranger")
    one.offset_ns, one.protocol = 60 * 10**9, 9
    findings = Findings()
    await validator_way(findings, url, stranger)
    assert any("clock is -60" in text and "NTP" in text for text in said(findings, "note"))
    assert "speaks protocol 9 to 9, this is 1" in said(findings, "bad")[0]
    assert any("nobody says whether others reach" in text for text in said(findings, "note"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        one.protocol, one.offset_ns = 1, 0
        findings = Findings()
        await validator_way(findings, url, stranger, port=port)
        assert f"port {port} can't be listened on" in said(findings, "bad")[0]
    findings = Findings()
    await validator_way(findings, "http://127.0.0.1:1", None)
    assert "doesn't answer" in said(findings, "bad")[0]


async def test_the_command_in_lines_and_as_json(
    served: tuple[Served, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    url = served[1]
    where = ["--dir", str(tmp_path), "--validator.url", url]
    assert await asyncio.to_thread(main, ["doctor", "validator", *where]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[-1] == "fits"
    assert {line.split()[1].rstrip(":") for line in out[:-1]} == {
        "software",
        "processor",
        "memory",
        "disk",
        "validator",
    }
    assert await asyncio.to_thread(main, ["doctor", "--json", "--validator.url", "http://127.0.0.1:1"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["fits"] is False
    assert list(report["parts"]) == ["validator"], "only what was named"
    assert report["parts"]["validator"][0]["level"] == "bad"
