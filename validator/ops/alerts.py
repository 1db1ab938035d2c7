"""Alerts by webhook: one message when a problem has lasted, one when it is over; nothing in between.

The body is JSON with ``text`` and ``content`` beside the fields, so that Slack, Mattermost and Discord take it as it is. The
addresses are secrets: they come from a file that only its owner can read, and no log line has them.
"""

from __future__ import annotations

import asyncio
import stat
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

import aiohttp
import msgspec
from loguru import logger

from subnet.errors import ConfigError
from subnet.logs import REDACTOR
from subnet.timing import SYSTEM_CLOCK, TIMEOUTS, Backoff, Clock
from validator.ops.problems import Problem

LOOK_EVERY_S = 5.0
HOLD_S = 60.0
"""A problem is told once it has lasted so long, and its end once it was gone so long: what flickers isn't told at all."""
QUEUED, TRIES = 64, 8
MAX_URLS = 8


class Alert(msgspec.Struct, frozen=True):
    """What is posted."""

    state: str
    """``firing`` or ``resolved``."""
    code: str
    severity: str
    summary: str
    hint: str
    validator: str
    since_s: float
    """Seconds since the problem was first seen."""
    text: str
    content: str


@dataclass
class _Seen:
    problem: Problem
    first_s: float
    last_s: float
    told: bool = False


class AlertBook:
    """Which problems are to be told now. Pure: the times are given."""

    def __init__(self, validator: str, hold_s: float = HOLD_S) -> None:
        self._validator, self._hold_s = validator, hold_s
        self._seen: dict[str, _Seen] = {}

    def look(self, problems: Sequence[Problem], now_s: float) -> list[Alert]:
        found: list[Alert] = []
        for problem in problems:
            seen = self._seen.setdefault(problem.code, _Seen(problem, now_s, now_s))
            seen.problem, seen.last_s = problem, now_s
            if not seen.told and now_s - seen.first_s >= self._hold_s:
                seen.told = True
                found.append(self._alert("firing", seen, now_s))
        present = {problem.code for problem in problems}
        for code, seen in list(self._seen.items()):
            gone_s = now_s - seen.last_s
            if code not in present and (gone_s >= self._hold_s or not seen.told):
                del self._seen[code]
                if seen.told:
                    found.append(self._alert("resolved", seen, now_s))
        return found

    def _alert(self, state: str, seen: _Seen, now_s: float) -> Alert:
        problem = seen.problem
        words = problem.summary if state == "firing" else f"over: {problem.summary}"
        text = f"[{state}] {problem.code}: {words}" + (f"; {problem.hint}" if state == "firing" else "")
        return Alert(
            state, problem.code, problem.severity, problem.summary, problem.hint, self._validator,
            now_s - seen.first_s, text, text,
        )  # fmt: skip


class Alerter:
    """``problems``: asked every few seconds. A webhook that is away gets what is queued later, the oldest dropped first."""

    def __init__(
        self,
        urls: Sequence[str],
        validator: str,
        problems: Callable[[], Sequence[Problem]],
        clock: Clock = SYSTEM_CLOCK,
        *,
        hold_s: float = HOLD_S,
        look_every_s: float = LOOK_EVERY_S,
    ) -> None:
        self._problems, self._clock, self._look_every_s = problems, clock, look_every_s
        self._book = AlertBook(validator, hold_s)
        self._queues = {url: deque[Alert](maxlen=QUEUED) for url in urls}
        self._more = asyncio.Event()

    async def run(self) -> NoReturn:
        """Forever."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUTS.http_request_s)) as session:
            async with asyncio.TaskGroup() as group:
                for number, (url, queue) in enumerate(self._queues.items(), start=1):
                    group.create_task(self._post_forever(session, number, url, queue))
                await self._watch()
        raise AssertionError("unreachable")

    async def _watch(self) -> NoReturn:
        while True:
            for alert in self._book.look(self._problems(), self._clock.now_s()):
                logger.warning("alert: {}", alert.text)
                for queue in self._queues.values():
                    queue.append(alert)
                self._more.set()
            await asyncio.sleep(self._look_every_s)

    async def _post_forever(
        self, session: aiohttp.ClientSession, number: int, url: str, queue: deque[Alert]
    ) -> NoReturn:
        while True:
            while queue:
                alert = queue.popleft()
                await self._post(session, number, url, alert)
            await self._more.wait()
            self._more.clear()

    async def _post(self, session: aiohttp.ClientSession, number: int, url: str, alert: Alert) -> None:
        backoff = Backoff(1.0, 60.0)
        body = msgspec.json.encode(alert)
        why = ""
        for _ in range(TRIES):
            try:
                headers = {"Content-Type": "application/json"}
                async with session.post(url, data=body, headers=headers, allow_redirects=False) as answer:
                    if answer.status < 300:
                        return
                    why = f"HTTP {answer.status}"
                    if answer.status < 500 and answer.status != 429:
                        break  # it will say the same again
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                why = type(error).__name__
            await asyncio.sleep(backoff.next_s())
        logger.warning("webhook {} didn't take the alert {}: {}", number, alert.code, why)


def webhooks_from(path: Path) -> tuple[str, ...]:
    """One address a line; empty lines and lines that begin with # are skipped. :class:`ConfigError` says what is wrong."""
    try:
        mode = path.stat().st_mode
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--alert.webhooks {path} can't be read: {error}", hint="a text file, one URL a line"
        ) from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(f"--alert.webhooks {path} can be read by others", hint=f"chmod 600 {path}")
    urls = tuple(line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#"))
    if not 0 < len(urls) <= MAX_URLS:
        raise ConfigError(f"--alert.webhooks {path} has {len(urls)} addresses", hint=f"1 to {MAX_URLS}, one a line")
    for number, url in enumerate(urls, start=1):
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--alert.webhooks {path}: address {number} is no http(s) URL", hint="https://…")
        REDACTOR.add_secret(url)
    return urls
