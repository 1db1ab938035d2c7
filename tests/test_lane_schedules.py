"""Random schedules of a run with lanes: the same promises as without, by the same code (``tests/schedule_sim.py``)."""

from __future__ import annotations

import pytest
import schedule_toy as toy
from schedule_sim import Sim, run_many

from miner.lane_parts import finish_lane, is_next, note_part
from miner.local_view import BoundaryKey, LaneLocally, LocalView, MadeFrom
from miner.owes import Compute
from subnet.protocol.parts import decode_parts, encode_parts, parts_hash

PROFILES = ["", "void", "takeover", "stale", "rivals", "calm"]


@pytest.mark.parametrize("profile", PROFILES)
def test_schedules_with_lanes(profile: str) -> None:
    outcomes, examples = run_many(range(2000, 2007), profile=profile, lanes=True)
    assert outcomes["ok"] == 7, examples


@pytest.mark.slow
@pytest.mark.parametrize("profile", PROFILES)
def test_many_schedules_with_lanes(profile: str) -> None:
    outcomes, examples = run_many(range(10_000, 10_500), profile=profile, lanes=True)
    assert outcomes["ok"] == 500, examples


def test_the_reference_of_lanes_depends_on_every_part() -> None:
    """Else a schedule that loses one would pass."""
    run = toy.plan_run(2, 2, 1, lanes=3, inner_steps=2)
    reference = toy.Reference(run)
    w = reference.states(-1, frozenset())
    _, _, at, _ = reference.lane(w, 0, 1)
    one_less = toy.plan_run(2, 2, 1, lanes=3, inner_steps=1)
    assert toy.Reference(one_less).lane(w, 0, 1)[2] != at


def test_a_lane_that_is_lost_in_the_middle_of_its_last_part_starts_anew() -> None:
    local = LocalView()
    first = Compute(0, 1, 1, True, 3, part=1)
    assert is_next(local, first)
    assert not is_next(local, Compute(0, 1, 1, True, 3, part=2))
    note_part(local, first)
    assert local.lanes[0, 1] == LaneLocally(3, 1, 1)
    assert not is_next(local, first)
    assert not is_next(local, Compute(0, 1, 1, True, 4, part=2)), "it is of another lease"
    local.new_incarnation()
    assert is_next(local, first)


def test_what_a_receipt_names_are_the_hashes_of_the_parts_in_order() -> None:
    local, hashes = LocalView(), [f"{i:064x}" for i in range(6)]
    for part in (1, 2):
        local.made_from[BoundaryKey(0, 1, 1, True, part)] = MadeFrom(hashes[part], hashes[part + 2], 1)
        local.boundaries[BoundaryKey(0, 1, 1, True, part)] = hashes[part - 1]
        local.boundaries[BoundaryKey(0, 1, 1, False, part)] = hashes[part + 3]
    lists = finish_lane(local, Compute(0, 1, 1, True, 1, part=2), 2, 3)
    mine = {key: decode_parts(data, 2) for key, data, own in lists if own}
    assert mine == {BoundaryKey(0, 1, 1, True): tuple(hashes[:2]), BoundaryKey(0, 1, 1, False): tuple(hashes[4:])}
    assert local.made_from[BoundaryKey(0, 1, 1, True)] == MadeFrom(
        parts_hash(hashes[1:3]), parts_hash(hashes[3:5]), generation=1
    )
    assert local.boundaries[BoundaryKey(0, 1, 1, True)] == parts_hash(hashes[:2])


def test_a_list_of_another_length_is_refused() -> None:
    from subnet.errors import InputError

    with pytest.raises(InputError, match="of 3 parts it has 96"):
        decode_parts(encode_parts(["0" * 64] * 2), 3)


def test_a_lone_liar_changes_no_bit_with_lanes() -> None:
    for lie in ("slice", "fp", "owner", "mute"):
        sim = Sim(77, lie=lie, lanes=True).run()
        assert not sim.wrong
