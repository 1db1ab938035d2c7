"""Cheats among several: who takes which part, what colluders get past, what is sent over links; in-process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from audit_cases import LiveRun, a_plan, edit_item, other_hash
from cheat_cases import AT, context_of, liar_at
from join_cases import TrainedRun, trained_run
from merge_cases import SEED, STEP, MergeSwarm
from model_cases import tiny_plan

from benchmarks.cheats import CHEATS, NO_ITEM, Liar, Patches, Terms, cheating, chosen_liars, install_in, lies_told, once
from benchmarks.cheats_links import _nonsense, _unwanted
from iota.entries import Before
from miner.context import RunContext
from miner.local_view import BoundaryKey
from miner.member_evidence import EvidenceWork
from miner.member_witness import WitnessWork
from miner.owes import Fingerprint, RunWitness, StoreEvidence
from subnet.audit.build import claimed_digest
from subnet.model.plan import ModelPlan
from subnet.model.stage import prepare_torch
from subnet.net.streams import StreamTransport
from subnet.protocol import messages as msg
from subnet.protocol import wire
from subnet.words import Cursor, Member

prepare_torch(1)


@pytest.fixture
def patches() -> Iterator[Patches]:
    made = Patches()
    yield made
    made.undo()


@pytest.fixture(scope="module")
def plan() -> ModelPlan:
    return tiny_plan((0, 2))


# --- collusion ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained() -> TrainedRun:
    return trained_run(vocab_size=1200, hidden_size=64, num_hidden_layers=2)


async def test_colluders_pass_every_check_of_the_merge(trained: TrainedRun, patches: Patches, tmp_path: Path) -> None:
    state = msgspec.structs.replace(trained.state, members={}, roots={}, work=None)
    swarm = await MergeSwarm(replace(trained, state=state), tmp_path / "swarm", [[0, 2], [1, 3], []]).open()
    try:
        one, two, _ = swarm.seats
        notes = tmp_path / "notes"
        liar = Liar(Terms(cheat="colluding_owner", directory=str(notes), slots=2, from_step=0))
        for number, seat in enumerate((one, two)):
            once(notes / f"slot-{number}", seat.member.hotkey)
        once(notes / "stage", "0")
        once(notes / "pact", "0")
        Before(CHEATS["colluding_owner"].install).resolve()(liar, patches)
        await swarm.commit_ahead()
        await swarm.send_ahead()
        count = len(one.context.held_stage().merge().partitions)
        swarm.order((one.member,) * count)
        for entry_slice in dict(two.entry().hashes).values():  # sent once the owner is known
            one.context.slices.setdefault(entry_slice, two.context.slices[entry_slice])
            one.local.slices.add(entry_slice)
        liar.take_part(one.context)
        await swarm.reduce()
        swarm.reveal()
        told: dict[int, list[tuple[int, ...]]] = {}
        for seat in (one, two):
            liar.take_part(seat.context)
            owe = Fingerprint(STEP, 0, swarm.merge.version, SEED, tuple(range(count)))
            await seat.merges.fingerprint(owe)
            for index, values in seat.local.fingerprints[(STEP, 0, swarm.merge.version), SEED]:
                told.setdefault(index, []).append(values)
        honest_slices = dict(two.entry().hashes)
        merge = two.context.held_stage().merge()
        fooled = 0
        for index, merged in swarm.merge.merged.items():
            data = one.context.merged[merged.hash]
            total = sum(len(share) for share in swarm.shares)
            seen = merge.check_merged(
                index,
                data,
                hash=merged.hash,
                squares=int(merged.squares, 16),
                total_items=total,
                seed=bytes.fromhex(SEED),
                contributions=told[index],
            )
            assert seen is None, seen
            true = merge.slice_fingerprint(
                index, two.context.slices[honest_slices[index]], 2, bytes.fromhex(SEED), total_items=total
            )
            fooled += true not in told[index]
        assert fooled == count, "the contributor told of another slice than it committed"
    finally:
        await swarm.close()


async def test_a_friend_as_third_party_says_what_the_accused_claims(patches: Patches, tmp_path: Path) -> None:
    run = LiveRun(a_plan((0, 2))).run(2)
    member = run.members[0]
    case = run.case(1, 0, [member])
    lied = edit_item(case, forward=other_hash(case.partials[0].items[0].forward))

    async def given(owe: RunWitness, deadline: Any) -> Any:
        return lied

    liar = Liar(Terms(cheat="colluding_witness", directory=str(tmp_path), covers=True))
    Before(CHEATS["colluding_witness"].install).resolve()(liar, patches)
    said = await WitnessWork._replayed(SimpleNamespace(_case=given), RunWitness(1, "bundle"))  # type: ignore[arg-type]
    assert said == claimed_digest(lied, member) != claimed_digest(case, member)


# --- links -------------------------------------------------------------------------------------------------------


async def test_an_equivocating_sender_sends_other_bytes_under_their_own_hash(
    plan: ModelPlan, patches: Patches, tmp_path: Path
) -> None:
    sent: list[tuple[Any, bytes]] = []

    def recorder(original: Callable[..., Any]) -> Callable[..., Any]:
        async def record(self: Any, peer: Any, header: Any, body: Any, **named: Any) -> None:
            sent.append((header, bytes(body)))

        return record

    patches.put(StreamTransport, "send", recorder)
    liar = liar_at(0, "equivocating_sender", tmp_path, plan)
    Before(CHEATS["equivocating_sender"].install).resolve()(liar, patches)
    body = np.ones(8, dtype=np.float32).tobytes()
    member = Member("liar", 1, 1)
    for step in (AT - 1, AT):
        frame = msg.BoundaryFrame("run", step, 0, 0, False, member, 1, wire.blob_hash(body))
        await StreamTransport.send(object(), None, frame, body)  # type: ignore[arg-type]
    (before, honest_body), (after, other) = sent
    assert (honest_body, before.hash) == (body, wire.blob_hash(body))
    assert other != body
    assert after.hash == wire.blob_hash(other)


async def test_refused_evidence_never_reaches_the_store(plan: ModelPlan, patches: Patches, tmp_path: Path) -> None:
    stored: list[int] = []

    def recorder(original: Callable[..., Any]) -> Callable[..., Any]:
        async def record(self: Any, owe: StoreEvidence) -> None:
            stored.append(owe.key.step)

        return record

    patches.put(EvidenceWork, "store", recorder)
    liar = liar_at(0, "refused_opening", tmp_path, plan)
    Before(CHEATS["refused_opening"].install).resolve()(liar, patches)
    local = SimpleNamespace(opened=set())
    work = SimpleNamespace(_context=SimpleNamespace(local=local))
    for step in (AT - 1, AT):
        owe = StoreEvidence(7, BoundaryKey(step, 0, 0, False), f"hash-{step}", True, True)
        await EvidenceWork.store(work, owe)  # type: ignore[arg-type]
    assert stored == [AT - 1]
    assert local.opened == {(7, f"hash-{AT}")}, "it believes that it has shown it"


def test_floods_are_well_formed(plan: ModelPlan) -> None:
    """What is malformed would be refused before it costs anything."""
    member = Member("liar", 1, 1)
    context: Any = context_of(plan)
    context.run_id, context.member, context.me = "run", member, lambda: member
    context.directives = SimpleNamespace(cursor=Cursor(1, 1))
    context.run_state = SimpleNamespace(next_step=3)
    for turn in range(3):
        path, body = _nonsense(context, turn)
        assert path.startswith("/v1/")
        assert wire.decode(wire.encode(body), type(body), limit_bytes=1 << 20, what="a request") == body
        header, _ = _unwanted(context, turn)
        assert wire.decode(wire.encode(header), msg.AnyPeerFrame, limit_bytes=1 << 20, what="a frame") == header


# --- roles -------------------------------------------------------------------------------------------------------


def test_the_same_seed_lies_about_the_same_items(plan: ModelPlan, tmp_path: Path) -> None:
    def drawn(seed: int, name: str) -> list[bool]:
        liar = Liar(Terms(cheat="no_work", directory=str(tmp_path / name), share=0.2, from_step=5, seed=seed))
        liar.take_part(context_of(plan))
        assert not any(liar.lies(4, m, 0) for m in range(4))
        assert not liar.lies(9, plan.config.pipeline.microbatches, 0), "a hold-out item"
        return [liar.lies(step, m, 0) for step in range(5, 300) for m in range(4)]

    one, again, other = drawn(1, "a"), drawn(1, "b"), drawn(2, "c")
    assert one == again != other
    assert 0.15 < sum(one) / len(one) < 0.25
    assert len(lies_told(tmp_path / "a")["liar"]) == sum(one)


def test_slots_make_one_of_many_the_liar(plan: ModelPlan, tmp_path: Path) -> None:
    liars = [Liar(Terms(cheat="wrong_loss", directory=str(tmp_path), slots=1)) for _ in range(4)]
    for number, liar in enumerate(liars):
        liar.take_part(context_of(plan, number % 2, f"hotkey-{number}"))
    assert [liar.lies(0, 0, number % 2) for number, liar in enumerate(liars)] == [False, True, False, False]
    assert chosen_liars(tmp_path) == {"hotkey-1"}


def test_colluders_share_a_stage_and_begin_together(plan: ModelPlan, tmp_path: Path) -> None:
    liars = [Liar(Terms(cheat="wrong_update", directory=str(tmp_path), slots=2)) for _ in range(3)]
    for number, liar in enumerate(liars):
        liar.take_part(context_of(plan, 0 if number != 1 else 1, f"hotkey-{number}"))

    def at(step: int) -> list[bool]:
        return [liar.lies(step, NO_ITEM, 0 if number != 1 else 1) for number, liar in enumerate(liars)]

    assert at(0) == [False, False, False]
    assert at(1) == [False, False, False]
    assert at(3) == [True, False, True]
    assert liars[0].accomplices() == {"hotkey-2"}


def test_every_cheat_can_be_resolved_and_put_in_place_of_production(tmp_path: Path, patches: Patches) -> None:
    originals = {name: RunContext.__dict__[name] for name in ("__post_init__",)}
    for name, cheat in CHEATS.items():
        mine = Patches()
        before = cheating(name, tmp_path / name, share=0.2)
        assert before.function == "benchmarks.cheats:install"
        assert callable(before.resolve())
        install_in(Liar(msgspec.convert(before.arguments, Terms)), mine)
        assert cheat.words
        assert RunContext.__dict__["__post_init__"] is not originals["__post_init__"]
        mine.undo()
    assert {name: RunContext.__dict__[name] for name in originals} == originals
    assert torch.get_num_threads() == 1
