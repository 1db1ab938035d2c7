"""Deadlines never grow, waits nest, seeds depend on their parts alone; a service stops in its documented order."""

from __future__ import annotations

import asyncio
import io
import os
import signal
from dataclasses import fields, replace
from pathlib import Path

import pytest
from loguru import logger

from subnet.errors import ConfigError, DeadlinePassed
from subnet.logs import REDACTOR, ReasonLog, Redactor, bound, setup
from subnet.service import Service, TaskEnded
from subnet.timing import (
    NESTING,
    TIMEOUTS,
    Backoff,
    Deadline,
    ManualClock,
    SystemClock,
    Timeouts,
    check_nesting,
    render_timeouts_markdown,
    seeded,
)

ROOT = Path(__file__).resolve().parent.parent


def test_a_deadline_passes_once_and_never_grows() -> None:
    clock = ManualClock()
    deadline = Deadline.after(5, clock)
    assert deadline.remaining_s() == 5
    assert deadline.sooner(2).at_s == clock.now_s() + 2
    assert deadline.sooner(9) == deadline
    clock.advance(4)
    deadline.check("waiting")
    assert not deadline.expired
    clock.advance(1)
    assert deadline.expired
    assert deadline.remaining_s() == 0
    with pytest.raises(DeadlinePassed, match="waiting"):
        deadline.check("waiting")


async def test_limit_cancels_and_names() -> None:
    with pytest.raises(DeadlinePassed, match="a long wait"):
        async with Deadline.after(0.01).limit("a long wait"):
            await asyncio.Event().wait()


async def test_limit_leaves_the_timeouts_of_others_alone() -> None:
    with pytest.raises(TimeoutError, match="theirs") as raised:
        async with Deadline.after(60).limit("ours"):
            raise TimeoutError("theirs")
    assert not isinstance(raised.value, DeadlinePassed)


def test_clocks() -> None:
    clock = ManualClock()
    wall_ns = clock.wall_ns()
    clock.advance(1.5)
    assert clock.wall_ns() - wall_ns == 1_500_000_000
    assert SystemClock().now_s() <= SystemClock().now_s()


def test_backoff_grows_to_its_cap_and_resets() -> None:
    backoff = Backoff(0.1, 2.0, seeded("backoff"))
    waits = [backoff.next_s() for _ in range(100)]
    for i, wait_s in enumerate(waits):
        whole_s = min(2.0, 0.1 * 2**i)
        assert whole_s / 2 <= wait_s <= whole_s
    assert len(set(waits[10:])) > 50
    backoff.reset()
    assert backoff.next_s() <= 0.1


def test_seeds_depend_on_their_parts_and_nothing_else() -> None:
    assert seeded("a", 1, b"x").random() == seeded("a", 1, b"x").random()
    streams = [("a", "bc"), ("ab", "c"), ("abc",), (b"abc",), (1,), ("1",), (12,), (1, 2), ()]
    assert len({seeded(*parts).random() for parts in streams}) == len(streams)


def test_the_waits_nest() -> None:
    check_nesting()


@pytest.mark.parametrize(("inner", "factor", "outer", "why"), NESTING)
def test_a_wait_that_does_not_nest_is_named(inner: str, factor: float, outer: str, why: str) -> None:
    wrong = replace(TIMEOUTS, **{inner: getattr(TIMEOUTS, outer) / factor})
    with pytest.raises(ConfigError) as raised:
        check_nesting(wrong)
    assert wrong != TIMEOUTS
    assert "must be below" in str(raised.value)


def test_every_wait_is_positive_and_said_what_for() -> None:
    with pytest.raises(ConfigError, match="probe_s"):
        Timeouts(probe_s=0)
    assert all(item.name.endswith("_s") and item.metadata["doc"].endswith(".") for item in fields(Timeouts))


def test_the_page_of_timeouts_is_current() -> None:
    page = (ROOT / "docs" / "timeouts.md").read_text()
    assert page == render_timeouts_markdown(), "run: python -m subnet.timing > docs/timeouts.md"


# --- service ----------------------------------------------------------------------------------------------------------


class Recorder:
    def __init__(self) -> None:
        self.events: list[str] = []

    def step(self, name: str, error: Exception | None = None, *, hang: bool = False):
        async def run() -> None:
            self.events.append(name)
            if error is not None:
                raise error
            if hang:
                await asyncio.Event().wait()

        return run

    def task(self, name: str):
        async def run() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                self.events.append(f"{name} cancelled")

        return run


async def test_a_service_stops_in_its_documented_order() -> None:
    said = Recorder()
    service = Service("test")
    service.forever("loop", said.task("loop"))
    for name in ("hand back", "flush"):
        service.on_stop(name, said.step(name))
    for name in ("store", "server"):
        service.on_close(name, said.step(f"close {name}"))
    running = asyncio.create_task(service.run())
    await asyncio.sleep(0)
    os.kill(os.getpid(), signal.SIGTERM)
    await running
    assert said.events == ["hand back", "flush", "loop cancelled", "close server", "close store"]
    assert service.stop_reason == "SIGTERM"
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


async def test_a_forever_task_that_returns_is_an_error() -> None:
    said = Recorder()
    service = Service("test")
    service.forever("short", said.step("short"))
    service.forever("loop", said.task("loop"))
    service.on_stop("hand back", said.step("hand back"))
    service.on_close("store", said.step("close store"))
    with pytest.raises(TaskEnded, match="short"):
        await service.run(handle_signals=False)
    assert said.events == ["short", "loop cancelled", "close store"]


async def test_failures_close_everything_and_are_raised() -> None:
    said = Recorder()
    service = Service("test")
    service.forever("bad", said.step("bad", ValueError("task")))
    service.on_close("first", said.step("close first"))
    service.on_close("broken", said.step("close broken", OSError("close")))
    with pytest.raises(ExceptionGroup) as raised:
        await service.run(handle_signals=False)
    assert [str(error) for error in raised.value.exceptions] == ["task", "close"]
    assert said.events == ["bad", "close broken", "close first"]


async def test_a_step_that_hangs_is_given_up() -> None:
    said = Recorder()
    service = Service("test", grace_s=0.01)
    service.on_stop("hang", said.step("hang", hang=True))
    service.on_close("close", said.step("close"))
    service.stop()
    with pytest.raises(DeadlinePassed, match="hang"):
        await service.run(handle_signals=False)
    assert said.events == ["hang", "close"]


# --- logs -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def log():
    stream = io.StringIO()
    setup(stream, "DEBUG", run="demo")
    yield stream
    logger.remove()
    logger.configure(extra={})


def test_one_event_a_line_with_its_fields(log: io.StringIO) -> None:
    bound(step=3, stage=1, hotkey="5F", other="x").info("sealed {}\nwith <red>{{braces}}</red>", 7)
    (line,) = log.getvalue().splitlines()
    assert line.endswith("INFO    run=demo step=3 stage=1 hotkey=5F other=x | sealed 7\\nwith <red>{braces}</red>")


def test_an_exception_is_one_line_too(log: io.StringIO) -> None:
    try:
        raise ValueError("no\nway")
    except ValueError:
        logger.exception("failed")
    (line,) = log.getvalue().splitlines()
    assert "| failed | ValueError: no\\nway at test_timing.py:" in line


def test_a_level_that_is_not_known() -> None:
    with pytest.raises(ConfigError, match="LOUD"):
        setup(io.StringIO(), "LOUD")


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("GET http://h:1/blob/ab?size=4&sig=00ff done", "GET http://h:1/blob/ab?[query] done"),
        ("PUT /blob/ab?size=4&sig=00ff", "PUT /blob/ab?[query]"),
        ("signed 0x" + "ab" * 64 + ".", "signed [signature]."),
        ("postgres://me:pw@host/db", "postgres://[user]@host/db"),
        ("secret=hunter2 next", "secret=[secret] next"),
        ("{'password': 'hunter2'}", "{'password': '[secret]'}"),
        ("blob " + "ab" * 32, "blob " + "ab" * 32),
        ("step 3 of 4?", "step 3 of 4?"),
    ],
)
def test_what_must_not_be_read_is_not_written(text: str, clean: str) -> None:
    assert Redactor().clean(text) == clean


def test_a_registered_secret_is_not_written(log: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(REDACTOR, "_secrets", set())
    REDACTOR.add_secret(b"\x01" * 16)
    logger.info("key {}", (b"\x01" * 16).hex())
    assert log.getvalue().endswith("| key [secret]\n")


def test_a_reason_is_said_when_it_changes(log: io.StringIO) -> None:
    reasons = ReasonLog(max_subjects=2)
    said = [reasons.note("stage 1", code, "3 of 4") for code in ("waiting", "waiting", "ready", "waiting")]
    assert said == [True, False, True, True]
    assert log.getvalue().count("\n") == 3
    reasons.note("stage 2", "x")
    reasons.note("stage 3", "x")
    assert reasons.note("stage 1", "waiting")
    reasons.forget("stage 1")
    assert reasons.note("stage 1", "waiting")
