"""A validator that is drained takes no new step, tells joiners to wait, and ends; other versions are refused with the remedy."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from journal_cases import NEVER, Rig, records_of

from subnet.errors import AuthFailed, InputError, VersionUnsupported
from subnet.protocol.drain import DrainRequest
from subnet.protocol.versions import agree, refusal_of, require_version
from subnet.run import events as ev
from subnet.run.state import works
from subnet.service import Service
from subnet.timing import ManualClock
from subnet.words import PROTOCOL_OLDEST, PROTOCOL_VERSION
from validator import drain as drain_module
from validator.decide_steps import decide_steps
from validator.drain import Draining
from validator.node import ValidatorNode
from validator.policy import Policy


async def led(path: Path, until: type[ev.AnyEvent]) -> Rig:
    """A run up to the first event of a kind."""
    rig = Rig(path, copies=NEVER)
    records = records_of(5)
    end = next(i for i, record in enumerate(records) if isinstance(record.event, until))
    await rig.emit(records[: end + 1])
    return rig


def session_of(rig: Rig) -> Any:
    return SimpleNamespace(coordinator=rig.coordinator, journal=rig.journal, over=False, wake=lambda: None)


def planned(rig: Rig) -> list[object]:
    decisions = decide_steps(rig.clock.now_s(), rig.coordinator.state, rig.coordinator.watch, Policy())
    return [decision.what for decision in decisions if isinstance(decision.what, ev.StepPlanned)]


async def test_no_step_begins_and_the_open_one_is_waited_for(tmp_path: Path) -> None:
    rig = await led(tmp_path / "j.db", ev.StepPlanned)
    draining = Draining("5Own", rig.clock)
    draining.take(session_of(rig))
    assert draining.waits() == ""  # nobody asked
    draining.ask(60.0)
    step = works(rig.coordinator.state)[0].step
    assert draining.waits() == f"the seal of step {step}"
    rest = records_of(5)[len(rig.journal) :]
    sealed = next(i for i, record in enumerate(rest) if isinstance(record.event, ev.StepSealed))
    await rig.emit(rest[: sealed + 1], publish=False)
    if not works(rig.coordinator.state):
        assert draining.waits() == "the log store"
    await rig.settle()
    rig.close()


async def test_between_steps_it_may_end_at_once_and_plans_none(tmp_path: Path) -> None:
    rig = await led(tmp_path / "j.db", ev.StepSealed)
    state = rig.coordinator.state
    if works(state):
        pytest.skip("the schedule opens steps ahead")
    before = planned(rig)
    draining = Draining("5Own", rig.clock)
    draining.take(session_of(rig))
    draining.ask(60.0)
    assert draining.waits() == ""
    assert planned(rig) == []
    rig.coordinator.watch.held = ""
    assert planned(rig) == before
    rig.close()


async def test_the_process_ends_once_nothing_is_open_or_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain_module, "LOOK_S", 0.001)
    for open_first, time_over in ((False, False), (True, False), (True, True)):
        clock, service = ManualClock(), Service("test")
        draining = Draining("5Own", clock)
        waits = ["the seal of step 3"] if open_first else []
        draining.waits = lambda waits=waits: "".join(waits)  # type: ignore[method-assign]
        running = asyncio.create_task(draining.run(service))
        await asyncio.sleep(0.01)
        assert not service.stopping.is_set()
        draining.ask(5.0)
        await asyncio.sleep(0.02)
        assert service.stopping.is_set() is not open_first
        if time_over:
            clock.advance(6.0)
        else:
            waits.clear()
        await asyncio.wait_for(service.stopping.wait(), 10)
        assert service.stop_reason == "drained"
        running.cancel()
        await asyncio.wait({running})


def test_only_the_validators_own_hotkey_may_ask() -> None:
    draining = Draining("5Own")
    with pytest.raises(AuthFailed, match="its own hotkey 5Own may"):
        draining.asked_by("5Other", DrainRequest(PROTOCOL_VERSION, 60.0))
    with pytest.raises(InputError, match="allowed: 0 to 86400"):
        draining.asked_by("5Own", DrainRequest(PROTOCOL_VERSION, float("nan")))
    with pytest.raises(VersionUnsupported):
        draining.asked_by("5Own", DrainRequest(PROTOCOL_VERSION + 1, 60.0))
    assert not draining.on
    assert draining.refusal() is None
    assert draining.asked_by("5Own", DrainRequest(PROTOCOL_VERSION, 60.0)).waits == ""
    refusal = draining.refusal()
    assert refusal is not None
    assert (refusal.code, refusal.retry_after) == ("draining", 10.0)


async def test_a_joiner_is_told_to_wait_and_one_of_another_version_whom_to_update() -> None:
    draining = Draining("5Own")
    node = cast(ValidatorNode, SimpleNamespace(side=SimpleNamespace(coldkeys={"5M": "5C"}), draining=draining))

    async def joined(version: int) -> Any:
        return (await ValidatorNode._join(node, "5M", cast(Any, SimpleNamespace(version=version, run="x")))).refusal

    assert (await joined(PROTOCOL_VERSION + 1)).code == "version_unsupported"
    draining.ask(60.0)
    told = await joined(PROTOCOL_VERSION)
    assert (told.code, told.retry_after) == ("draining", 10.0)
    other = await joined(PROTOCOL_VERSION + 1)
    assert (other.code, other.retry_after) == ("version_unsupported", None)


def test_two_sides_speak_the_newest_that_both_know() -> None:
    assert agree(PROTOCOL_OLDEST, PROTOCOL_VERSION + 3, "it") == PROTOCOL_VERSION
    assert agree(0, PROTOCOL_VERSION, "it") == PROTOCOL_VERSION
    with pytest.raises(VersionUnsupported, match=r"speaks protocol 8 to 9, .*update iota here"):
        agree(8, 9, "it")
    with pytest.raises(VersionUnsupported, match="it is older"):
        agree(-2, PROTOCOL_OLDEST - 1, "it")
    require_version(PROTOCOL_VERSION)
    for version, remedy in (
        (PROTOCOL_OLDEST - 1, "update iota there"),
        (PROTOCOL_VERSION + 1, "this validator is older"),
    ):
        refusal = refusal_of(version)
        assert refusal is not None
        assert refusal.hint.startswith(remedy)
        with pytest.raises(VersionUnsupported, match=f"protocol version {version}"):
            require_version(version)
