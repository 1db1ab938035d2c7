"""The run's page in Chromium: time to the first screen, and memory over an hour of updates that is played faster.

    python -m benchmarks.page [--quick]

10,000 steps, 500 members in 6 stages, disruptions at random, served by the validator's own code. The last line is JSON. The hour is
1,800 updates (with 500 members one comes every 2 s), each drawn: a new one comes only when the one before is on the screen.
Needs playwright and Debian's chromium.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from subnet.timing import ManualClock

FIRST_SCREEN_MS, MEMORY_MB = 1000.0, 150.0
"""Memory is what the page's process holds for itself, as Chromium's own task manager counts it; ``most_pss_mb`` adds its share of
the browser's code."""
STEPS, MEMBERS, STAGES = 10_000, 500, 6
UPDATES, UPDATES_A_STEP = 1_800, 4
GAP_S = 0.27
"""The page draws at most every 0.25 s."""
OPENINGS = 5


def private_mb(pid: int) -> tuple[float, float]:
    """(private, proportional) memory of a process: what it alone holds, and with its share of what others hold too."""
    fields = dict.fromkeys(("Private_Clean", "Private_Dirty", "Pss"), 0)
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in fields:
            fields[name] = int(rest.split()[0])
    return (fields["Private_Clean"] + fields["Private_Dirty"]) / 1024, fields["Pss"] / 1024


async def renderer_pids(session: Any) -> set[int]:
    found = await session.send("SystemInfo.getProcessInfo")
    return {process["id"] for process in found["processInfo"] if process["type"] == "renderer"}


async def heap_mb(page: Any) -> float:
    session = await page.context.new_cdp_session(page)
    await session.send("HeapProfiler.collectGarbage")
    await session.send("Performance.enable")
    metrics = {metric["name"]: metric["value"] for metric in (await session.send("Performance.getMetrics"))["metrics"]}
    await session.detach()
    return metrics["JSHeapUsedSize"] / 2**20


def cpu_ms(pid: int) -> float:
    """Of all threads of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return 1000 * (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def first_screen_ms(browser: Any, url: str) -> tuple[float, float, int]:
    """From the navigation's start, with an empty cache, to the frame in which curve and members are; CPU time of the page's
    process until half a second later, which other work on the machine doesn't change much; and bytes received."""
    session = await browser.new_browser_cdp_session()
    before = await renderer_pids(session)
    context = await browser.new_context(viewport={"width": 1280, "height": 900})
    page = await context.new_page()
    await page.goto(url)
    await page.locator(".cell").nth(MEMBERS - 1).wait_for()
    await page.locator("#loss canvas").first.wait_for()
    await asyncio.sleep(0.5)
    ms = await page.evaluate("performance.getEntriesByName('first-screen')[0].startTime")
    spent_ms = max(cpu_ms(pid) for pid in await renderer_pids(session) - before)
    size = await page.evaluate(
        "performance.getEntriesByType('resource').reduce((sum, one) => sum + one.transferSize, 0)"
    )
    await context.close()
    return ms, spent_ms, size


async def an_hour(browser: Any, url: str, run: Any, feed: Any, clock: ManualClock, updates: int) -> dict[str, float]:
    session = await browser.new_browser_cdp_session()
    await (await browser.new_context()).new_page()
    before = await renderer_pids(session)
    page = await (await browser.new_context(viewport={"width": 1280, "height": 900})).new_page()
    await page.goto(url)
    await page.locator(".cell").nth(MEMBERS - 1).wait_for()
    await page.locator("#loss canvas").first.wait_for()
    blank, _ = private_mb(max(before))
    pid = max(await renderer_pids(session) - before, key=lambda pid: private_mb(pid)[0])  # another is kept in reserve
    first_heap, most, most_pss = await heap_mb(page), 0.0, 0.0
    for number in range(updates):
        run.move()
        if number % UPDATES_A_STEP == 0:
            run.play(1)
        run.time_ns += 10**9
        clock.advance(2.0)  # so that nothing is answered from memory
        await feed.tick()
        await asyncio.sleep(GAP_S)
        if number % 25 == 0 or number == updates - 1:
            private, pss = private_mb(pid)
            most, most_pss = max(most, private), max(most_pss, pss)
    heard = await page.locator("#loss .chart").first.get_attribute("aria-label")
    assert f"at step {run.step - 1:,}" in heard, f"the page missed updates: {heard}"
    last_heap = await heap_mb(page)
    return {
        "blank_page_private_mb": blank,
        "first_heap_mb": first_heap,
        "last_heap_mb": last_heap,
        "last_private_mb": private_mb(pid)[0],
        "most_private_mb": most,
        "most_pss_mb": most_pss,
    }


async def measure(quick: bool) -> dict[str, Any]:
    from page_browser import CHROMIUM
    from page_cases import PlayedRun, served
    from playwright.async_api import async_playwright

    run = PlayedRun(num_members=MEMBERS, num_stages=STAGES, num_steps=STEPS + UPDATES).play(STEPS)
    updates = 120 if quick else UPDATES
    began_s = time.monotonic()
    # The feed's own clock stands still: updates are made by hand, each after the page has drawn the one before.
    clock = ManualClock()
    async with served(run, every_s=3600.0, clock=clock) as (listener, feed), async_playwright() as playwright:
        url = f"{listener.url}/#/run/{run.name}"
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            opened = [await first_screen_ms(browser, url) for _ in range(2 if quick else OPENINGS)]
            hour = await an_hour(browser, url, run, feed, clock, updates)
        finally:
            await browser.close()
    median_ms = statistics.median(ms for ms, _, _ in opened)
    return {
        "steps": STEPS,
        "members": MEMBERS,
        "first_screen_ms": {"median": median_ms, "each": [ms for ms, _, _ in opened], "limit": FIRST_SCREEN_MS},
        "first_screen_cpu_ms": statistics.median(spent_ms for _, spent_ms, _ in opened),
        "first_screen_bytes": opened[0][2],
        "updates": updates,
        **hour,
        "memory_limit_mb": MEMORY_MB,
        "seconds": time.monotonic() - began_s,
        "ok": median_ms < FIRST_SCREEN_MS and hour["most_private_mb"] < MEMORY_MB,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="120 updates instead of an hour's 1,800")
    quick = parser.parse_args().quick
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
    found = asyncio.run(measure(quick))
    print(json.dumps(json.loads(json.dumps(found), parse_float=lambda text: round(float(text), 1))))
    return 0 if found["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
