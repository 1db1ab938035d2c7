"""A member says that a boundary isn't what its maker receipted where it computed with it, and only then; nobody by a replay."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from model_cases import tiny_plan
from schedule_toy import plan_run

from miner import owed as owing
from miner.boundaries import BoundaryCache
from miner.compute import ComputeThread
from miner.context import StageWork
from miner.local_view import BoundaryKey, LocalView, MadeFrom, Sent
from miner.member_items import ItemWork
from miner.owes import Compute, Drop, Fetch, Owe, Push, Report
from subnet.engine.stage_executor import PartialKey
from subnet.model.checkpoints import initial_weights
from subnet.model.memory import boundary_bytes
from subnet.protocol import messages as msg
from subnet.protocol.sent import is_sent, sent_by, sign_sent
from subnet.protocol.signing import Signer
from subnet.protocol.wire import blob_hash
from subnet.run import events as ev
from subnet.run import state as st
from subnet.run.apply import apply
from subnet.run.config import NO_AUDITS, AuditSection
from subnet.run.state import RunState, new_state
from subnet.words import Commitment, Member
from validator.intake_proofs import proves

A, B, C, D = (Member(name, 1, number + 1) for number, name in enumerate(("a", "b", "c", "d")))
X, F, G, K = (BoundaryKey(-1, 0, stage, backward) for stage, backward in ((0, False), (1, False), (2, True), (1, True)))
"""Of microbatch 0, as B at stage 1 sees it: its input, its output, its gradient, the gradient it gives."""


def at_work() -> RunState:
    """A at stage 0, B at stage 1, C at stage 2; D is another replica of stage 0. Microbatch 0 is leased at each stage."""
    state, planned = new_state(), plan_run(num_stages=3, num_microbatches=2, num_steps=1)
    config = msgspec.structs.replace(planned.config, audit=AuditSection(rate=0.1, before_seal="probation"))
    events: list[Any] = [
        msgspec.structs.replace(planned, config=config),
        ev.TermStarted(1, "validator", "n"),
        ev.HardwareClassSet(("a", "b"), "operator"),
    ]
    for member, stage in ((A, 0), (B, 1), (C, 2), (D, 0)):
        events.append(ev.Joined(member, f"cold-{member.hotkey}", stage, "boot", "127.0.0.1", 1))
        events.append(ev.Updated(member, -1, ""))
    events += [ev.StepPlanned(-1, 2, 0, None)]
    events += [ev.Leased(-1, 0, stage, member, 1) for stage, member in enumerate((A, B, C))]
    for event in events:
        apply(state, event)
    return state


def forwarded(used: str = "x1", generation: int = 1) -> LocalView:
    """B has computed the forward with this input."""
    local = LocalView(version=-1, restored_stage=1)
    local.boundaries.update({X: used, F: "f1"})
    local.kept.update(local.boundaries)
    local.made_from[F] = MadeFrom(used, generation=generation)
    local.produced[F] = "f1"
    return local


def done(state: RunState, local: LocalView, gradient: str = "g1") -> None:
    """B has added the gradient too, and said so."""
    local.boundaries.update({G: gradient, K: "k1"})
    local.made_from[K] = MadeFrom(local.boundaries[X], gradient, 1)
    local.added[-1, 0, 0] = 1
    apply(state, ev.Backwarded(-1, 0, 1, 1, "k1", None, "f1"))


def claims(owes: list[Owe], kind: type = msg.MismatchClaim) -> list[Any]:
    return [owe.claim for owe in owes if isinstance(owe, Report) and isinstance(owe.claim, kind)]


def owed(state: RunState, local: LocalView) -> list[Owe]:
    return owing.owed(state, B, local)


MISMATCH = msg.MismatchClaim(-1, 0, 1, False, "x1")


def test_what_is_as_receipted_or_not_receipted_yet_is_no_mismatch() -> None:
    state, local = at_work(), forwarded()
    assert not claims(owed(state, local))
    apply(state, ev.Forwarded(-1, 0, 0, 1, "x1"))
    assert not claims(owed(state, local))
    assert Push(F, C) in owed(state, local)
    done(state, local)
    apply(state, ev.Backwarded(-1, 0, 2, 1, "g1", 7))
    assert not claims(owed(state, local))


def test_an_input_that_was_receipted_otherwise_is_claimed_and_nothing_made_of_it_is_given_or_said() -> None:
    state, local = at_work(), forwarded()
    apply(state, ev.Forwarded(-1, 0, 0, 1, "x2"))
    assert owed(state, local) == [Report(MISMATCH)]
    local.jobs.add(Compute(-1, 0, 1, backward=True, generation=1))
    assert owed(state, local) == [], "what is being computed comes to its end first"


def test_a_gradient_that_was_receipted_otherwise_is_claimed_instead_of_committing() -> None:
    state, local = at_work(), forwarded()
    apply(state, ev.Forwarded(-1, 0, 0, 1, "x1"))
    done(state, local, "g1")
    # everything else of the stage is done, so that the freeze asks for the commitment
    apply(state, ev.MicrobatchSkipped(-1, 1, 0, "failure", True))
    apply(state, ev.Frozen(-1, 1, 1))
    local.commitments[-1, 0, (0,)] = Commitment(B, 1, (0,), ((2, "s2"), (3, "s3")))
    local.stored |= {"s2", "s3"}
    assert claims(owed(state, local), msg.CommitClaim)
    apply(state, ev.Backwarded(-1, 0, 2, 1, "g2", 7))
    assert claims(owed(state, local)) == [msg.MismatchClaim(-1, 0, 1, True, "g1")]
    assert not claims(owed(state, local), msg.CommitClaim)


def test_after_the_void_the_wrong_boundary_goes_with_all_that_was_made_of_it_and_the_right_one_is_fetched() -> None:
    state, local = at_work(), forwarded()
    apply(state, ev.Forwarded(-1, 0, 0, 1, "x2"))
    local.pushed.add((F, C))
    for event in (ev.Voided(-1, 1, B, "inputs"), ev.Leased(-1, 0, 1, B, 2)):
        apply(state, event)
    assert owed(state, local) == [Drop(X, 1)]
    assert set(local.drop_item(X, 1)) == {X, F, K}
    assert not any((local.boundaries, local.kept, local.made_from, local.produced, local.pushed))
    assert owed(state, local) == [Fetch(X, (A,))]
    local.boundaries[X] = "x2"
    assert owed(state, local) == [Compute(-1, 0, 1, backward=False, generation=2)]


def test_where_nobody_audits_work_goes_on_with_what_was_sent() -> None:
    state, local = at_work(), forwarded()
    apply(state, ev.Forwarded(-1, 0, 0, 1, "x2"))
    assert claims(owed(state, local))
    planned = st.plan(state)
    state.run = msgspec.structs.replace(planned, config=msgspec.structs.replace(planned.config, audit=NO_AUDITS))
    assert not claims(owed(state, local))
    assert Push(F, C) in owed(state, local)


def test_what_is_only_held_is_dropped_without_a_word() -> None:
    state, local = at_work(), LocalView(version=-1, restored_stage=1)
    local.boundaries[X] = "x1"
    apply(state, ev.Forwarded(-1, 0, 0, 1, "x2"))
    assert owed(state, local) == [Drop(X, 1)]


def test_a_replay_of_an_item_accuses_nobody_and_drops_what_is_wrong() -> None:
    state, local = at_work(), forwarded(generation=0)
    apply(state, ev.Gone(B, "lost"))
    again = Member("b", 1, 9)
    apply(state, ev.Joined(again, "cold-b", 1, "boot2", "127.0.0.1", 1))
    apply(state, ev.Updated(again, -1, ""))
    apply(state, ev.Forwarded(-1, 0, 0, 1, "x2"))
    apply(state, ev.ReplayLeased(-1, 0, 1, False, again, 1))
    assert owing.owed(state, again, local) == [Drop(X, 1)]


@pytest.mark.parametrize("again", ["x1", "x2"])
def test_an_input_dealt_again_is_a_mismatch_only_if_other_bytes_come_of_it(again: str) -> None:
    state, local = at_work(), forwarded()
    apply(state, ev.Forwarded(-1, 0, 0, 1, "x1"))
    done(state, local)
    for event in (ev.Gone(A, "lost"), ev.Leased(-1, 0, 0, D, 2)):
        apply(state, event)
    assert not claims(owed(state, local)), "nobody has said anything else"
    apply(state, ev.Forwarded(-1, 0, 0, 2, again))
    assert claims(owed(state, local)) == ([] if again == "x1" else [MISMATCH])


def test_a_sealed_stage_is_past_all_that() -> None:
    state, local = at_work(), forwarded()
    apply(state, ev.Forwarded(-1, 0, 0, 1, "x1"))
    done(state, local)
    state.seals[st.group_of(state, 1)] = st.GroupSeal(("a", "b"), (("a", 1), ("b", 1)), "0")
    for event in (ev.Gone(A, "lost"), ev.Leased(-1, 0, 0, D, 2), ev.Forwarded(-1, 0, 0, 2, "x2")):
        apply(state, event)
    assert not [owe for owe in owed(state, local) if isinstance(owe, Drop)]
    assert not claims(owed(state, local))
    assert Push(F, C) in owed(state, local), "it is given as it was receipted and sealed"


# --- what was sent, and what it proves ---------------------------------------------------------------------------

ALICE, BOB = Signer.from_uri("//Alice"), Signer.from_uri("//Bob")
MAKER = Member(ALICE.hotkey, 1, 1)


def frame_of(**changes: Any) -> msg.BoundaryFrame:
    frame = msg.BoundaryFrame("run", -1, 0, 0, False, MAKER, 1, "1" * 64)
    return msgspec.structs.replace(frame, **changes)


def test_the_claim_carries_what_the_maker_signed_of_the_bytes_that_were_used() -> None:
    state, local = at_work(), forwarded()
    local.sent_to_me[X] = Sent("x1", 1, b"signed")
    apply(state, ev.Forwarded(-1, 0, 0, 1, "x2"))
    assert claims(owed(state, local)) == [msgspec.structs.replace(MISMATCH, generation=1, signature=b"signed")]
    local.sent_to_me[X] = Sent("x3", 1, b"signed")
    assert claims(owed(state, local)) == [MISMATCH], "of other bytes: it proves nothing"
    local.drop_item(X, 1)
    assert not local.sent_to_me


def test_a_signature_is_of_one_sender_lease_and_hash() -> None:
    signed = sign_sent(ALICE, frame_of())
    assert is_sent(sent_by(signed), signed.signature)
    assert is_sent(sent_by(msgspec.structs.replace(signed, packing="planes")), signed.signature), "however it travels"
    other = [
        {"run": "other"}, {"step": 0}, {"microbatch": 1}, {"stage": 1}, {"backward": True}, {"generation": 2},
        {"hash": "2" * 64}, {"sender": Member(ALICE.hotkey, 1, 2)}, {"sender": Member(BOB.hotkey, 1, 1)},
    ]  # fmt: skip
    for change in other:
        assert not is_sent(sent_by(frame_of(**change)), signed.signature), change
    for junk in (b"", b"x", b"\0" * 64):
        assert not is_sent(sent_by(signed), junk)


def test_only_the_makers_own_word_under_the_receipts_lease_proves_that_it_lied() -> None:
    state = at_work()
    run = st.plan(state).run_id
    receipted = st.item(state, -1, 0, 0)
    assert receipted is not None
    receipted.member, receipted.forward_hash = MAKER, "2" * 64
    frame = sign_sent(ALICE, frame_of(run=run))
    claim = msg.MismatchClaim(-1, 0, 1, False, frame.hash, frame.generation, frame.signature)
    replace = msgspec.structs.replace
    assert proves(state, receipted, 0, claim)
    honest = [
        replace(claim, signature=b""),
        replace(claim, generation=2, signature=sign_sent(ALICE, frame_of(run=run, generation=2)).signature),
        replace(claim, signature=sign_sent(BOB, frame_of(run=run)).signature),
        replace(claim, used="2" * 64, signature=sign_sent(ALICE, frame_of(run=run, hash="2" * 64)).signature),
        replace(claim, used="3" * 64),
        replace(claim, signature=sign_sent(ALICE, frame_of(run=run, sender=Member(ALICE.hotkey, 1, 9))).signature),
    ]
    for said in honest:
        assert not proves(state, receipted, 0, said), said
    receipted.generation = 2
    assert not proves(state, receipted, 0, claim), "of a lease that was voided: it may have made it anew"
    receipted.generation, receipted.forward_hash = 1, ""
    assert not proves(state, receipted, 0, claim), "nothing else is receipted"


def test_what_was_receipted_under_a_lease_is_never_made_anew_under_it() -> None:
    """Made under a lease that was voided, and receipted under the next: from then on it is that one's."""
    state, local = at_work(), forwarded()
    for event in (ev.Voided(-1, 1, B, "inputs"), ev.Leased(-1, 0, 1, B, 2)):
        apply(state, event)
    apply(state, ev.Forwarded(-1, 0, 0, 1, "x2"))
    assert owed(state, local) == [Drop(X, 1)], "nobody has it of this lease yet"
    local.bind(F, 2)
    assert claims(owed(state, local)) == [MISMATCH]
    assert not [owe for owe in owed(state, local) if isinstance(owe, Drop)]


def test_what_was_made_under_an_earlier_lease_is_given_only_once_it_is_receipted_under_this_one() -> None:
    """The backward is done again for the sum, from another gradient perhaps."""
    state, local = at_work(), forwarded()
    local.boundaries.update({G: "g1", K: "k1"})
    local.made_from[K] = MadeFrom("x1", "g1", 1)
    assert {Push(F, C), Push(K, A)} <= set(owed(state, local))
    for event in (ev.Voided(-1, 1, B, "inputs"), ev.Leased(-1, 0, 1, B, 2)):
        apply(state, event)
    owes = owed(state, local)
    assert not [owe for owe in owes if isinstance(owe, Push)]
    assert Compute(-1, 0, 1, backward=True, generation=2, epoch=1) in owes
    (said,) = claims(owes, msg.ForwardReceipt)
    local.note_receipt(said)
    assert [owe for owe in owed(state, local) if isinstance(owe, Push)] == [Push(F, C)]
    local.made_from[K] = MadeFrom("x1", "g1", 2)
    assert {Push(F, C), Push(K, A)} <= set(owed(state, local))


@pytest.mark.parametrize(
    ("claim", "bound"),
    [
        (msg.ForwardReceipt(-1, 0, 1, 2, "x1", "f1", 0.1), {F: "f1"}),
        (msg.BackwardReceipt(-1, 0, 1, 2, "g1", "k1", 0.1, None, "f1"), {F: "f1", K: "k1"}),
        (msg.BackwardReceipt(-1, 0, 1, 2, "g1", "k1", 0.1), {K: "k1"}),
    ],
)
def test_what_is_receipted_is_answered_for_whenever_it_was_made(claim: Any, bound: dict[BoundaryKey, str]) -> None:
    """Made for a replay, or by an earlier lease, it is in nobody's books before its receipt."""
    local = LocalView(made_from={F: MadeFrom("x1"), K: MadeFrom("x1", "g1", 1)})
    local.note_receipt(claim)
    assert local.produced == bound
    assert {key for key, made in local.made_from.items() if made.generation == 2} == set(bound)


def test_what_others_made_is_never_taken_for_an_output_of_the_stage_that_is_served_next() -> None:
    """B, now at stage 0, still has the gradient that stage 1 gave it; then it gets the lease of stage 1."""
    state, local = at_work(), LocalView(version=-1, restored_stage=1)
    made = BoundaryKey(-1, 1, 0, False)
    local.boundaries.update({F: "received", made: "mine"})
    local.kept.update(local.boundaries)
    local.made_from[made] = MadeFrom("")
    local.sent_to_me[F] = Sent("received", 1, b"signed")
    assert local.new_incarnation() == [F]
    assert set(local.boundaries) == set(local.kept) == {made}
    assert not local.sent_to_me
    assert Fetch(X, (A,)) in owed(state, local), "its input is had, and the work done"
    assert not claims(owed(state, local), msg.ForwardReceipt)


# --- on the compute thread ---------------------------------------------------------------------------------------


async def test_what_was_made_of_a_wrong_input_is_made_anew_from_the_right_one(tmp_path: Path) -> None:
    """The graph that was kept of the wrong input goes as well: its backward would give a gradient of neither."""
    plan = tiny_plan((0, 1, 3))
    cache = BoundaryCache(tmp_path, memory_bytes=1 << 24, disk_bytes=1 << 24)
    local, compute = LocalView(version=-1, restored_stage=1, kept=cache.kept), ComputeThread()
    stage = StageWork(plan, 1, "cpu", 1 << 30)
    stage.state.load_weights(initial_weights(plan))
    state = at_work()
    state.run = msgspec.structs.replace(
        st.plan(state), config=msgspec.structs.replace(plan.config, audit=st.config(state).audit)
    )
    context = SimpleNamespace(
        local=local, cache=cache, plan=plan, compute=compute, member=B, stage=stage, run_state=state,
        held_stage=lambda: stage, wake=lambda: None, partial_key=lambda step, epoch: PartialKey(step, 1, 2, epoch),
    )  # fmt: skip
    items = ItemWork(context)  # type: ignore[arg-type]

    def arrives(key: BoundaryKey, seed: int) -> str:
        data = np.random.default_rng(seed).standard_normal(boundary_bytes(plan) // 4).astype("<f4").tobytes()
        local.boundaries[key] = str(blob_hash(data))
        cache.put(key, data, local.boundaries[key])
        return local.boundaries[key]

    async def work(x: int, generation: int) -> tuple[str, str]:
        used = arrives(X, x), local.boundaries.get(G) or arrives(G, 9)
        await items.run(Compute(-1, 0, 1, backward=False, generation=generation))
        assert local.made_from[F] == MadeFrom(used[0], "", generation)
        await items.run(Compute(-1, 0, 1, backward=True, generation=None))
        assert local.made_from[K] == MadeFrom(*used, 0)
        return local.boundaries[F], local.boundaries[K]

    try:
        wrong = await work(1, 1)
        await items.run(Compute(-1, 0, 1, backward=False, generation=1))
        assert stage.executor.retained, "for a backward that never comes"
        items.drop(Drop(X, 1))
        assert set(cache.kept) == {G}
        await compute.submit("look", (9,), lambda: None)
        assert not stage.executor.retained
        right = await work(2, 2)
        items.drop(Drop(X, 1))
        fresh = await work(2, 3)
    finally:
        await asyncio.to_thread(compute.stop)
    assert right == fresh
    assert not set(right) & set(wrong)
    assert local.boundaries[F] == right[0]
