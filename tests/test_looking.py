"""``iota logs`` and ``iota top`` against a served page desk: what is asked for, what comes later, and what is refused in a line."""

from __future__ import annotations

import asyncio
import json

import pytest
from page_cases import PlayedRun, served

from iota import journal_tail as tail
from iota.cli.main import main
from subnet.errors import NotFound, Refused, Unreachable


@pytest.fixture(scope="module")
def run() -> PlayedRun:
    return PlayedRun(num_members=4, num_stages=2, num_steps=600).play(500)


async def test_the_newest_lines_in_order_and_a_search(run: PlayedRun, capsys: pytest.CaptureFixture[str]):
    async with served(run) as (listener, _):
        url = ["--validator.url", listener.url]
        assert await asyncio.to_thread(main, ["logs", "-n", "300", "--json", *url]) == 0
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        numbers = [line["number"] for line in lines]
        assert len(lines) == 300, "more than one answer holds"
        assert numbers == sorted(numbers)
        newest = await asyncio.to_thread(tail.page, listener.url, "big", 10.0)
        assert numbers[-1] == newest.length - 1
        assert await asyncio.to_thread(main, ["logs", "big", "-s", "stepsealed", "-n", "3", *url]) == 0
        said = capsys.readouterr().out.splitlines()
        assert len(said) == 3
        assert all("StepSealed" in line for line in said)


async def test_following_gives_each_later_line_once(run: PlayedRun):
    async with served(run) as (listener, _):
        every = await asyncio.to_thread(tail.newest, listener.url, "big", 10.0, count=450)
        cut = every[-431].number

        def few() -> list[int]:
            found: list[int] = []
            for line in tail.follow(listener.url, "big", 10.0, cut, sleep=lambda seconds: None):
                found.append(line.number)
                if len(found) == 430:
                    return found
            return found

        assert await asyncio.to_thread(few) == [line.number for line in every[-430:]]


async def test_what_is_refused_or_away_is_one_line(run: PlayedRun, capsys: pytest.CaptureFixture[str]):
    async with served(run) as (listener, _):
        with pytest.raises(Refused) as caught:
            await asyncio.to_thread(tail.page, listener.url, "other", 10.0)
        assert caught.value.code == "not_found"
        assert await asyncio.to_thread(tail.active_run, listener.url, 10.0) == "big"
    async with served() as (listener, _):
        with pytest.raises(NotFound, match="no runs"):
            await asyncio.to_thread(tail.active_run, listener.url, 10.0)
        url = listener.url
    waited: list[float] = []
    with pytest.raises(Unreachable):
        list(tail.follow(url, "big", 1.0, 0, sleep=waited.append))
    assert sum(waited) == pytest.approx(tail.PATIENCE_S, abs=1.0), (
        "a validator that restarts is waited for, not for ever"
    )
    for status, words in ((1, ["logs", "--validator.url", url]), (2, ["top", "--validator.url", "no-url"])):
        assert await asyncio.to_thread(main, words) == status
    assert await asyncio.to_thread(main, ["logs", "--validator.url", "no-url"]) == 2
    assert all(line.startswith("error: ") for line in capsys.readouterr().err.splitlines())
