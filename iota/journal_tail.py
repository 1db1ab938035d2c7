"""A run's journal as lines, asked of a validator: the newest, a search, and what comes after them."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from urllib.parse import quote, urlencode

import msgspec

from subnet.errors import ConfigError, NotFound, Refusal, Refused, TooLarge, Unreachable
from validator.journal_text import JournalLine, JournalPage

LIMIT_BYTES = 4 << 20
AT_ONCE = 200
PATIENCE_S = 60.0
"""A validator that restarts is waited for so long by who follows it."""


class _Run(msgspec.Struct, frozen=True):
    name: str
    state: str


def ask(url: str, path: str, timeout_s: float) -> bytes:
    """The JSON body; a refusal raises :class:`Refused` with its code, no answer :class:`Unreachable`."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--validator.url = {url!r} is no URL", hint="such as http://127.0.0.1:8091")
    try:
        with urllib.request.urlopen(url.rstrip("/") + path, timeout=timeout_s) as answer:
            body = answer.read(LIMIT_BYTES + 1)
    except urllib.error.HTTPError as error:
        raise _refused(url, error) from error
    except (OSError, ValueError) as error:
        raise Unreachable(
            f"{url} doesn't answer: {error}", hint="is the validator up? iota doctor --validator.url"
        ) from error
    if len(body) > LIMIT_BYTES:
        raise TooLarge(f"{url} answers with more than {LIMIT_BYTES} bytes")
    return body


def _refused(url: str, error: urllib.error.HTTPError) -> Exception:
    try:
        return Refused(msgspec.json.decode(error.read(65536), type=Refusal))
    except msgspec.MsgspecError:
        return ConfigError(f"{url} answers {error.code}, which isn't ours", hint="check --validator.url")


def active_run(url: str, timeout_s: float) -> str:
    """The run that is being worked on, else the last one; :class:`NotFound` where there is none."""
    runs = msgspec.json.decode(ask(url, "/v1/page/runs", timeout_s), type=tuple[_Run, ...])
    if not runs:
        raise NotFound("this validator has no runs", hint="submit one with iota run submit")
    going = [run for run in runs if run.state not in ("finished", "queued")]
    return (going or runs)[0 if going else -1].name


def page(
    url: str, run: str, timeout_s: float, *, before: int | None = None, limit: int = AT_ONCE, query: str = ""
) -> JournalPage:
    asked: dict[str, object] = {"limit": limit}
    if query:
        asked["q"] = query
    if before is not None:
        asked["before"] = before
    body = ask(url, f"/v1/page/runs/{quote(run, safe='')}/journal?{urlencode(asked)}", timeout_s)
    return msgspec.json.decode(body, type=JournalPage)


def newest(url: str, run: str, timeout_s: float, *, count: int, query: str = "") -> list[JournalLine]:
    """The ``count`` newest lines that have every word of ``query``, oldest first; as many as are still kept."""
    found: list[JournalLine] = []
    before: int | None = None
    while len(found) < count:
        one = page(url, run, timeout_s, before=before, limit=min(AT_ONCE, count - len(found)), query=query)
        found += one.lines
        if one.before is None:
            break
        before = one.before
    return found[::-1]


def follow(
    url: str,
    run: str,
    timeout_s: float,
    after: int,
    *,
    query: str = "",
    every_s: float = 0.5,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[JournalLine]:
    """Every later line, for ever; the number of the last one seen is ``after``. A validator that is away is waited for."""
    away_s = 0.0
    while True:
        try:
            fresh = _since(url, run, timeout_s, after, query)
            away_s = 0.0
        except Unreachable:
            away_s += every_s
            if away_s > PATIENCE_S:
                raise
            fresh = []
        for line in fresh:
            after = line.number
            yield line
        sleep(every_s)


def _since(url: str, run: str, timeout_s: float, after: int, query: str) -> list[JournalLine]:
    found: list[JournalLine] = []
    before: int | None = None
    while True:
        one = page(url, run, timeout_s, before=before, query=query)
        found += [line for line in one.lines if line.number > after]
        if one.before is None or one.before <= after + 1 or any(line.number <= after for line in one.lines):
            return found[::-1]
        before = one.before
