"""Slices before their manifest: one of each sender and place, within the budget, gone with a void, a step, a manifest."""

from __future__ import annotations

from schedule_toy import plan_run

from miner.early_slices import EarlySlice, EarlySlices
from subnet.run import state as st
from subnet.run.apply import apply
from subnet.words import Commitment, Member

ME, ONE, TWO = (Member(name, 1, number) for number, name in enumerate(("me", "one", "two")))


def state_with(*members: Member) -> st.RunState:
    state = st.new_state()
    apply(state, plan_run(1, 4, 1))
    for member in members:
        state.members[member] = st.MemberInfo("cold", 0, "boot", "127.0.0.1", 1, 0)
    merges = [st.Merge()]
    state.work = st.StepWork(0, 4, 0, None, [{}], [set()], [set()], [0], [0], merges)
    return state


def a_slice(hash_: str, size: int = 100, *, step: int = 0, epoch: int = 0) -> EarlySlice:
    return EarlySlice(step, epoch, hash_, memoryview(bytes(size)))


def name(state: st.RunState, version: int, owners: tuple[Member, ...], *entries: tuple[Member, str]) -> None:
    assert state.work is not None
    merge = state.work.merges[0]
    merge.phase, merge.version, merge.owners = st.REDUCING, version, owners
    merge.entries = tuple(Commitment(member, 0, (0,), ((0, hash_), (1, "other"))) for member, hash_ in entries)


def test_a_later_slice_takes_the_place_of_an_earlier_one() -> None:
    early = EarlySlices(1000)
    assert early.put(ONE, 0, a_slice("a", 400))
    assert early.put(ONE, 0, a_slice("b", 500))
    assert early.put(ONE, 1, a_slice("c", 100))
    assert (len(early), early.size_bytes) == (2, 600)
    assert early.has(ONE, 0, "b")
    assert not early.has(ONE, 0, "a")


def test_the_budget_holds_and_what_found_no_room_is_remembered() -> None:
    early = EarlySlices(1000)
    assert early.put(ONE, 0, a_slice("a", 900))
    assert not early.put(TWO, 0, a_slice("b", 101))
    assert early.was_refused("b")
    assert early.put(ONE, 0, a_slice("c", 1000)), "instead of what it had there"
    assert early.size_bytes == 1000
    for number in range(10_000):
        assert not early.put(TWO, number, a_slice(f"x{number}", 1))
    assert early.size_bytes == 1000
    assert len(early._refused) <= 4096
    early.end_step(0)
    assert (len(early), early.size_bytes, early.was_refused("x9999")) == (0, 0, False)


def test_void_gone_and_past_slices_are_dropped() -> None:
    early, state = EarlySlices(), state_with(ME, ONE, TWO)
    assert state.work is not None
    early.put(ONE, 0, a_slice("a"))
    early.put(TWO, 0, a_slice("b"))
    early.put(TWO, 1, a_slice("c", step=-1))
    early.settle(state, 0, ME)
    assert len(early) == 2
    state.work.epochs[ONE] = 1
    early.settle(state, 0, ME)
    assert not early.has(ONE, 0, "a")
    early.put(ONE, 0, a_slice("d", epoch=1))
    del state.members[TWO]
    early.settle(state, 0, ME)
    assert early.has(ONE, 0, "d")
    assert (len(early), early.size_bytes) == (1, 100)
    state.work = None
    assert early.settle(state, 0, ME) == {}
    assert early.size_bytes == 0


def test_only_what_the_manifest_names_for_a_partition_of_mine_comes_out() -> None:
    early, state = EarlySlices(), state_with(ME, ONE, TWO)
    early.put(ONE, 0, a_slice("named"))
    early.put(TWO, 0, a_slice("never named"))
    early.put(ONE, 1, a_slice("other"))
    assert early.settle(state, 0, ME) == {}
    name(state, 1, (ME, ONE), (ONE, "named"), (TWO, "something else"))
    assert list(early.settle(state, 0, ME)) == ["named"]
    assert (len(early), early.size_bytes) == (0, 0)
    early.put(TWO, 0, a_slice("of the next version"))
    assert early.settle(state, 0, ME) == {}
    assert len(early) == 1, "its sender may know the next manifest already"
    name(state, 2, (ME, ONE), (ONE, "named"), (TWO, "of the next version"))
    assert list(early.settle(state, 0, ME)) == ["of the next version"]
