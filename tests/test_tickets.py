"""A boundary is taken under a live lease of its sender only; every other one is refused with its code, and none stops the round."""

from __future__ import annotations

import struct
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from miner.tickets import Ticket, check_raw_finite, check_sender, check_ticket
from subnet.errors import InputError, IotaError
from subnet.protocol.messages import BoundaryFrame
from subnet.run.lanes import LanesSection
from subnet.run.state import DONE, LIVE, OPEN, Item, Replay, StepWork
from subnet.words import Member

ME, BEFORE, OTHER, AFTER = (Member(name, 1, number) for number, name in enumerate(("me", "before", "other", "after")))


def state_of(**changes: Any) -> Any:
    """Step 5 of three stages; ``BEFORE`` and ``OTHER`` serve stage 0, I stage 1, ``AFTER`` stage 2."""
    items = [
        {0: Item(LIVE, BEFORE, 2), 1: Item(LIVE, OTHER, 1), 2: Item(OPEN, BEFORE, 1), 3: Item(DONE, BEFORE, 1)},
        {m: Item(LIVE, ME, 1) for m in range(4)},
        {m: Item(LIVE, AFTER, 1) for m in range(4)},
    ]
    items[0][3].forward_hash = items[0][1].forward_hash = "h"
    work = StepWork(5, 4, 0, None, items, [set()] * 3, [set()] * 3, [0] * 3, [0] * 3, [])
    work.replays[0, 1, False] = Replay(BEFORE, 1)
    stages = {ME: 1, BEFORE: 0, OTHER: 0, AFTER: 2}
    members = {member: SimpleNamespace(stage=stage) for member, stage in stages.items()}
    config = SimpleNamespace(lanes=changes.pop("lanes", LanesSection()), num_items=4, parts_per_item=6)
    whole = {"next_step": 5, "work": work, "ahead": None, "members": members, "run": SimpleNamespace(config=config)}
    return SimpleNamespace(**(whole | changes))


FRAME = BoundaryFrame("run", 5, 0, 0, False, BEFORE, 2, "h")


def changed(**fields: Any) -> BoundaryFrame:
    return msgspec.structs.replace(FRAME, **fields)


@pytest.mark.parametrize(
    ("frame", "ticket"),
    [
        (FRAME, Ticket.DUE),
        (changed(stage=2, backward=True, sender=AFTER, generation=1), Ticket.DUE),
        (changed(microbatch=3, generation=1), Ticket.DUE),  # done, and as receipted
        (changed(microbatch=1, generation=1, sender=OTHER), Ticket.DUE),
        (changed(microbatch=1, generation=1), Ticket.DUE),  # its maker is replaying it
        (changed(generation=3), Ticket.EARLY),
        (changed(step=6), Ticket.EARLY),
        (changed(sender=Member("newcomer", 1, 9)), Ticket.EARLY),
        (changed(step=4), Ticket.PAST),
    ],
)
def test_what_is_due_early_or_past(frame: BoundaryFrame, ticket: Ticket) -> None:
    assert check_ticket(state_of(), ME, frame) is ticket


@pytest.mark.parametrize(
    ("frame", "code", "is_a_lie"),
    [
        (changed(generation=1), "stale_lease", False),
        (
            changed(microbatch=1, generation=1, hash="other"),
            "other_bytes",
            False,
        ),  # made again, and its maker said otherwise
        (changed(sender=OTHER), "not_leased", False),  # somebody else's lease
        (changed(microbatch=2, generation=1), "not_leased", False),  # it was taken back
        (changed(stage=2), "wrong_stage", False),
        (changed(stage=1), "wrong_stage", False),
        (changed(stage=-1, backward=True), "wrong_stage", False),
        (changed(backward=True), "wrong_stage", False),
        (changed(part=1), "bad_input", True),  # without lanes a boundary has no parts
        (changed(microbatch=4), "bad_input", True),
        (changed(microbatch=-1), "bad_input", True),
        (changed(microbatch=3, generation=1, hash="other"), "bad_input", True),
    ],
)
def test_what_is_refused(frame: BoundaryFrame, code: str, is_a_lie: bool) -> None:
    with pytest.raises(IotaError) as raised:
        check_ticket(state_of(), ME, frame)
    assert raised.value.code == code
    assert isinstance(raised.value, InputError) is is_a_lie


def test_before_anything_is_folded_everything_is_early() -> None:
    assert check_ticket(state_of(work=None), ME, FRAME) is Ticket.EARLY
    assert check_ticket(state_of(), None, FRAME) is Ticket.EARLY
    assert check_ticket(state_of(members={}), ME, FRAME) is Ticket.EARLY


@pytest.mark.parametrize(("run", "peer", "code"), [("other", "before", "wrong_run"), ("run", "eve", "foreign_sender")])
def test_who_sent_it_and_for_which_run(run: str, peer: str, code: str) -> None:
    with pytest.raises(IotaError) as raised:
        check_sender(changed(run=run), "run", peer)
    assert raised.value.code == code
    check_sender(FRAME, "run", "before")


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("at", [0, 500, 999])
def test_a_boundary_that_is_not_finite(wrong: float, at: int) -> None:
    values = np.linspace(-3, 3, 1000, dtype="<f4")
    check_raw_finite(memoryview(values.tobytes()))
    values[at] = wrong
    with pytest.raises(InputError) as raised:
        check_raw_finite(memoryview(values.tobytes()))
    assert raised.value.code == "not_finite"


def test_nothing_is_finite() -> None:
    check_raw_finite(memoryview(b""))
    check_raw_finite(memoryview(struct.pack("<f", 3.4e38)))


def test_a_lanes_boundary_comes_in_parts_and_only_so() -> None:
    state = state_of(lanes=LanesSection(count=4, inner_steps=3))
    assert check_ticket(state, ME, changed(part=1)) is Ticket.DUE
    assert check_ticket(state, ME, changed(part=6)) is Ticket.DUE
    for part in (0, 7, -1):
        with pytest.raises(InputError, match=f"part {part} of microbatch 0, which has 6"):
            check_ticket(state, ME, changed(part=part))


def test_a_part_that_is_named_in_the_journal_is_taken_with_that_hash_alone() -> None:
    state = state_of(lanes=LanesSection(count=4, inner_steps=3))
    state.work.items[0][0].forward_parts = ("one", "two")
    assert check_ticket(state, ME, changed(part=2, hash="two")) is Ticket.DUE
    assert check_ticket(state, ME, changed(part=3, hash="anything")) is Ticket.DUE
    with pytest.raises(InputError, match="another hash"):
        check_ticket(state, ME, changed(part=1, hash="other"))
