"""Work done live and redone from a case is the same to the bit, in every mode of a run; each single lie is found and named."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from audit_cases import (
    LiveRun,
    a_plan,
    edit_item,
    edit_log,
    edit_merged,
    edit_partial,
    edit_slice,
    other_hash,
)

from subnet.audit.case import Case, Findings, PartialCase
from subnet.audit.check import untrusted_state
from subnet.audit.redo import MachineFault, redo
from subnet.audit.shadow import ShadowPool, state_bytes
from subnet.engine.stage_executor import StageExecutor
from subnet.errors import HashMismatch, InputError, NotFound, OutOfSpace
from subnet.model.stage import prepare_torch

prepare_torch(1)

MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"compute": "bf16"},
    "int8": {"code": "int8"},
    "int4": {"code": "int4"},
    "tied": {"tie_word_embeddings": True},
    "delayed": {"update_delay": 1},
    "delayed tied": {"update_delay": 1, "tie_word_embeddings": True},
    "packed": {"packing": "bits"},
}


def replay(run: LiveRun, case: Case, pool: ShadowPool | None = None, **options: Any) -> Findings:
    return redo(case, pool or run.pool(), run.read, run.rows, **options)


def all_wrong(findings: Findings) -> list[str]:
    lines = [why for partial in findings.partials for why in partial.wrong]
    lines += [f"partition {index}: {why}" for index, why in (findings.merge.wrong if findings.merge else ())]
    return lines + [f"state {version}: {why}" for version, why in findings.wrong_roots]


@pytest.fixture(scope="module")
def run() -> LiveRun:
    return LiveRun(a_plan((0, 1, 3))).run(2)


@pytest.mark.parametrize("mode", MODES)
def test_honest_work_is_found_right_in_every_mode(mode: str) -> None:
    live = LiveRun(a_plan((0, 2), **MODES[mode])).run(3)
    pools = {True: live.pool(), False: live.pool()}
    for step in range(-1, 3):
        for stage in range(2):
            for whole in (True, False):
                case = live.case(step, stage, None if whole else live.members[1:])
                findings = replay(live, case, pools[whole])
                assert all_wrong(findings) == []
                assert [p.member for p in findings.partials] == [p.member for p in case.partials]
                assert all(
                    redone.slices == partial.commitment.hashes and redone.fingerprints == partial.fingerprints
                    for redone, partial in zip(findings.partials, case.partials, strict=True)
                )
                if whole:
                    assert findings.merge is not None
                    assert case.merge is not None
                    told = {one.partition: one.hash for one in case.merge.merged}
                    assert all(told[index] == hash_ for index, hash_ in findings.merge.hashes)
                    shared = live.plan.config.model.config is not None and "tied" in mode
                    assert (len(findings.merge.hashes) < len(told)) == shared
                else:
                    assert findings.merge is None
    assert findings.read_bytes > 0
    assert findings.compute_s > 0


def test_graphs_kept_or_computed_again_and_any_split_of_the_work_give_the_same_findings() -> None:
    kept, redone = LiveRun(a_plan((0, 2))).run(2), LiveRun(a_plan((0, 2)), num_members=3, graph_bytes=0).run(2)
    assert kept.states[0].stage_root() == redone.states[0].stage_root()
    for live in (kept, redone):
        for budget in (0, 1 << 30):
            assert all_wrong(replay(live, live.case(1, 0), graph_budget_bytes=budget)) == []


def test_a_replay_depends_on_nothing_but_the_case(run: LiveRun) -> None:
    """From the first snapshot or a later one, alone or with others, told the claims or lied to."""
    case = run.case(1, 1)
    plain = replay(run, case)
    later = replay(run, run.case(1, 1, snapshot=1))
    lied = replay(run, edit_slice(edit_item(case, 0, forward=other_hash("a")), 0, other_hash("b")))
    assert plain.digest == later.digest == lied.digest
    assert plain.digest != replay(run, run.case(1, 1, run.members[:1])).digest


def test_the_order_of_items_and_of_partials_and_what_was_replayed_before_change_no_digest(run: LiveRun) -> None:
    case = run.case(1, 1)
    backwards = msgspec.structs.replace(case, partials=tuple(map(_backwards, reversed(case.partials))))
    pool = run.pool()
    digests = [replay(run, one, pool).digest for one in (case, run.case(1, 0), backwards, run.case(0, 1), case)]
    assert digests[0] == digests[2] == digests[4]
    assert len(set(digests)) == 3
    assert all_wrong(replay(run, backwards)) == []


def _backwards(partial: PartialCase) -> PartialCase:
    microbatches = partial.commitment.microbatches[::-1]
    commitment = msgspec.structs.replace(partial.commitment, microbatches=microbatches)
    return msgspec.structs.replace(partial, items=partial.items[::-1], commitment=commitment)


def test_the_sum_of_all_partials_is_kept_once_however_many_there_are() -> None:
    live = LiveRun(a_plan((0, 2)), num_members=4).run(1)
    findings = replay(live, live.case(0, 0))
    assert all_wrong(findings) == []
    assert len(findings.partials) == 4
    assert findings.merge is not None


def test_before_the_manifest_and_before_the_seed_items_and_slices_are_compared(run: LiveRun) -> None:
    for case in (run.case(0, 1, seed=""), msgspec.structs.replace(run.case(0, 1), merge=None, update=None)):
        assert all_wrong(replay(run, case)) == []
        assert all(partial.fingerprints == () for partial in replay(run, case).partials)
        wrong = all_wrong(replay(run, edit_slice(case, 0, other_hash("x"))))
        assert any("slice of partition 0" in line for line in wrong)


LIES: dict[str, tuple[Any, int, str]] = {
    "output": (lambda case: edit_item(case, 1, forward=other_hash("f")), 1, "t1/m2/s1: output claimed as"),
    "gradient": (lambda case: edit_item(case, 0, backward=other_hash("b")), 1, "t1/m0/s1: gradient claimed as"),
    "loss": (lambda case: edit_item(case, 0, loss_bits=0x3F800000), 2, "t1/m0/s2: loss claimed as 1,"),
    "slice": (lambda case: edit_slice(case, 0, other_hash("s")), 1, "slice of partition 0: claimed"),
    "merged": (lambda case: edit_merged(case, 0, hash=other_hash("m")), 1, "partition 0: merged by hotkey0#1.0"),
    "squares": (lambda case: edit_merged(case, 0, squares="1f"), 1, "partition 0: square-sum"),
    "stored": (lambda case: edit_merged(case, 0, blob=other_hash("m")), 1, "no form of the true sum"),
    "root on the way": (lambda case: edit_log(case, 1, root=other_hash("r")), 1, "state 1: the state after 1 updates"),
}


@pytest.mark.parametrize("lie", LIES)
def test_each_single_lie_is_found_and_named(run: LiveRun, lie: str) -> None:
    tell, stage, words = LIES[lie]
    findings = replay(run, tell(run.case(1, stage)))
    (line,) = all_wrong(findings)
    assert words in line
    assert findings.digest == replay(run, run.case(1, stage)).digest


def test_a_false_root_after_the_update_is_found(run: LiveRun) -> None:
    case = run.case(1, 1)
    assert case.update is not None
    lied = msgspec.structs.replace(case, update=msgspec.structs.replace(case.update, root=other_hash("r")))
    findings = replay(run, lied)
    assert [version for version, _ in findings.wrong_roots] == [2]
    assert untrusted_state(lied, findings) is None
    on_the_way = edit_log(
        case, 1, root=other_hash("r")
    )  # the log leads to one state: who computed from another is wrong
    assert untrusted_state(on_the_way, replay(run, on_the_way)) is None


def test_a_false_fingerprint_is_found_and_a_missing_one_too(run: LiveRun) -> None:
    case = run.case(1, 1)
    first, *rest = case.partials[0].fingerprints
    false = (first[0], (first[1][0] ^ 1, *first[1][1:]))
    assert len(all_wrong(replay(run, edit_partial(case, fingerprints=(false, *rest))))) == 1
    if rest:
        (line,) = all_wrong(replay(run, edit_partial(case, fingerprints=tuple(rest))))
        assert "no fingerprint" in line


def test_inflated_maxima_are_found_in_the_slice_and_traced_to_it_not_to_the_owner(run: LiveRun) -> None:
    """The slice's numbers are right, one block maximum isn't: fingerprints and squares don't show it."""
    case = run.case(1, 1)
    member = case.partials[0].member
    made = run.done[1, 1, member].slices[0]
    forged = bytearray(made.data)
    forged[-4:] = np.float32(2.0 * np.frombuffer(forged[-4:], "<f4")[0] + 1.0).tobytes()
    lied = edit_merged(edit_slice(case, 0, run.put(forged)), 0, hash=other_hash("the sum of it"))
    findings = replay(run, lied)
    assert any("slice of partition 0" in why for why in findings.partials[0].wrong)
    assert not findings.partials[1].wrong
    assert findings.merge is not None
    ((partition, why),) = findings.merge.wrong
    assert partition == 0
    assert "a committed slice of it is wrong as well" in why


def test_work_on_other_inputs_shows_in_everything_that_came_of_it(run: LiveRun) -> None:
    case = run.case(1, 1)
    findings = replay(run, edit_item(case, 0, x=case.partials[0].items[1].x))
    lines = findings.partials[0].wrong
    assert any("output" in line for line in lines)
    assert any("gradient" in line for line in lines)
    assert any("slice" in line for line in lines)
    assert not findings.partials[1].wrong


def test_a_claim_that_was_never_made_is_not_compared(run: LiveRun) -> None:
    case = edit_item(run.case(1, 1), 0, forward="", backward="")
    assert all_wrong(replay(run, case)) == []


@pytest.mark.parametrize("which", ["x", "gradient"])
@pytest.mark.parametrize("bad", ["short", "not finite"])
def test_an_input_that_nobody_can_compute_with_fails_the_item_and_the_sum(run: LiveRun, which: str, bad: str) -> None:
    case = run.case(1, 1)
    data = bytearray(run.blobs[getattr(case.partials[0].items[0], which)])
    if bad == "short":
        del data[-4:]
    else:
        data[:4] = np.float32(np.nan).tobytes()
    lied = edit_item(case, 0, **{which: run.put(data)})
    one, two = replay(run, lied), replay(run, lied)
    assert one.digest == two.digest
    failed = one.partials[0]
    assert failed.items[0].failure
    assert not failed.items[1].failure
    assert failed.slices == ()
    assert "can't be computed from what went into it" in failed.wrong[0]
    assert one.merge is None
    assert not one.partials[1].wrong


def test_a_gradient_that_overflows_fails_the_item(run: LiveRun) -> None:
    case = run.case(1, 1)
    data = np.frombuffer(run.blobs[case.partials[0].items[0].gradient], dtype="<f4").copy()
    data[:] = np.float32(3e38)
    findings = replay(run, edit_item(case, 0, gradient=run.put(data.tobytes())))
    assert findings.partials[0].items[0].failure
    assert "finite" in findings.partials[0].wrong[0]


def test_what_this_machine_cannot_do_accuses_nobody(run: LiveRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: Any, **__: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")

    monkeypatch.setattr("subnet.engine.stage_executor.backward_chunk", no_memory)
    with pytest.raises(MachineFault, match="OutOfMemoryError"):
        replay(run, run.case(1, 1))


def test_evidence_that_is_not_there_is_an_error_and_no_finding(run: LiveRun) -> None:
    with pytest.raises(NotFound):
        replay(run, edit_item(run.case(1, 1), 0, x=other_hash("lost")))


# --- shadows -----------------------------------------------------------------------------------------------------


def reads(run: LiveRun, seen: list[str]):
    def read(hash_: str) -> bytes:
        seen.append(hash_)
        return run.read(hash_)

    return read


def test_a_kept_state_goes_on_by_the_log_alone(run: LiveRun) -> None:
    pool, seen = run.pool(), list[str]()
    for version in range(-1, 3):
        shadow = pool.at(1, run.state_ref(1, version), reads(run, seen))
        assert shadow.state.next_step == version
        assert shadow.wrong_roots == ()
    assert seen.count(run.planned.snapshot) == 1
    assert pool.versions == {1: 2}
    assert pool.goes_on_from(1, run.state_ref(1, 2)) == 2
    assert pool.goes_on_from(1, run.state_ref(1, 1)) is None
    assert pool.at(1, run.state_ref(1, 1), run.read).state.next_step == 1


def test_a_kept_state_is_recognised_behind_another_snapshot_only_by_an_agreed_root(run: LiveRun) -> None:
    pool = run.pool()
    pool.at(1, run.state_ref(1, 1), run.read)
    assert pool.goes_on_from(1, run.state_ref(1, 2, snapshot=1)) == 1
    assert pool.goes_on_from(1, run.state_ref(1, 2, snapshot=0)) == 1
    unknown = run.state_ref(1, 2, snapshot=1)
    assert pool.goes_on_from(1, msgspec.structs.replace(unknown, root="")) is None
    assert pool.goes_on_from(1, msgspec.structs.replace(unknown, root=other_hash("r"))) is None


def test_a_state_of_a_branch_that_was_left_is_never_gone_on_from(run: LiveRun) -> None:
    """The same steps, with another sum: without roots nothing else would tell them apart."""
    pool = run.pool()
    ref = run.state_ref(1, 2)
    rootless = msgspec.structs.replace(ref, log=tuple(msgspec.structs.replace(s, root="") for s in ref.log))
    pool.at(1, rootless, run.read)
    assert pool.goes_on_from(1, rootless) == 2
    other = list(rootless.log)
    partitions = tuple((i, other_hash(h), other_hash(b), n) for i, h, b, n in other[1].partitions)
    other[1] = msgspec.structs.replace(other[1], partitions=partitions)
    assert pool.goes_on_from(1, msgspec.structs.replace(rootless, log=tuple(other))) is None


def test_the_stage_used_least_lately_makes_room_and_one_stage_must_fit(run: LiveRun) -> None:
    sizes = [state_bytes(run.plan, stage) for stage in range(3)]
    pool = run.pool(budget_bytes=sizes[0] + sizes[1])
    pool.at(0, run.state_ref(0, 0), run.read)
    pool.at(1, run.state_ref(1, 0), run.read)
    pool.at(0, run.state_ref(0, 1), run.read)
    pool.at(1, run.state_ref(1, 1), run.read)
    assert set(pool.versions) == {0, 1}
    pool.at(2, run.state_ref(2, 0), run.read)
    assert 0 not in pool.versions
    with pytest.raises(OutOfSpace, match="budget for audits"):
        run.pool(budget_bytes=sizes[0] - 1).at(0, run.state_ref(0, 0), run.read)


def test_state_bytes_are_those_of_the_state() -> None:
    for mode in ("plain", "bf16", "delayed", "tied"):
        live = LiveRun(a_plan((0, 2), **MODES[mode])).run(1)
        for stage, state in enumerate(live.states):
            held = sum(t.nbytes for b in state._buffers.values() for t in b.arrays.values())
            held += sum(t.nbytes for t in state._spare.values())
            assert held <= state_bytes(live.plan, stage) <= 1.5 * held


def test_a_snapshot_that_is_not_the_agreed_one_is_a_finding(run: LiveRun) -> None:
    case = run.case(1, 1, snapshot=1)
    lied = msgspec.structs.replace(case, state=msgspec.structs.replace(case.state, root=other_hash("r")))
    findings = replay(run, lied)
    assert [version for version, _ in findings.wrong_roots] == [1]
    assert untrusted_state(lied, findings) is not None


def test_damaged_state_is_an_error_and_leaves_no_state_behind(run: LiveRun) -> None:
    pool = run.pool()
    blob = run.log[1][1].partitions[0][2]

    def damaged(hash_: str) -> bytes:
        data = run.read(hash_)
        return data[:-8] if hash_ == blob else data

    with pytest.raises(InputError):
        pool.at(1, run.state_ref(1, 2), damaged)
    assert pool.versions == {}
    assert pool.at(1, run.state_ref(1, 2), run.read).wrong_roots == ()


def test_a_packed_partition_that_unpacks_to_something_else_is_refused() -> None:
    live = LiveRun(a_plan((0, 2), packing="bits")).run(2)
    ref = live.state_ref(0, 2)
    one, two = ref.log[1], ref.log[2]
    assert one.partitions[0][1] != one.partitions[0][2]
    swapped = tuple((i, h, b, n) for (i, h, _, _), (_, _, b, n) in zip(one.partitions, two.partitions, strict=True))
    log = (ref.log[0], msgspec.structs.replace(one, partitions=swapped), two)
    with pytest.raises(HashMismatch):
        live.pool().at(0, msgspec.structs.replace(ref, log=log), live.read)


def test_memory_of_one_partial_at_a_time(run: LiveRun, monkeypatch: pytest.MonkeyPatch) -> None:
    most = 0
    add = StageExecutor._add

    def counted(self: StageExecutor, *args: Any) -> Any:
        nonlocal most
        stats = add(self, *args)
        most = max(most, len(self.partials))
        return stats

    monkeypatch.setattr(StageExecutor, "_add", counted)
    replay(run, run.case(1, 1))
    assert most == 1
