"""Live updates of runs for browsers, as server-sent events: made once for all viewers of a run, a bounded queue for each viewer.

A viewer that doesn't read fast enough is told so and dropped; more than ``max_viewers`` at a time are refused. Nothing is
computed while nobody looks.

Events: ``overview`` (all of it, first), ``update`` (what changed), ``bye`` (a refusal: why it ends). Comments are heartbeats.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
from loguru import logger

from subnet.errors import Busy, IotaError, Refusal
from subnet.timing import TIMEOUTS
from validator.curve import StepPoint
from validator.page_desk import PageDesk
from validator.page_sight import MemberRow, Overview, RunSight

MAX_VIEWERS = 64
QUEUE_MESSAGES = 16
EVERY_S = 1.0
MEMBERS_PER_S = 500
"""So many members more make an update come a second later: it costs their number."""
LOOK_S = 0.5
"""How often a stream with nothing to say looks whether its viewer is still connected."""
MAX_NEW = 50
"""Steps or marks in one update; who missed more reads the history anew."""
HEARTBEAT = b": beat\n\n"

SLOW = Refusal("slow_viewer", "this page doesn't read its updates fast enough", 5.0, "it connects anew by itself")
CLOSING = Refusal("closing", "the validator is stopping", 5.0, "it connects anew by itself")

_encoder = msgspec.json.Encoder()


class TooManyViewers(Busy):
    """So many pages are open that another one would cost the run."""

    code = "too_many_viewers"


class Update(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What changed since the last one. ``set``: fields of the overview."""

    set: dict[str, msgspec.Raw] = {}
    rows: list[MemberRow] = []
    """Members that are new or changed."""
    gone: list[str] = []
    """Ids of members that are no longer there."""
    steps: list[StepPoint] = []
    marks: list[tuple[int, str, str]] = []
    """(step, kind, words)."""
    reload: bool = False
    """The history has to be read anew: steps were undone, or too much is new."""


def event_bytes(kind: str, value: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encoder.encode(value))


@dataclass(eq=False)
class Viewer:
    run: str
    queue: asyncio.Queue[bytes] = field(default_factory=lambda: asyncio.Queue(QUEUE_MESSAGES))
    ended: Refusal | None = None
    """Why nothing more comes."""

    def push(self, message: bytes) -> bool:
        """False: its queue is full, it is dropped."""
        if self.ended is not None:
            return False
        try:
            self.queue.put_nowait(message)
        except asyncio.QueueFull:
            self.end(SLOW)
            return False
        return True

    def end(self, why: Refusal) -> None:
        if self.ended is None:
            self.ended = why
            while not self.queue.empty():
                self.queue.get_nowait()
            self.queue.put_nowait(event_bytes("bye", why))


@dataclass
class _Told:
    """What the viewers of a run have been told last."""

    fields: dict[str, bytes] = field(default_factory=dict[str, bytes])
    rows: dict[str, MemberRow] = field(default_factory=dict[str, MemberRow])
    last_step: int = -1
    epoch: int = 0
    num_marks: int = 0


class PageFeed:
    def __init__(self, desk: PageDesk, *, max_viewers: int = MAX_VIEWERS, every_s: float = EVERY_S) -> None:
        self._desk, self._max_viewers, self._every_s = desk, max_viewers, every_s
        self.viewers: set[Viewer] = set()
        self._told: dict[str, _Told] = {}
        self._ticker: asyncio.Task[None] | None = None

    async def open(self, run: str) -> Viewer:
        """A viewer of the run that has the overview before it; :class:`TooManyViewers`, or NotFound. To be closed."""
        if len(self.viewers) >= self._max_viewers:
            raise TooManyViewers(
                f"{len(self.viewers)} pages are open at this validator, as many as it serves",
                hint="close one, or look again later",
                retry_after_s=30.0,
            )
        viewer = Viewer(run)
        self.viewers.add(viewer)
        try:
            sight = await self._desk.sight(run)
        except BaseException:
            self.viewers.discard(viewer)
            raise
        if run not in self._told:
            self._told[run] = self._begin(sight)
        viewer.push(event_bytes("overview", self._desk.overview(sight)))
        if self._ticker is None or self._ticker.done():
            self._ticker = asyncio.create_task(self._tick_forever(), name="page feed")
        return viewer

    def close_viewer(self, viewer: Viewer) -> None:
        self.viewers.discard(viewer)

    async def close(self) -> None:
        """Tell everyone, and stop."""
        for viewer in self.viewers:
            viewer.end(CLOSING)
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.wait([self._ticker])

    async def next(self, viewer: Viewer, is_gone: Callable[[], bool]) -> bytes:
        """What is to be sent next: a message, or a heartbeat when there is none for a while.

        Raises ConnectionResetError once ``is_gone``: its place is free for the next one soon.
        """
        for _ in range(max(1, round(TIMEOUTS.stream_keepalive_s / LOOK_S))):
            if is_gone():
                raise ConnectionResetError("the viewer is gone")
            try:
                async with asyncio.timeout(LOOK_S):
                    return await viewer.queue.get()
            except TimeoutError:
                continue
        return HEARTBEAT

    # --- all viewers -----------------------------------------------------------------------------------------

    async def _tick_forever(self) -> None:
        while self.viewers:
            most = max((len(told.rows) for told in self._told.values()), default=0)
            await asyncio.sleep(self._every_s * (1 + most / MEMBERS_PER_S))
            await self.tick()
        self._told.clear()

    async def tick(self) -> None:
        """Tell the viewers of each run what is new; a run of which there is nothing to tell ends for its viewers."""
        by_run: dict[str, list[Viewer]] = {}
        for viewer in self.viewers:
            by_run.setdefault(viewer.run, []).append(viewer)
        for run in [run for run in self._told if run not in by_run]:
            del self._told[run]
        for run, viewers in by_run.items():
            told = self._told.get(run)
            if told is None:
                continue  # it is being read
            try:
                message = self._message(await self._desk.sight(run), told)
            except IotaError as error:
                for viewer in viewers:
                    viewer.end(error.refusal())
                continue
            for viewer in viewers:
                if message is not None and not viewer.push(message):
                    logger.info("a viewer of run {} is dropped: {}", run, viewer.ended)

    def _begin(self, sight: RunSight) -> _Told:
        overview, curve = self._desk.overview(sight), self._desk.curve(sight)
        return _Told(
            _fields(overview),
            {row.id: row for row in overview.members},
            curve.step[-1] if len(curve) else -1,
            curve.epoch,
            sight.history.num_marks,
        )

    def _message(self, sight: RunSight, told: _Told) -> bytes | None:
        overview, curve, history = self._desk.overview(sight), self._desk.curve(sight), sight.history
        fields, rows = _fields(overview), {row.id: row for row in overview.members}
        changed = {name: msgspec.Raw(data) for name, data in fields.items() if told.fields.get(name) != data}
        num_steps, num_marks = 0, history.num_marks - told.num_marks
        if curve.epoch == told.epoch and len(curve):
            num_steps = max(0, curve.step[-1] - told.last_step)
        reload = curve.epoch != told.epoch or num_steps > MAX_NEW or not 0 <= num_marks <= MAX_NEW
        marks = list(history.marks)[len(history.marks) - num_marks :] if 0 < num_marks <= MAX_NEW else []
        update = Update(
            set=changed,
            rows=[row for key, row in rows.items() if told.rows.get(key) != row],
            gone=[key for key in told.rows if key not in rows],
            steps=[] if reload or not num_steps else curve.since(told.last_step, MAX_NEW),
            marks=[] if reload else [(mark.step, mark.kind, mark.text) for mark in marks],
            reload=reload,
        )
        told.fields, told.rows, told.epoch, told.num_marks = fields, rows, curve.epoch, history.num_marks
        told.last_step = curve.step[-1] if len(curve) else -1
        return event_bytes("update", update) if _says_more_than_time(update) else None


def _fields(overview: Overview) -> dict[str, bytes]:
    """Each as JSON, but what never changes and the members."""
    names = (name for name in overview.__struct_fields__ if name not in ("facts", "members"))
    return {name: _encoder.encode(getattr(overview, name)) for name in names}


def _says_more_than_time(update: Update) -> bool:
    new = update.rows or update.gone or update.steps or update.marks or update.reload
    return bool(new or any(name != "time_s" for name in update.set))
