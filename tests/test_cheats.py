"""Each cheat of the benchmarks changes what it says and nothing else: in-process, against the production code it patches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from join_cases import TrainedRun, trained_run
from merge_cases import SEED, STEP, MergeSwarm
from model_cases import tiny_plan, tokens_of
from test_stage_executor import executors
from test_stage_merge import run_step

from benchmarks.cheats import CHEATS, NO_ITEM, Liar, Patches, Terms, cheating, chosen_liars, install_in, lies_told, once
from benchmarks.cheats_links import _nonsense, _unwanted
from benchmarks.cheats_merge import _other_root
from iota.entries import Before
from miner.context import RunContext
from miner.local_view import BoundaryKey
from miner.member_evidence import EvidenceWork
from miner.owes import Fingerprint, StoreEvidence
from subnet.engine.stage_executor import ItemFailed, PartialKey, StageExecutor
from subnet.engine.stage_merge import StageMerge
from subnet.model.plan import ModelPlan
from subnet.model.stage import prepare_torch
from subnet.net.streams import StreamTransport
from subnet.numerics.examine import accept_slice
from subnet.numerics.slices import parse_slice
from subnet.protocol import messages as msg
from subnet.protocol import wire
from subnet.words import Cursor, ItemKey, Member

prepare_torch(1)

AT = 1
"""The step that is lied about: its state differs from the one before."""
SEED_BYTES = b"\x05" * 32


@pytest.fixture
def patches() -> Iterator[Patches]:
    made = Patches()
    yield made
    made.undo()


def context_of(plan: ModelPlan, stage: int = 0, hotkey: str = "liar") -> Any:
    signer, held = SimpleNamespace(hotkey=hotkey), SimpleNamespace(stage=stage)
    return SimpleNamespace(plan=plan, signer=signer, stage=held, run_state=None, member=None)


def liar_at(stage: int, cheat: str, directory: Path, plan: ModelPlan, **terms: Any) -> Liar:
    """One whose only stage is this."""
    liar = Liar(Terms(cheat=cheat, directory=str(directory), from_step=AT, slots=1, **terms))
    liar.take_part(context_of(plan, stage))
    (directory / "slot-0").write_text("liar")
    liar._role = stage
    return liar


@dataclass
class Work:
    """What two stages of one member make of step 1, each from the honest inputs."""

    forward: dict[tuple[int, int], bytes] = field(default_factory=dict)
    backward: dict[tuple[int, int], bytes] = field(default_factory=dict)
    loss: dict[tuple[int, int], int | None] = field(default_factory=dict)
    slices: dict[int, dict[int, bytes]] = field(default_factory=dict)
    fingerprints: dict[int, dict[int, tuple[int, ...]]] = field(default_factory=dict)
    merged: dict[int, dict[int, bytes]] = field(default_factory=dict)
    merges: dict[int, StageMerge] = field(default_factory=dict)

    def differs(self, other: Work) -> dict[str, set[int]]:
        """By kind of result: the stages at which something is another."""
        found: dict[str, set[int]] = {}
        for name in ("forward", "backward", "loss"):
            mine, theirs = getattr(self, name), getattr(other, name)
            found[name] = {stage for stage, m in mine if mine[stage, m] != theirs[stage, m]}
        for name in ("slices", "fingerprints", "merged"):
            mine, theirs = getattr(self, name), getattr(other, name)
            found[name] = {stage for stage in mine if mine[stage] != theirs[stage]}
        return {name: stages for name, stages in found.items() if stages}


def work_of(plan: ModelPlan, honest: Work | None) -> Work:
    """Two updates, then the third step's items, sums and merges. ``honest``: whose boundaries are the inputs."""
    stages = executors(plan)
    for step in (-1, 0):
        run_step(plan, [stages], step)
    made = Work()
    given = honest or made
    for m in range(plan.config.pipeline.microbatches):
        rows = tokens_of(700 + m)
        for stage, executor in enumerate(stages):
            x = given.forward[stage - 1, m] if stage else None
            done = executor.forward(ItemKey(AT, m, stage), x, rows, keep_graph=stage == 0)
            made.forward[stage, m] = bytes(done.output or b"")
        for stage in reversed(range(len(stages))):
            grad = given.backward[stage + 1, m] if stage == 0 else None
            x = given.forward[stage - 1, m] if stage else None
            back = stages[stage].backward(ItemKey(AT, m, stage), grad, x, rows, partial=PartialKey(AT, 1, 0, 0))
            made.backward[stage, m] = bytes(back.output or b"")
            made.loss[stage, m] = back.loss_bits
    for stage, executor in enumerate(stages):
        _sums_of(plan, executor, stage, made, given)
    return made


def _sums_of(plan: ModelPlan, executor: StageExecutor, stage: int, made: Work, given: Work) -> None:
    merge, partial = StageMerge(plan, stage, executor.state), executor.partials[PartialKey(AT, 1, 0, 0)]
    count = plan.config.pipeline.microbatches
    assert partial.microbatches == set(range(count))
    made.merges[stage] = merge
    made.slices[stage] = {index: bytes(one.data) for index, one in merge.slices(partial).items()}
    made.fingerprints[stage] = merge.partial_fingerprints(partial, SEED_BYTES, total_items=count)
    slices = given.slices[stage]
    sums = {index: merge.merge_partition(index, [(slices[index], count)], total_items=count) for index in slices}
    made.merged[stage] = {index: bytes(one.data) for index, one in sums.items()}


@pytest.fixture(scope="module")
def plan() -> ModelPlan:
    return tiny_plan((0, 2))


@pytest.fixture(scope="module")
def honest(plan: ModelPlan) -> Work:
    return work_of(plan, None)


def lied(
    cheat: str, stage: int, plan: ModelPlan, honest: Work, patches: Patches, directory: Path, **terms: Any
) -> Work:
    liar = liar_at(stage, cheat, directory, plan, **terms)
    Before(CHEATS[cheat].install).resolve()(liar, patches)
    return work_of(plan, honest)


ITEM_CHEATS = [
    ("wrong_forward", 0, {"forward", "slices", "fingerprints"}),
    ("wrong_forward", 1, {"backward", "loss", "slices", "fingerprints"}),
    ("wrong_backward", 0, {"slices", "fingerprints"}),
    ("wrong_backward", 1, {"backward"}),
    ("zero_gradient", 0, {"slices", "fingerprints"}),
    ("scaled_gradient", 1, {"slices", "fingerprints"}),
    ("stale_weights", 0, {"forward", "slices", "fingerprints"}),
    ("stale_weights", 1, {"backward", "loss", "slices", "fingerprints"}),
    ("replayed_output", 0, {"forward"}),
    ("replayed_output", 1, {"backward"}),
    ("sends_nan", 0, {"forward"}),
    ("no_work", 0, {"forward", "slices", "fingerprints"}),
    ("no_work", 1, {"backward", "loss", "slices", "fingerprints"}),
    ("wrong_loss", 1, {"loss"}),
    ("lying_partial", 0, {"slices", "fingerprints"}),
    ("inflated_maxima", 1, {"slices"}),
    ("lying_fingerprint", 0, {"fingerprints"}),
    ("lying_owner", 0, {"merged"}),
    ("inflated_by_owner", 1, {"merged"}),
]


@pytest.mark.parametrize(("cheat", "stage", "changed"), ITEM_CHEATS, ids=lambda value: str(value))
def test_a_cheat_changes_what_it_says_and_nothing_else(
    cheat: str, stage: int, changed: set[str], plan: ModelPlan, honest: Work, patches: Patches, tmp_path: Path
) -> None:
    made = lied(cheat, stage, plan, honest, patches, tmp_path)
    assert made.differs(honest) == {name: {stage} for name in changed}
    told = lies_told(tmp_path)["liar"]
    assert {lie.step for lie in told} == {AT}
    assert {lie.stage for lie in told} == {stage}


def test_honest_work_is_the_same_twice(plan: ModelPlan, honest: Work) -> None:
    assert work_of(plan, honest).differs(honest) == {}


def test_a_share_of_the_items_is_lied_about(plan: ModelPlan, honest: Work, patches: Patches, tmp_path: Path) -> None:
    made = lied("replayed_output", 0, plan, honest, patches, tmp_path, share=0.5, seed=3)
    told = {lie.microbatch for lie in lies_told(tmp_path)["liar"]}
    assert 0 < len(told) < plan.config.pipeline.microbatches
    assert {m for (stage, m) in honest.forward if made.forward[stage, m] != honest.forward[stage, m]} == told


def test_a_lying_partial_is_off_by_one_number_and_its_fingerprint_fits(
    plan: ModelPlan, honest: Work, patches: Patches, tmp_path: Path
) -> None:
    made = lied("lying_partial", 0, plan, honest, patches, tmp_path)
    (index,) = [i for i, data in made.slices[0].items() if data != honest.slices[0][i]]
    merge, count = made.merges[0], plan.config.pipeline.microbatches
    partition, section = merge.find(index)
    values, _ = parse_slice(section, partition, made.slices[0][index], count)
    before, _ = parse_slice(section, partition, honest.slices[0][index], count)
    assert values is not None
    assert before is not None
    assert np.abs(values.astype(int) - before.astype(int)).sum() == 1
    told = merge.slice_fingerprint(index, made.slices[0][index], count, SEED_BYTES, total_items=count)
    assert told == made.fingerprints[0][index]


def test_inflated_maxima_leave_the_sums_alone(plan: ModelPlan, honest: Work, patches: Patches, tmp_path: Path) -> None:
    made = lied("inflated_maxima", 0, plan, honest, patches, tmp_path)
    count = plan.config.pipeline.microbatches
    for index, data in made.slices[0].items():
        partition, section = made.merges[0].find(index)
        values, maxima = parse_slice(section, partition, data, count)
        expected, before = parse_slice(section, partition, honest.slices[0][index], count)
        assert values is not None
        assert np.array_equal(values, expected)
        assert np.array_equal(maxima, before * 8)


def test_an_owners_lie_has_the_form_of_a_sum(plan: ModelPlan, honest: Work, patches: Patches, tmp_path: Path) -> None:
    """Else it would be refused for that, and the checks of the merge would never see it."""
    made = lied("lying_owner", 0, plan, honest, patches, tmp_path)
    count = plan.config.pipeline.microbatches
    for index, data in made.merged[0].items():
        partition, section = made.merges[0].find(index)
        bound, hash_ = section.item_bound // len(section.stages), wire.blob_hash(data)
        accept_slice(section, partition, data, count, hash=hash_, packed=False, item_bound=bound, calibration=False)


def test_false_failure_says_what_isnt_so(plan: ModelPlan, honest: Work, patches: Patches, tmp_path: Path) -> None:
    with pytest.raises(ItemFailed, match="not finite"):
        lied("false_failure", 1, plan, honest, patches, tmp_path)


def test_colluding_replicas_update_wrongly_and_alike(plan: ModelPlan, patches: Patches, tmp_path: Path) -> None:
    roots: list[list[str]] = []
    for name in ("honest", "one", "other"):
        mine = Patches()
        if name != "honest":
            (tmp_path / name).mkdir()
            Before(CHEATS["wrong_update"].install).resolve()(liar_at(0, "wrong_update", tmp_path / name, plan), mine)
        stages = executors(plan)
        for step in (-1, 0, 1):
            run_step(plan, [stages], step)
        roots.append([executor.state.stage_root() for executor in stages])
        mine.undo()
    assert roots[1] == roots[2]
    assert roots[0][0] != roots[1][0]
    assert roots[0][1] == roots[1][1]


def test_another_root_is_reported_than_the_state_has(plan: ModelPlan, tmp_path: Path) -> None:
    liar = liar_at(0, "wrong_root", tmp_path, plan)
    claim = msg.UpdatedClaim(AT, "ab" * 32)
    assert _other_root(liar, claim).root not in ("", claim.root)
    assert _other_root(liar, msg.UpdatedClaim(AT - 1, "ab" * 32)).root == "ab" * 32
    assert _other_root(liar, msg.CheckClaim(AT, 0, 1, True)) == msg.CheckClaim(AT, 0, 1, True)


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
