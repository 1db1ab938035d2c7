"""The fault table, role x phase x fault, on the production state machine: same bits, nobody honest evicted, pauses named."""

from __future__ import annotations

import pytest
from fault_phases import PHASES
from fault_sim import Cell, FaultSim, attempt
from fault_table import FAULTS, ROLES, all_cells, cells, entry, markdown, quick_cells, senseless
from schedule_nodes import Bad

QUICK = quick_cells()


@pytest.mark.parametrize("cell", QUICK, ids=str)
def test_a_fault_changes_no_bit(cell: Cell) -> None:
    attempt(cell)


@pytest.mark.parametrize("cell", quick_cells(37, delay=1), ids=str)
def test_a_fault_changes_no_bit_where_steps_overlap(cell: Cell) -> None:
    attempt(cell, delay=1)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("role", ROLES)
def test_every_fault_in_every_phase_changes_no_bit(role: str, phase: str, delay: int) -> None:
    for cell in cells(delay):
        if (cell.role, cell.phase) == (role, phase):
            attempt(cell, delay=delay)


def test_the_quick_cells_are_a_spread_and_the_table_is_whole() -> None:
    assert 50 <= len(QUICK) <= 80
    assert {cell.role for cell in QUICK} == set(ROLES)
    assert {cell.fault for cell in QUICK} == set(FAULTS)
    assert {cell.phase for cell in QUICK} == set(PHASES)
    tried = {(cell.role, cell.phase, cell.fault) for cell in cells()}
    explained = {(cell.role, cell.phase, cell.fault) for cell in all_cells() if senseless(cell)}
    assert len(tried | explained) == len(ROLES) * len(PHASES) * len(FAULTS)


@pytest.mark.parametrize("fault", ["kill", "pause", "partition"])
def test_a_stage_without_anybody_is_a_named_pause(fault: str) -> None:
    cell = Cell("sole", "backward", fault, "coordinator" if fault == "partition" else "")
    assert attempt(cell).named_pause


def test_the_table_sees_a_pause_that_nobody_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fault_sim.waiting_for", lambda *_: "something")
    with pytest.raises(Bad, match=r"named|stuck"):
        FaultSim(Cell("sole", "forward", "kill")).run()


def test_the_table_sees_a_fault_that_does_not_fire() -> None:
    with pytest.raises(Bad, match="didn't fire"):
        FaultSim(Cell("owner", "forward", "kill")).run()


def test_the_table_sees_who_is_evicted_for_an_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the clock that stands still, members are taken for silent because the log store is away."""
    monkeypatch.setattr("validator.store_clock.StoreClock.failed", lambda *_: None)
    with pytest.raises(Bad, match="evicted"):
        FaultSim(Cell("log", "commit", "kill")).run()


def test_the_table_sees_who_is_evicted_for_the_coordinators_absence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("validator.presence.PresentClock.now_s", lambda clock: clock._clock.now_s())
    with pytest.raises(Bad, match="evicted"):
        FaultSim(Cell("coordinator", "commit", "pause")).run()


def test_an_entry_says_how_each_fault_ended() -> None:
    outcomes = {Cell("sole", "forward", "kill"): "paused", Cell("sole", "forward", "slow"): "ok"}
    assert entry("sole", "forward", outcomes) == "k.S..."
    assert "`k.S...`" in markdown(outcomes)
