"""What events about members do to the state: joining, leaving, and being up to date."""

from __future__ import annotations

import msgspec

from subnet.run.audits import log_from
from subnet.run.events import Gone, Joined, Updated
from subnet.run.invariants import require
from subnet.run.state import MemberInfo, RunState, StoredSnapshot, config, num_stages, works
from subnet.run.work import drop_work, void_partial
from subnet.words import CALIBRATION_STEP, Member


def apply_joined(state: RunState, event: Joined) -> None:
    """The process is a member; an older incarnation of its hotkey ends with all its unsealed work."""
    member = event.member
    require(0 <= event.stage < num_stages(state), f"{member} joined stage {event.stage}, which there isn't")
    require(member.hotkey not in state.convicted, f"{member} joined although it is convicted")
    require(member.hotkey not in state.audits.quarantined, f"{member} joined although it stands accused")
    require(member not in state.members, f"{member} joined twice")
    for older in [k for k in state.members if k.hotkey == member.hotkey]:
        drop_member(state, older)
    state.num_joined += 1
    state.members[member] = MemberInfo(
        coldkey=event.coldkey,
        stage=event.stage,
        boot=event.boot,
        host=event.host,
        port=event.port,
        reachable=event.reachable,
    )
    state.boots.setdefault(member.hotkey, {})[event.boot] = member
    if config(state).audit.on:
        state.audits.coldkeys[member.hotkey] = event.coldkey


def apply_gone(state: RunState, event: Gone) -> None:
    """The member's unsealed work of the open steps is void and its leases are open again."""
    require(event.member in state.members, f"{event.member} is gone without having been there")
    if event.why in ("accused", "liar") and config(state).audit.on:
        _forget_root(state, event.member)
    drop_member(state, event.member)
    hotkey = event.member.hotkey
    if event.why in ("silent", "checksum", "contradicts"):
        state.absences[hotkey] = state.absences.get(hotkey, 0) + 1
    if event.why == "liar":
        state.convicted.add(hotkey)


def _forget_root(state: RunState, member: Member) -> None:
    """What a liar says of its state counts no more, or its stage's honest members would be in the minority for ever."""
    gone = state.members[member]
    votes = state.roots.get(gone.stage, {})
    others = [
        info
        for other, info in state.members.items()
        if other != member and (info.stage, info.root) == (gone.stage, gone.root)
    ]
    if gone.version != state.next_step or gone.root not in votes or any(i.coldkey == gone.coldkey for i in others):
        return
    votes[gone.root] = [coldkey for coldkey in votes[gone.root] if coldkey != gone.coldkey]
    if not votes[gone.root]:
        del votes[gone.root]


def drop_member(state: RunState, member: Member) -> None:
    for work in works(state):
        void_partial(state, work, member)
        drop_work(work, member)
    for stage in [s for s, ordered in state.orders.items() if ordered == member]:
        del state.orders[stage]
    del state.members[member]


def apply_updated(state: RunState, event: Updated) -> None:
    """The member's state is that before update ``step``; where its root agrees it may get leases."""
    info = state.members.get(event.member)
    require(info is not None, f"{event.member} is up to date without being there")
    if info is None:
        return
    require(event.step == state.next_step, f"{event.member} is at {event.step}, the run at {state.next_step}")
    require(info.version != event.step, f"{event.member} was at {event.step} already")
    info.version, info.root = event.step, event.root
    coldkeys = state.roots.setdefault(info.stage, {}).setdefault(event.root, [])
    if info.coldkey not in coldkeys:
        coldkeys.append(info.coldkey)
    verify_snapshots(state, info.stage)


def verify_snapshots(state: RunState, stage: int) -> None:
    """Marks the snapshot of ``next_step`` verified when another coldkey has its root; drops what is replaced."""
    stored = state.snapshots.get(stage, [])
    if not stored or stored[-1].step != state.next_step or stored[-1].verified:
        return
    newest = stored[-1]
    if any(coldkey != newest.coldkey for coldkey in state.roots.get(stage, {}).get(newest.root, [])):
        stored[-1] = msgspec.structs.replace(newest, verified=True)
        drop_replaced(state)


def drop_replaced(state: RunState) -> None:
    """Drops what nobody restores from any more: all behind each stage's newest verified snapshot that a joiner may take.

    One newer than what the open steps are computed from, or than what an audit or a rewind needs, replaces nothing yet
    (:func:`subnet.run.audits.log_from`).
    """
    newest = log_from(state)

    def verified_step(stored: list[StoredSnapshot]) -> int:
        return max((s.step for s in stored if s.verified and s.step <= newest), default=CALIBRATION_STEP)

    base = {stage: verified_step(state.snapshots.get(stage, [])) for stage in range(num_stages(state))}
    for stage, stored in state.snapshots.items():
        stored[:] = [snapshot for snapshot in stored if snapshot.step >= base[stage]]
    for step in [step for step in state.sealed if step < min(base.values())]:
        del state.sealed[step]
