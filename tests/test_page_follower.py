"""A follower serves the page of the runs it follows, from what it has checked."""

from __future__ import annotations

import aiohttp
from test_follow_api import Served, served  # noqa: F401 - a fixture


async def test_a_followed_run_has_a_page(served: Served) -> None:  # noqa: F811
    async with aiohttp.ClientSession(served.url) as session:
        async with session.get("/v1/page/runs") as response:
            assert await response.json() == []
        async with session.get("/v1/page/runs/tiny") as response:
            assert (response.status, (await response.json())["code"]) == (404, "not_found")
        served.published.send()
        await served.catch_up()
        (run,) = served.reader.runs.values()
        base = f"/v1/page/runs/{run.name}"
        async with session.get(base) as response:
            found = await response.json()
        assert (response.status, found.get("journal_length")) == (200, run.number), found
        assert len(found["members"]) == len(run.state.members)
        assert len(found["facts"]["stages"]) == len(run.state.run.cuts)
        async with session.get(f"{base}/history") as response:
            assert (await response.json())["step"] == [step.step for step in run.history.steps]
        async with session.get(f"{base}/journal") as response:
            page = await response.json()
        assert (page["lines"], page["before"], page["length"]) == ([], None, run.number)
        async with session.get(f"{base}/live") as response:
            assert (await response.content.readline()) == b"event: overview\n"
