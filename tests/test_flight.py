"""The window hides a round trip, isn't widened by queues further on, and starts anew with another stage."""

from __future__ import annotations

from miner.flight import MAX_WINDOW, FlightWindow
from subnet.words import ItemKey


def trips(window: FlightWindow, step: int, seconds: list[float], *, compute_s: float = 0.1) -> None:
    for m, trip_s in enumerate(seconds):
        window.forwarded(ItemKey(step, m, 0), 100.0 + m, compute_s / 3)
        window.returned(ItemKey(step, m, 0), 100.0 + m + trip_s)
        window.finished(2 * compute_s / 3)


def test_without_measurements_it_fills_the_stages() -> None:
    assert FlightWindow(4, 16).limit == 4


def test_no_narrower_than_the_stages_however_fast_the_links() -> None:
    window = FlightWindow(4, 16)
    trips(window, 0, [0.01] * 8)
    assert window.limit == 4


def test_a_long_round_trip_widens_it() -> None:
    window = FlightWindow(3, 16)
    trips(window, 0, [1.0] * 8)
    assert window.limit == 12  # ceil(1.0 / 0.1) + 1, and one for jitter


def test_it_is_bounded() -> None:
    window = FlightWindow(3, 16)
    trips(window, 0, [1e6] * 8)
    assert window.limit == MAX_WINDOW


def test_a_queue_behind_a_slow_stage_does_not_widen_it() -> None:
    """Every step begins with an empty pipeline: its first round trip has no queue in it."""
    window = FlightWindow(3, 16)
    for step in range(20):
        trips(window, step, [0.15, *(0.15 + 0.5 * m for m in range(1, 16))])
        assert window.limit == 3


def test_the_shortest_is_forgotten_when_the_link_got_slower() -> None:
    window = FlightWindow(3, 16)
    trips(window, 0, [0.3] * 16)
    for step in range(1, 6):
        trips(window, step, [0.85] * 16)
    assert window.limit == 11


def test_a_gradient_of_another_step_counts_for_nothing() -> None:
    window = FlightWindow(3, 16)
    window.forwarded(ItemKey(0, 5, 0), 1.0, 0.05)
    window.forwarded(ItemKey(1, 0, 0), 2.0, 0.05)
    window.returned(ItemKey(0, 5, 0), 50.0)
    window.finished(0.05)
    assert window.round_trip_s == 0.0
    assert window.limit == 3
