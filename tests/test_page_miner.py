"""The miner's page: reading is free on the machine itself, changing takes the token, and other sites' pages get nowhere."""

from __future__ import annotations

import asyncio
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from loguru import logger

from miner.caps import Caps
from miner.log_tail import LogLine, LogTail
from miner.page_http import TOKEN_FILE, MinerPage, page_token
from miner.page_view import CapsChange, MinerView, view_of
from miner.sensors import MachineView
from miner.settings import MinerSettings
from miner.told import Told
from subnet.errors import ConfigError, NotFound
from subnet.net.border import listen
from subnet.net.rate import RateLimit
from subnet.score.api import ScoreDetail
from subnet.timing import ManualClock

HOTKEY = "5C4hrfjw9DjXZTzV3MwzrrAr9P1MJhSrvWGWqi1eSuyUpnhM"


class Desk:
    """A miner that is in no run."""

    def __init__(self, directory: Path) -> None:
        self.settings = MinerSettings(directory=directory, download_bytes_per_s=5e6)
        self.caps, self.working, self.log = Caps(self.settings), True, LogTail()
        self.rests = ""
        self.told: Told | None = None
        self.machine: MachineView | None = None

    def look(self) -> MinerView:
        return view_of(
            HOTKEY,
            self.settings,
            self.caps.report(0),
            None,
            validator="",
            wanted=self.working,
            rests=self.rests,
            told=self.told,
            machine=self.machine,
        )

    def logs(self, after: int) -> tuple[LogLine, ...]:
        return self.log.after(after)

    async def own_score(self) -> ScoreDetail:
        raise NotFound("no validator is followed at the moment")

    def change_caps(self, change: CapsChange) -> None:
        self.caps.upload.change(change.upload_bytes_per_s)
        self.caps.download.change(change.download_bytes_per_s)

    async def set_working(self, working: bool) -> None:
        self.working = working


@asynccontextmanager
async def miner_page(directory: Path) -> AsyncIterator[tuple[str, Desk, str]]:
    desk, token = Desk(directory), page_token(directory)
    listener = await listen(MinerPage(desk, token, directory / TOKEN_FILE).app(HOTKEY), "127.0.0.1", 0)
    try:
        yield listener.url, desk, token
    finally:
        await listener.close()


async def test_a_change_takes_the_token_and_comes_from_the_page_itself(tmp_path: Path):
    body = {"upload_bytes_per_s": 2e6, "download_bytes_per_s": None}
    async with miner_page(tmp_path) as (url, desk, token), aiohttp.ClientSession(url) as session:

        async def post(path: str, said: object, **headers: str) -> tuple[int, dict]:
            async with session.post(path, json=said, headers=headers) as response:
                return response.status, await response.json()

        good = {"Authorization": f"Bearer {token}"}
        for headers in ({}, {"Authorization": "Bearer "}, {"Authorization": "Bearer guess"}, {"Authorization": token}):
            for path, said in (("/v1/miner/caps", body), ("/v1/miner/work", {"working": False})):
                status, refusal = await post(path, said, **headers)
                assert (status, refusal["code"]) == (401, "token_needed")
                assert str(tmp_path / TOKEN_FILE) in refusal["hint"]
        for foreign in (
            {"Origin": "http://evil.example"},
            {"Sec-Fetch-Site": "cross-site"},
            {"Host": "evil.example"},
            {"Origin": "null"},
        ):
            status, refusal = await post("/v1/miner/caps", body, **good, **foreign)
            assert (status, refusal["code"]) == (401, "unauthorized")
        assert (desk.caps.upload.bytes_per_s, desk.working) == (None, True)
        status, view = await post("/v1/miner/caps", body, **good, Origin=url)
        assert (status, view["upload"]["limit_bytes_per_s"], view["download"]["limit_bytes_per_s"]) == (200, 2e6, None)
        status, view = await post("/v1/miner/work", {"working": False}, **good)
        assert (status, view["state"], desk.working) == (200, "stopped", False)


async def test_bad_changes_name_what_is_allowed(tmp_path: Path):
    async with miner_page(tmp_path) as (url, desk, token), aiohttp.ClientSession(url) as session:
        for body in (
            {"upload_bytes_per_s": 1, "download_bytes_per_s": None},
            {"upload_bytes_per_s": -1e6, "download_bytes_per_s": None},
            {"upload_bytes_per_s": None},
            [1],
            {"upload_bytes_per_s": "fast", "download_bytes_per_s": None},
        ):
            headers = {"Authorization": f"Bearer {token}"}
            async with session.post("/v1/miner/caps", json=body, headers=headers) as response:
                refusal = await response.json()
            assert (response.status, refusal["code"]) == (400, "bad_input")
            assert refusal["hint"]
        async with session.post("/v1/miner/caps", data=b"x" * 2000) as response:
            assert response.status == 413
        assert desk.caps.download.bytes_per_s == 5e6


async def test_reading_is_free_here_but_not_under_a_strangers_name(tmp_path: Path):
    async with miner_page(tmp_path) as (url, _, _), aiohttp.ClientSession(url) as session:
        async with session.get("/v1/miner") as response:
            view = await response.json()
        assert (view["state"], view["waiting_for"]) == ("looking", "a validator that leads a run")
        async with session.get("/") as response:
            assert "form-action 'none'" in response.headers["Content-Security-Policy"]
        for path in ("/", "/v1/miner", "/v1/miner/score", "/page/miner.js"):
            async with session.get(path, headers={"Host": "rebound.example:80"}) as response:
                assert (response.status, (await response.json())["code"]) == (401, "unauthorized")
        async with session.get("/v1/miner/score") as response:
            assert response.status == 404


async def test_why_it_rests_what_it_was_told_and_its_log_are_on_the_page(tmp_path: Path):
    async with miner_page(tmp_path) as (url, desk, _), aiohttp.ClientSession(url) as session:
        end = desk.log.start()
        try:
            logger.info("first")
            logger.info("second")
        finally:
            end()
        desk.rests = "the machine to be idle for 300 s: somebody is at the keyboard"
        desk.told = Told(
            since_s=1.0, time_s=2.0, validator="http://v", run="whale", code="back_off", reason="gone silently 3 times"
        )
        async with session.get("/v1/miner") as response:
            view = await response.json()
        assert (view["state"], view["waiting_for"], view["told"]["code"]) == ("resting", desk.rests, "back_off")
        async with session.get("/v1/miner/logs") as response:
            assert [line[3] for line in await response.json()] == ["first", "second"]
        async with session.get("/v1/miner/logs?after=0") as response:
            assert [line[3] for line in await response.json()] == ["second"]
        async with session.get("/v1/miner/logs?after=x") as response:
            assert (response.status, (await response.json())["code"]) == (400, "bad_input")


def test_the_token_is_its_owners_alone_and_stays(tmp_path: Path):
    token = page_token(tmp_path / "miner")
    path = tmp_path / "miner" / TOKEN_FILE
    assert len(token) >= 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert page_token(tmp_path / "miner") == token


def test_a_page_port_that_is_the_peers_is_refused():
    with pytest.raises(ConfigError, match=r"--page\.port = 8000"):
        MinerSettings(port=8000, page_port=8000)


async def test_another_limit_counts_at_once_for_who_waits_already():
    clock = ManualClock()
    limit = RateLimit(1000.0, clock)
    await limit.take(1_000_000)  # a thousand seconds' worth
    waiting = asyncio.create_task(limit.take(10))
    await asyncio.sleep(0)
    assert not waiting.done()
    limit.change(None)
    async with asyncio.timeout(5):
        await waiting
    limit.change(500.0)
    await limit.take(100)
    assert limit.spend(500) == pytest.approx(600 / 500 - 0.05)
    with pytest.raises(ConfigError):
        limit.change(0.0)
