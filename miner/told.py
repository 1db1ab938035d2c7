"""What a waiting miner was told, and since when it waits: kept in its directory, so that a restart doesn't forget it.

The file ``waiting.json`` is there while a miner waits to be let into a run, and says who told it what. It is gone once the
miner is a member.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
from loguru import logger

from subnet.errors import IotaError, Refusal
from subnet.store.disk import atomic_write
from subnet.timing import SYSTEM_CLOCK, Clock

WAITING_FILE = "waiting.json"
WRITE_EVERY_S = 10.0
MAX_TEXT = 500


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """Wall times in seconds. ``code`` empty: nobody refuses, it waits for a run."""

    since_s: float
    """Since when it waits for this, restarts included."""
    time_s: float
    """When it was told so last."""
    validator: str
    run: str
    code: str
    reason: str
    hint: str = ""
    again_s: float | None = None
    """When it asks again."""


class ToldKeeper:
    def __init__(self, directory: Path, clock: Clock = SYSTEM_CLOCK) -> None:
        self._path, self._clock = directory / WAITING_FILE, clock
        self.now: Told | None = read_told(directory)
        """What it waits for; after a start what the last process waited for."""
        self._written_s = 0.0

    def note(self, validator: str, run: str, refusal: Refusal) -> None:
        """Told again, or something new."""
        now_s = self._clock.wall_ns() / 1e9
        before = self.now
        same = before is not None and (before.run, before.code) == (run, refusal.code)
        told = Told(
            since_s=before.since_s if same and before is not None else now_s,
            time_s=now_s,
            validator=validator,
            run=run,
            code=refusal.code,
            reason=refusal.reason[:MAX_TEXT],
            hint=(refusal.hint or "")[:MAX_TEXT],
            again_s=None if refusal.retry_after is None else now_s + refusal.retry_after,
        )
        changed = not same or (before is not None and before.reason != told.reason)
        self.now = told
        if changed or now_s - self._written_s >= WRITE_EVERY_S:
            self._write(told, now_s)

    def waits_for_run(self, reason: str) -> None:
        self.note("", "", Refusal("", reason))

    def forget(self) -> None:
        """It is a member."""
        self.now = None
        self._path.unlink(missing_ok=True)

    def say(self) -> None:
        """At a start: what the last process was told."""
        if self.now is not None:
            logger.info("before this start: {}", in_words(self.now, self._clock.wall_ns() / 1e9))

    def _write(self, told: Told, now_s: float) -> None:
        try:
            atomic_write(self._path, msgspec.json.format(msgspec.json.encode(told)) + b"\n", durable=False)
            self._written_s = now_s
        except (OSError, IotaError) as error:
            logger.warning("{} isn't written: {}", self._path, error)


def read_told(directory: Path) -> Told | None:
    """None where nothing is waited for, or the file can't be read."""
    try:
        return msgspec.json.decode((directory / WAITING_FILE).read_bytes(), type=Told)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        logger.warning("{} can't be read: {}", directory / WAITING_FILE, error)
        return None


def in_words(told: Told, now_s: float) -> str:
    """``waiting for 12 min to join run whale at http://...: class_open: ... (last told 3 s ago)``."""
    what = f"to join run {told.run} at {told.validator}" if told.run else "for a run"
    code = f"{told.code}: " if told.code else ""
    hint = f" ({told.hint})" if told.hint else ""
    return f"waiting for {_ago(now_s - told.since_s)} {what}: {code}{told.reason}{hint}; last told {_ago(now_s - told.time_s)} ago"


def _ago(seconds: float) -> str:
    if seconds < 120:
        return f"{max(0.0, seconds):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
