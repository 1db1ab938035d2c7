"""The page of a validator that really leads a run: a miner is killed, the page marks it, and says why a score is what it is."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest
from page_browser import CHROMIUM, needs_browser

from iota.swarm import LocalSwarm, SwarmOptions
from subnet.run.runfile import parse_run
from subnet.timing import Deadline

pytestmark = [needs_browser(), pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parent.parent
RUN = """
[run]
name = "watched"
steps = 30
[model.config]
model_type = "llama"
hidden_size = 48
intermediate_size = 96
num_hidden_layers = 4
num_attention_heads = 4
vocab_size = 300
max_position_embeddings = 64
[data]
sources = ["book.txt"]
sequence_length = 32
[pipeline]
stages = 2
microbatches = 6
microbatch_rows = 2
[evaluation]
rows = 4
every_steps = 5
"""


T = TypeVar("T")


def aside(work: Callable[[], T]) -> T:
    """In a thread of its own: where Playwright is, asyncio can't run anything else."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work).result()


def test_a_killed_miner_is_a_mark_on_the_curve_and_every_score_is_explained(tmp_path: Path):
    from playwright.sync_api import sync_playwright

    (tmp_path / "book.txt").write_text(
        (ROOT / "iota" / "assets" / "moby_dick.txt").read_text("utf-8")[:60_000], "utf-8"
    )
    options = SwarmOptions(device="cpu", measure_costs=False, start_s=200.0, spare_miners=1)
    with LocalSwarm(tmp_path / "swarm", parse_run(RUN, tmp_path), 4, options) as swarm, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.set_default_timeout(240_000)  # a deadline, not an expectation: a machine may be busy
        page.goto(swarm.page_url)
        page.wait_for_url("**/#/run/watched")
        page.locator("#loss canvas").first.wait_for()
        status = aside(lambda: swarm.wait_until(lambda found: found.summary.step >= 6, Deadline.after(240)))
        sizes = [sum(member.stage == stage for member in status.members) for stage in range(2)]
        victim = next(member.hotkey for member in status.members if sizes[member.stage] > 1)
        number = next(n for n in range(4) if swarm.miner_hotkey(n) == victim)
        swarm.kill(number)
        page.locator("#mark-legend").get_by_text("1 lost").wait_for()
        page.locator("#disruptions li").filter(has_text=f"{victim[:8]}").filter(has_text="is gone").first.wait_for()
        aside(swarm.add_miner)
        page.locator("#merges .good").first.wait_for()
        page.get_by_label(f"Why {victim} has this score").click()
        dialog = page.get_by_role("dialog")
        dialog.get_by_text("everybody's worth").wait_for()
        assert dialog.locator("tbody th").all_inner_texts()[-1] == "score"
        page.keyboard.press("Escape")
        page.get_by_text("Finished. Run root").wait_for()
        assert aside(swarm.final_root) in page.get_by_text("Finished. Run root").inner_text()
        page.screenshot(path=tmp_path / "page.png", full_page=True)
        browser.close()
