"""The run's page in a real browser: watch a run, see a disruption marked, ask why a score is what it is; by keyboard too."""

from __future__ import annotations

import re

import pytest
from page_browser import PHONE, browsing, needs_browser
from page_cases import PlayedRun, served

pytestmark = [needs_browser(), pytest.mark.slow]


async def test_a_run_is_watched_and_a_disruption_is_marked_as_it_happens():
    run = PlayedRun(num_members=9, num_stages=3, num_steps=400).play(120, calm=True)
    async with served(run, every_s=0.1) as (listener, _), browsing(listener.url) as page:
        await page.wait_for_url("**/#/run/big")  # the only run there is opens by itself
        await page.get_by_role("heading", name="big").wait_for()
        assert await page.get_by_role("status").filter(has_text="Live").is_visible()
        await page.get_by_text("Nothing has disturbed the run so far.").first.wait_for()
        await page.locator("#loss .chart[aria-label*='at step 119;']").wait_for()
        assert await page.locator(".cell").count() == 9
        await page.locator(".tile").filter(has_text="of what its members' devices can").wait_for()
        gone = run.disturb("silent")
        run.play(4, calm=True)
        await page.locator("#mark-legend").get_by_text("1 lost").wait_for()
        await page.locator("#disruptions li").filter(has_text=f"{gone} is gone: silent").wait_for()
        await page.get_by_text("step 124 of 400").wait_for()
        await page.locator("#loss .chart[aria-label*='at step 123; 3 disruptions marked']").wait_for()


async def test_why_a_score_is_what_it_is_and_back_by_keyboard_alone():
    run = PlayedRun(num_members=6, num_stages=2, num_steps=40).play(20)
    async with served(run) as (listener, _), browsing(listener.url) as page:
        why = page.locator("#scores button.link").first
        await why.focus()
        await page.keyboard.press("Enter")
        dialog = page.get_by_role("dialog")
        await dialog.get_by_text("Place 1 of 6.").wait_for()
        terms = await dialog.locator("tbody th").all_inner_texts()
        assert terms[-1] == "score"
        assert {"work", "uptime", "deadlines", "audits", "reliability", "worth"} < set(terms)
        await page.keyboard.press("Escape")
        await dialog.wait_for(state="detached")
        assert await why.evaluate("node => node === document.activeElement")


async def test_the_curve_is_read_by_arrow_keys_and_as_a_table():
    run = PlayedRun(num_members=6, num_stages=2, num_steps=40).play(20, calm=True)
    async with served(run) as (listener, _), browsing(listener.url) as page:
        chart = page.locator("#loss .chart").first
        await page.locator("#loss canvas").first.wait_for()
        await chart.focus()
        await page.keyboard.press("Home")
        await page.keyboard.press("ArrowRight")
        await page.locator("#loss .tip").filter(has_text="step 1 ").wait_for()
        assert "loss" in await page.locator("#loss [aria-live]").first.inner_text()
        await page.locator("#loss summary").press("Enter")
        rows = page.locator("#loss tbody tr")
        await rows.nth(19).wait_for()
        assert await rows.first.locator("th").inner_text() == "19"


async def test_the_journal_is_searched():
    run = PlayedRun(num_members=6, num_stages=2, num_steps=3_000).play(2_000, calm=True)
    run.disturb("silent")
    run.play(1_500, calm=True)
    async with served(run) as (listener, _), browsing(listener.url) as page:
        search = page.get_by_label("Search the journal")
        await search.fill("gone silent")
        await search.press("Enter")
        await page.locator("#journal li").filter(has_text="is gone: silent").wait_for()
        await page.get_by_text(re.compile("record.* found;")).wait_for()


async def test_on_a_phone_in_the_dark_nothing_sticks_out_and_the_theme_is_kept():
    run = PlayedRun(num_members=120, num_stages=4, num_steps=900).play(800)
    async with served(run) as (listener, _):
        async with browsing(listener.url, viewport=PHONE, color_scheme="dark", has_touch=True) as page:
            await page.locator(".cell").nth(119).wait_for()
            await page.locator("#loss canvas").first.wait_for()
            assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            dark = await page.evaluate("getComputedStyle(document.body).backgroundColor")
            await page.get_by_role("button", name="Colours").click()
            await page.reload()
            await page.locator(".cell").nth(119).wait_for()
            assert await page.evaluate("document.documentElement.dataset.theme") == "light"
            assert await page.evaluate("getComputedStyle(document.body).backgroundColor") != dark


async def test_a_stage_without_a_miner_a_lost_connection_and_an_unknown_run_say_so():
    run = PlayedRun(name="fresh", num_members=4, num_stages=2, num_steps=100)
    run.views = {member: view for member, view in run.views.items() if view.stage == 0}
    run.waiting_for = "a miner for stage 1"
    async with served(run) as (listener, feed), browsing(listener.url) as page:
        await page.get_by_text("Waits for a miner for stage 1").wait_for()
        await page.get_by_text("Nobody serves stage 1: the run waits for a miner.").wait_for()
        await page.get_by_text("No step is sealed yet").wait_for()
        await feed.close()
        await page.get_by_text("Not live: the validator is stopping").wait_for()
    async with served(run) as (listener, _):
        async with browsing(f"{listener.url}/#/run/other", may_fail=("404",)) as page:
            await page.locator("main").get_by_text("Not live: no run is called 'other'").wait_for()


async def test_every_landmark_control_and_table_has_a_name():
    run = PlayedRun(num_members=30, num_stages=3, num_steps=400).play(300)
    async with served(run) as (listener, _), browsing(listener.url) as page:
        await page.locator("#scores button.link").first.wait_for()
        nameless = await page.evaluate(
            """() => [...document.querySelectorAll("button, input, a, section, table, [role=region], progress")].filter((node) => {
              const by = node.getAttribute("aria-labelledby");
              const said = node.getAttribute("aria-label") || (by && document.getElementById(by)?.textContent) || node.textContent
                || [...(node.labels ?? [])].map((label) => label.textContent).join("") || node.caption?.textContent;
              return !said.trim();
            }).map((node) => node.outerHTML.slice(0, 120))"""
        )
        assert nameless == []
        assert await page.locator("h1").count() == 1
        assert {await page.locator(name).count() for name in ("header", "main", "nav", "footer")} == {1}
