"""Debian's Chromium through Playwright, where both are there; whoever has not is told what is missing."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DESK = {"width": 1280, "height": 900}
PHONE = {"width": 390, "height": 844}


def needs_browser() -> pytest.MarkDecorator:
    try:
        import playwright  # noqa: F401
    except ImportError:
        return pytest.mark.skip(reason="playwright isn't installed: pip install playwright")
    return pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium")


@asynccontextmanager
async def browsing(
    url: str, *, viewport: dict[str, int] = DESK, may_fail: tuple[str, ...] = (), **options: Any
) -> AsyncIterator[Any]:
    """A page at ``url``. Nothing may go wrong in it (but what ``may_fail`` names), nor may it ask another server."""
    from playwright.async_api import async_playwright

    troubles: list[str] = []
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            context = await browser.new_context(viewport=viewport, **options)
            context.set_default_timeout(30_000)
            page = await context.new_page()
            page.on("pageerror", lambda error: troubles.append(f"error: {error}"))
            page.on("console", lambda said: troubles.append(said.text) if said.type == "error" else None)
            server = url.split("/#")[0].rstrip("/")
            page.on("request", lambda asked: None if asked.url.startswith(server) else troubles.append(asked.url))
            await page.goto(url)
            yield page
        finally:
            await browser.close()
    found = [trouble for trouble in troubles if not any(word in trouble for word in may_fail)]
    assert not found, found
