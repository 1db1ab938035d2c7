"""Simulated miners: they take leases, "compute" for as long as told, and claim what the protocol asks for, all made up.

Everything they say fits together (m-sets, versions, roots), so whole steps are sealed by the real coordinator; only the
numbers behind the hashes don't exist. Boundaries pass from stage to stage inside this process, as they do straight between
miners. What is owed is read from one shared fold of the whole stream.
"""

from __future__ import annotations

import heapq
import random
import secrets
import socket
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from blake3 import blake3

from subnet.protocol import messages as msg
from subnet.protocol.signing import Signer
from subnet.run import events as ev
from subnet.run import state as st
from subnet.run.state import Item, Merge, RunState, StepWork
from subnet.words import CALIBRATION_STEP, Commitment, Member

REPEAT_S = 3.0
"""A claim whose event doesn't come is said again."""
FORWARD_SHARE = 1 / 3


def name(*parts: object) -> str:
    return blake3(repr(parts).encode()).hexdigest()


ROOTS: dict[tuple[int, int], str] = {}


def root_of(step: int, stage: int) -> str:
    """What every replica of the stage has before update ``step``."""
    if (step, stage) not in ROOTS:
        ROOTS[step, stage] = name("root", step, stage)
    return ROOTS[step, stage]


@dataclass
class Compute:
    microbatch: int
    generation: int
    backward: bool


@dataclass
class Claimed:
    claim: msg.AnyClaim
    said_s: float | None = None


@dataclass
class SimMember:
    """One process of a hotkey; ``member`` once the fold shows it."""

    signer: Signer
    boot: str = field(default_factory=lambda: secrets.token_hex(8))
    member: Member | None = None
    stage: int = -1
    listener: socket.socket | None = None
    dead: bool = False
    backwards: deque[Compute] = field(default_factory=lambda: deque())
    forwards: deque[Compute] = field(default_factory=lambda: deque())
    at: Compute | None = None
    receipts: dict[tuple[int, int, bool], Claimed] = field(default_factory=lambda: {})
    """By (microbatch, generation, backward): until the fold shows them."""
    merged: dict[tuple[int, int, int, int], msg.MergedClaim] = field(default_factory=lambda: {})
    """By (step, group, version, partition): what is in the store."""
    storing: set[tuple[int, int, int, int]] = field(default_factory=lambda: set())
    filler: str = ""

    def listen(self) -> int:
        """A port of its own: a probe finds it as long as the member lives."""
        self.listener = socket.socket()
        self.listener.bind(("127.0.0.1", 0))
        self.listener.listen(4)
        return int(self.listener.getsockname()[1])

    def forget_work(self) -> None:
        self.backwards.clear()
        self.forwards.clear()
        self.receipts.clear()
        self.merged.clear()
        self.storing.clear()
        self.at = None

    def close(self) -> None:
        if self.listener is not None:
            self.listener.close()


class Work:
    """Who computes what and when; ``advance`` to a time gives what was finished by then."""

    def __init__(self, item_s: float, seed: int = 1) -> None:
        self._item_s, self._rng = item_s, random.Random(seed)
        self._due: list[tuple[float, int, SimMember, Compute]] = []
        self._count = 0
        self.forwarded: list[set[int]] = []
        self.backwarded: list[set[int]] = []
        self.num_items = 0

    def new_step(self, num_stages: int) -> None:
        self.forwarded = [set() for _ in range(num_stages)]
        self.backwarded = [set() for _ in range(num_stages)]
        self._due.clear()

    def leased(self, sim: SimMember, event: ev.Leased) -> None:
        if event.stage == 0 or event.microbatch in self.forwarded[event.stage - 1]:
            sim.forwards.append(Compute(event.microbatch, event.generation, backward=False))

    def begin(self, sim: SimMember, now_s: float) -> None:
        """Take up the next thing, backward first, if the member is free."""
        if sim.at is not None or sim.dead:
            return
        queue = sim.backwards or sim.forwards
        if not queue:
            return
        sim.at = queue.popleft()
        last = sim.stage == len(self.forwarded) - 1
        share = 1.0 if last else (1 - FORWARD_SHARE if sim.at.backward else FORWARD_SHARE)
        self._count += 1
        took_s = self._item_s * share * self._rng.uniform(0.8, 1.2)
        heapq.heappush(self._due, (now_s + took_s, self._count, sim, sim.at))

    def finished(self, now_s: float) -> list[tuple[SimMember, Compute]]:
        done: list[tuple[SimMember, Compute]] = []
        while self._due and self._due[0][0] <= now_s:
            _, _, sim, compute = heapq.heappop(self._due)
            if sim.at is compute:
                sim.at = None
                done.append((sim, compute))
        return done

    def receipt(self, sim: SimMember, step: int, compute: Compute, num_stages: int) -> None:
        """The claim for something that was computed; also marks its boundary as made."""
        m, stage, last = compute.microbatch, sim.stage, sim.stage == num_stages - 1
        backward = compute.backward or last
        kind = msg.BackwardReceipt if backward else msg.ForwardReceipt
        share = 1.0 if last else (1 - FORWARD_SHARE if backward else FORWARD_SHARE)
        claim = kind(
            step=step,
            microbatch=m,
            stage=stage,
            generation=compute.generation,
            input=name(step, m, stage - 1) if stage else "",
            output=name(step, m, stage, backward) if stage or not backward else "",
            compute_s=self._item_s * share,
            loss_bits=0x40000000 if last else None,
        )
        sim.receipts[m, compute.generation, backward] = Claimed(claim)
        if backward:
            self.backwarded[stage].add(m)
            self.num_items += 1
        else:
            self.forwarded[stage].add(m)


def due_claims(state: RunState, sim: SimMember, now_s: float) -> list[msg.AnyClaim]:
    """Everything this member owes a word about now, receipts first."""
    me = sim.member
    if me is None or me not in state.members:
        return []
    claims: list[msg.AnyClaim] = []
    info, work = state.members[me], state.work
    if info.version != state.next_step:
        claims.append(msg.UpdatedClaim(state.next_step, root_of(state.next_step, sim.stage)))
    if work is None:
        return claims
    for key, claimed in list(sim.receipts.items()):
        found = work.items[sim.stage].get(key[0])
        if found is None or not _is_owed(found, me, generation=key[1], backward=key[2]):
            del sim.receipts[key]
        elif claimed.said_s is None or now_s - claimed.said_s > REPEAT_S:
            claimed.said_s = now_s
            claims.append(claimed.claim)
    claims.extend(_merge_claims(state, work, sim, me))
    return claims


def _is_owed(found: Item, me: Member, *, generation: int, backward: bool) -> bool:
    """Whether the fold still lacks this receipt of a lease that is still mine."""
    mine = found.member == me and found.generation == generation and found.status in (st.LIVE, st.REVOKING)
    return mine and (backward or not found.forwarded)


def _merge_claims(state: RunState, work: StepWork, sim: SimMember, me: Member) -> Sequence[msg.AnyClaim]:
    group = st.group_of(state, sim.stage)
    merge = work.merges[group]
    if merge.phase == st.FROZEN and me not in merge.commitments:
        done = st.done_set(state, me)
        return (
            [msg.CommitClaim(work.step, group, merge.number, commitment(state, work, sim, me, group, done))]
            if done
            else []
        )
    if merge.phase == st.REDUCING:
        return [
            claim
            for key, claim in sim.merged.items()
            if key[:3] == (work.step, group, merge.version) and key[3] not in merge.merged
        ]
    if merge.phase == st.REVEALED:
        return _checks(state, work, sim, me, group, merge)
    return []


def commitment(
    state: RunState, work: StepWork, sim: SimMember, me: Member, group: int, done: tuple[int, ...]
) -> Commitment:
    """At calibration slices must be in the store: one blob that is there stands for all of them."""
    partitions = st.partitions_of(state, group, sim.stage)
    if work.step == CALIBRATION_STEP:
        return Commitment(me, sim.stage, done, tuple((p, sim.filler) for p in partitions))
    first = name(me, work.step, done)
    return Commitment(me, sim.stage, done, tuple((p, f"{p:04x}{first[4:]}") for p in partitions))


def _checks(
    state: RunState, work: StepWork, sim: SimMember, me: Member, group: int, merge: Merge
) -> Sequence[msg.AnyClaim]:
    claims: list[msg.AnyClaim] = []
    entry = next((entry for entry in merge.entries if entry.member == me), None)
    if entry is not None and me not in merge.fingerprints:
        values = tuple((p, (int(value[8:22], 16), 1)) for p, value in entry.hashes)
        claims.append(msg.FingerprintClaim(work.step, group, merge.version, sim.stage, values))
    all_in = len(merge.fingerprints) == len(merge.entries)
    if all_in and me not in merge.checks and state.members[me].version == state.next_step:
        claims.append(msg.CheckClaim(work.step, group, merge.version, ok=True))
    return claims


def partitions_to_store(state: RunState, sim: SimMember) -> list[tuple[int, int, int, int]]:
    """Partitions this member owns and hasn't begun to store."""
    work, me = state.work, sim.member
    if work is None or me is None or sim.stage < 0:
        return []
    group = st.group_of(state, sim.stage)
    merge = work.merges[group]
    if merge.phase != st.REDUCING:
        return []
    keys = [(work.step, group, merge.version, p) for p, owner in enumerate(merge.owners) if owner == me]
    return [key for key in keys if key not in sim.storing]
