"""The miner's page in a browser, and of a real miner: caps are changed, refusals said, Stop hands leases back, Start joins."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest
from loguru import logger
from page_browser import PHONE, browsing, needs_browser
from test_page_miner import miner_page

from miner.sensors import Sensors
from miner.told import Told

pytestmark = [needs_browser(), pytest.mark.slow, pytest.mark.timeout(900)]


async def test_the_machine_the_log_and_what_it_was_told_are_seen(tmp_path: Path):
    async with miner_page(tmp_path) as (url, desk, _):
        desk.machine = Sensors("cpu", tmp_path / "none").read(0.0)
        now_s = time.time()
        desk.told = Told(
            since_s=now_s - 600, time_s=now_s - 5, validator="http://v", run="whale", code="back_off",
            reason="gone silently 3 times", hint="it ends by itself", again_s=now_s + 40,
        )  # fmt: skip
        desk.rests = "the machine to be idle for 300 s: other programs use 80% of the processors"
        end = desk.log.start()
        try:
            async with browsing(url, may_fail=("404",)) as page:
                await page.get_by_text("resting", exact=True).wait_for()
                await page.get_by_text("other programs use 80% of the processors").wait_for()
                await page.get_by_text("Not let into run whale since").wait_for()
                machine = page.locator("#machine")
                await machine.get_by_text("not readable").first.wait_for()
                await machine.get_by_text("by all programs").first.wait_for()
                logger.warning("something to look at")
                logger.info("another line")
                await page.locator("#log li").filter(has_text="warning: something to look at").wait_for()
                await page.get_by_label("Search the log").fill("another")
                await page.locator("#log li").filter(has_text="something").wait_for(state="hidden")
                assert await page.locator("#log li:visible").count() == 1
                await page.screenshot(path=tmp_path / "resting.png", full_page=True)
        finally:
            end()


async def test_a_cap_is_changed_with_the_token_and_refused_without(tmp_path: Path):
    async with miner_page(tmp_path) as (url, desk, token):
        async with browsing(url, viewport=PHONE, may_fail=("401", "404")) as page:
            await page.get_by_text("Waits for a validator that leads a run").wait_for()
            up = page.get_by_label("Upload, MB a second")
            assert await page.get_by_label("Download, MB a second").input_value() == "5"
            await up.fill("2.5")
            await page.get_by_role("button", name="Set caps").click()
            await page.get_by_text("no token: this would change something").wait_for()
            assert desk.caps.upload.bytes_per_s is None
            await page.get_by_label("Token").fill(token)
            await page.get_by_role("button", name="Set caps").click()
            await page.get_by_text("The caps are set.").wait_for()
            assert desk.caps.upload.bytes_per_s == 2.5e6
            await page.get_by_role("button", name="Stop").click()
            await page.get_by_text("Stopped: its leases went back.").wait_for()
            assert not desk.working
            assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_real_miner_stops_and_starts_from_its_page(tmp_path: Path):
    from page_browser import CHROMIUM
    from playwright.sync_api import sync_playwright
    from test_page_swarm import ROOT, RUN, aside

    from iota.ports import SwarmPorts
    from iota.swarm import LocalSwarm, SwarmOptions
    from subnet.run.runfile import parse_run
    from subnet.timing import Deadline

    port = SwarmPorts().taken().validator

    class PagedSwarm(LocalSwarm):
        def _miner_settings(self, number: int):
            settings = super()._miner_settings(number)
            return msgspec.structs.replace(settings, page_port=port) if number == 0 else settings

    (tmp_path / "book.txt").write_text(
        (ROOT / "iota" / "assets" / "moby_dick.txt").read_text("utf-8")[:60_000], "utf-8"
    )
    options = SwarmOptions(device="cpu", measure_costs=False, start_s=200.0)
    run = parse_run(RUN.replace("steps = 30", "steps = 400"), tmp_path)
    with PagedSwarm(tmp_path / "swarm", run, 4, options) as swarm, sync_playwright() as playwright:
        hotkey = swarm.miner_hotkey(0)

        def wait(there: bool) -> None:
            aside(
                lambda: swarm.wait_until(
                    lambda found: found.summary.step >= 2 and (hotkey in [m.hotkey for m in found.members]) == there,
                    Deadline.after(240),
                )
            )

        wait(True)
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.set_default_timeout(60_000)
        page.goto(f"http://127.0.0.1:{port}/")
        page.get_by_text("run watched · stage").wait_for()
        page.locator("#score").get_by_text("everybody's worth").wait_for()
        page.locator("#machine").get_by_text("FLOP/s, the last minute").wait_for()
        page.locator("#log li").filter(has_text="joined as").wait_for()
        page.get_by_label("Token").fill((tmp_path / "swarm" / "miners" / "0" / "page-token").read_text().strip())
        page.screenshot(path=tmp_path / "miner.png", full_page=True)
        page.get_by_role("button", name="Stop").click()
        page.get_by_text("Stopped: its leases went back.").wait_for()
        wait(False)
        page.get_by_role("button", name="Start").click()
        page.get_by_text("Started.").wait_for()
        wait(True)
        page.get_by_text("run watched · stage").wait_for()
        browser.close()
