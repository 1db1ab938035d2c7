"""What an operator allows a miner is read from its flags, kept to, and reported in the log's line and in ``status.json``."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from miner.caps import Caps, CapsReport, line
from miner.settings import MinerSettings
from neurons.miner import build_parser, settings_from
from subnet.errors import ConfigError


def settings_of(*flags: str) -> MinerSettings:
    return settings_from(build_parser().parse_args(list(flags)))


def test_flags() -> None:
    plain = settings_of()
    assert (plain.tls, plain.trusted, plain.upload_bytes_per_s, plain.vram_bytes) == ("auto", (), None, None)
    found = settings_of(
        "--limit.upload", "100Mbit", "--limit.download", "12.5MB/s", "--limit.vram", "1GiB",
        "--peer.trusted", "10.0.0.0/8", "fd00::/8",
    )  # fmt: skip
    assert (found.upload_bytes_per_s, found.download_bytes_per_s) == (12.5e6, 12.5e6)
    assert (found.vram_bytes, found.graph_budget_bytes) == (1 << 30, 1 << 30)
    assert found.trusted == ("10.0.0.0/8", "fd00::/8")
    assert settings_of("--peer.tls", "always").tls == "always"


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (["--limit.upload", "fast"], "--limit.upload"),
        (["--limit.download", "1bit"], "--limit.download"),
        (["--limit.vram", "1kbit"], "--limit.vram"),
        (["--peer.tls", "maybe"], "tls"),
        (["--peer.trusted", "10.0.0.1/8"], "--peer.trusted"),
        (["--peer.tls", "never", "--peer.trusted", "10.0.0.0/8"], "--peer.trusted"),
    ],
)
def test_flags_that_cannot_be_meant(flags: list[str], names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        settings_of(*flags)


async def test_the_status_says_what_was_used_and_what_limited(tmp_path: Path) -> None:
    caps = Caps(MinerSettings(directory=tmp_path / "miner", upload_bytes_per_s=1e6, vram_bytes=2 << 30))
    caps.reachable, caps.reach = False, "not reachable at 1.2.3.4:8100: connection refused"
    caps.download.spend(3_000_000)
    await caps.upload.take(100_000)
    await caps.upload.take(1_000)
    keeping = asyncio.create_task(caps.keep_status(lambda: 1 << 30))
    path = tmp_path / "miner" / "status.json"
    async with asyncio.timeout(20):
        while not path.exists():
            await asyncio.sleep(0.01)
    keeping.cancel()
    await asyncio.wait({keeping})
    report = msgspec.json.decode(path.read_bytes(), type=CapsReport)
    assert (report.upload.bytes, report.upload.limit_bytes_per_s) == (101_000, 1e6)
    assert report.upload.held_up_s > 0
    assert (report.download.bytes, report.download.limit_bytes_per_s, report.download.held_up_s) == (3_000_000, None, 0)
    assert (report.device_memory_bytes, report.device_memory_limit_bytes) == (1 << 30, 2 << 30)
    assert (report.reachable, report.reach) == (False, caps.reach)
    said = line(report)
    assert "up 0.1 MB (limit 1 MB/s, held up" in said
    assert "down 3.0 MB, device memory 1.07 GB of 2.15" in said


async def test_a_directory_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    caps = Caps(MinerSettings(directory=tmp_path / "file"))
    keeping = asyncio.create_task(caps.keep_status(lambda: 0))
    await asyncio.wait({keeping}, timeout=0.5)
    assert not keeping.done()
    keeping.cancel()
    await asyncio.wait({keeping})
