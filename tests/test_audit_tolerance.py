"""A machine of another hardware class never says that a claim is wrong: it says how far it lies from what it computes itself."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from audit_cases import LiveRun, a_plan, edit_item, edit_merged, edit_slice, other_hash
from test_audit_bundle import bundle_at

from iota.cli.main import main
from subnet.audit.bundle import put_blob, useful_blobs
from subnet.audit.case import Case, Distance, Findings, OtherClass
from subnet.audit.messages import ReplayRequest
from subnet.audit.tolerance import FAR, TOLERANCES, relative_l2, tolerance_of
from subnet.audit.worker import OtherHardware, Replayer
from subnet.model.stage import prepare_torch
from subnet.numerics.codes import decode, encode

prepare_torch(1)
OURS, THEIRS = "5" * 64, "7" * 64


@pytest.fixture(autouse=True)
def another_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cases' class is :data:`THEIRS`; here the golden task gives :data:`OURS`."""
    monkeypatch.setattr("subnet.audit.worker.golden_hash", lambda *_: OURS)


@pytest.fixture(scope="module", params=["raw", "int8"])
def run(request: pytest.FixtureRequest) -> LiveRun:
    return LiveRun(a_plan((0, 1, 3), code=request.param, packing="bits")).run(2)


def of_their_class(run: LiveRun, case: Case) -> Case:
    return msgspec.structs.replace(case, hardware_class=(THEIRS,) * run.plan.num_stages)


def replayed(path: Path, run: LiveRun, case: Case, *claimed: str, tolerant: bool = True) -> Findings:
    """With these claimed outputs in the bundle, beside what every bundle has."""
    directory = bundle_at(path, run, of_their_class(run, case))
    for hash_ in claimed:
        put_blob(directory, hash_, run.blobs[hash_])
    return Replayer().replay(ReplayRequest(str(directory), 1 << 40, tolerant=tolerant))


def other_of(findings: Findings) -> OtherClass:
    assert findings.other_class is not None
    assert findings.digest == ""
    assert not any(partial.wrong for partial in findings.partials)
    assert findings.merge is None or not findings.merge.wrong
    return findings.other_class


def nudged(run: LiveRun, hash_: str, by: float) -> str:
    """A boundary whose numbers are off by about this much, relative to their own size, in the run's code."""
    pipeline, hidden = run.plan.config.pipeline, run.plan.hidden_size
    tokens = pipeline.microbatch_rows * run.plan.config.data.sequence_length
    values = np.empty((tokens, hidden), dtype=np.float32)
    decode(pipeline.boundary_code, run.blobs[hash_], values, pipeline.chunks)
    noise = np.random.default_rng(1).standard_normal(values.shape).astype(np.float32)
    off = values + by * noise * np.float32(np.linalg.norm(values) / np.linalg.norm(noise))
    if pipeline.boundary_code == "raw":
        return run.put(off.astype("<f4").tobytes())
    return run.put(encode(pipeline.boundary_code, off, pipeline.chunks))


def test_without_being_asked_to_tolerate_it_says_nothing(tmp_path: Path, run: LiveRun) -> None:
    with pytest.raises(OtherHardware):
        replayed(tmp_path / "b", run, run.case(1, 1), tolerant=False)


def test_equal_bits_are_at_distance_0_and_need_no_claimed_bytes(tmp_path: Path, run: LiveRun) -> None:
    for stage in range(3):
        other = other_of(replayed(tmp_path / str(stage), run, run.case(1, stage)))
        assert (other.ours, other.theirs, other.not_compared) == (OURS, THEIRS, 0)
        assert other.within
        assert {one.distance for one in other.distances} == {0.0}
        kinds = {one.what.split()[0] for one in other.distances}
        assert {"output", "gradient", "slice", "maxima", "merged"} - kinds == (
            {"gradient"} if stage == 0 else {"output"} if stage == 2 else set()
        )
        assert ("loss" in kinds) == (stage == 2)


def test_a_claim_that_differs_and_whose_bytes_are_not_there_is_not_compared(tmp_path: Path, run: LiveRun) -> None:
    other = other_of(replayed(tmp_path / "b", run, edit_item(run.case(1, 1), 0, forward=other_hash("x"))))
    assert other.not_compared == 1
    assert other.within


@pytest.mark.parametrize("which", ["forward", "backward"])
def test_a_boundary_is_within_or_outside_by_its_decoded_numbers(tmp_path: Path, run: LiveRun, which: str) -> None:
    case = run.case(1, 1)
    hash_ = getattr(case.partials[0].items[0], which)
    limits = tolerance_of(run.plan.config)
    limit = limits.output if which == "forward" else limits.gradient
    for by, within in ((limit / 4, True), (limit * 4, False)):
        false = nudged(run, hash_, by)
        found = replayed(tmp_path / str(within), run, edit_item(case, 0, **{which: false}), false)
        other = other_of(found)
        (far,) = [one for one in other.distances if one.distance > 0]
        assert far.within == other.within == within
        assert far.limit == limit
        assert far.member == case.partials[0].member
        assert "t1/m0/s1" in far.what


@pytest.mark.parametrize("bad", ["short", "not finite", "zeros"])
def test_what_is_no_such_tensor_is_far_away(tmp_path: Path, run: LiveRun, bad: str) -> None:
    case = run.case(1, 1)
    data = bytearray(run.blobs[case.partials[0].items[0].forward])
    if bad == "short":
        del data[-1:]
    elif bad == "not finite":
        data[:] = b"\xff" * len(data)
    else:
        data[:] = bytes(len(data))
    false = run.put(data)
    other = other_of(replayed(tmp_path / bad, run, edit_item(case, 0, forward=false), false))
    assert not other.within
    assert max(one.distance for one in other.distances) >= 0.5


def test_sums_are_within_or_outside_by_their_numbers_at_scale(tmp_path: Path, run: LiveRun) -> None:
    case = run.case(1, 1)
    made = run.done[1, 1, case.partials[0].member].slices[0]
    values = np.frombuffer(made.data, dtype=np.uint8).copy()
    split = len(values) - 4 * sum(run.plan.layout.sections[s].num_blocks for s in run.plan.layout.stage_sections[1])
    integers = values[:split].view("<i2")
    integers[np.abs(integers).argmin()] += 1
    near = run.put(values.tobytes())
    integers[:] = 0
    zero = run.put(values.tobytes())
    for number, (false, within) in enumerate(((near, True), (zero, False))):
        found = replayed(tmp_path / str(number), run, edit_slice(case, 0, false), false)
        far = [one for one in other_of(found).distances if one.distance > 0]
        assert [(one.what, one.within) for one in far] == [("slice of partition 0", within)]


def test_inflated_maxima_are_outside(tmp_path: Path, run: LiveRun) -> None:
    case = run.case(1, 1)
    forged = bytearray(run.done[1, 1, case.partials[0].member].slices[0].data)
    forged[-4:] = np.float32(1e6).tobytes()
    false = run.put(forged)
    other = other_of(replayed(tmp_path / "b", run, edit_slice(case, 0, false), false))
    assert [one.what for one in other.distances if not one.within] == ["maxima of slice of partition 0"]


def test_a_packed_merged_partition_is_compared_too(tmp_path: Path, run: LiveRun) -> None:
    case = run.case(1, 1)
    assert case.merge is not None
    told, earlier = case.merge.merged[0], run.case(0, 1).merge
    assert earlier is not None
    assert told.blob != told.hash
    swapped = edit_merged(case, 0, hash=earlier.merged[0].hash, blob=earlier.merged[0].blob)
    other = other_of(replayed(tmp_path / "b", run, swapped, earlier.merged[0].blob))
    assert next(one.what for one in other.distances if not one.within) == "merged partition 0"
    lacking = other_of(replayed(tmp_path / "c", run, edit_merged(case, 0, hash=other_hash("m"), blob=other_hash("b"))))
    assert lacking.not_compared == 1


def test_a_loss_is_within_or_outside(tmp_path: Path, run: LiveRun) -> None:
    case = run.case(1, 2)
    bits = case.partials[0].items[0].loss_bits
    assert bits is not None
    for number, (false, within) in enumerate(((bits + 1, True), (0x3F800000, False), (0x7FC00000, False))):
        other = other_of(replayed(tmp_path / str(number), run, edit_item(case, 0, loss_bits=false)))
        assert other.within == within


def test_an_item_that_cannot_be_computed_here_is_far_from_everything(tmp_path: Path, run: LiveRun) -> None:
    case = run.case(1, 1)
    lied = edit_item(case, 0, x=run.put(run.blobs[case.partials[0].items[0].x][:-4]))
    other = other_of(replayed(tmp_path / "b", run, lied))
    assert not other.within
    assert any(one.distance == FAR for one in other.distances)


def test_claimed_outputs_are_named_once_each(run: LiveRun) -> None:
    case = run.case(1, 1)
    named = [need.hash for need in useful_blobs(case)]
    assert len(set(named)) == len(named)
    assert {item.forward for partial in case.partials for item in partial.items} <= set(named)
    assert case.merge is not None
    assert {one.blob for one in case.merge.merged} <= set(named)
    partial = msgspec.structs.replace(case, merge=msgspec.structs.replace(case.merge, whole=False), update=None)
    assert not {one.blob for one in case.merge.merged} & {need.hash for need in useful_blobs(partial)}


def test_the_command_says_other_class_and_exits_3(
    tmp_path: Path, run: LiveRun, capsys: pytest.CaptureFixture[str]
) -> None:
    case = of_their_class(run, run.case(1, 1))
    false = run.put(bytes(len(run.blobs[case.partials[0].items[0].forward])))
    cases: list[tuple[Case, str, str]] = [
        (case, "within the tolerance", "within"),
        (edit_item(case, 0, forward=other_hash("x")), "not all could be compared", "not compared"),
        (edit_item(case, 0, forward=false), "outside the tolerance", "outside"),
    ]
    for number, (one, words, verdict) in enumerate(cases):
        directory = bundle_at(tmp_path / str(number), run, one)
        put_blob(directory, false, run.blobs[false])
        assert main(["audit", "replay", str(directory), "--json"]) == 3
        said = capsys.readouterr()
        assert f"verdict: other class: {words}" in said.err
        assert "wrong" not in said.err
        report: dict[str, Any] = msgspec.json.decode(said.out)
        assert (report["verdict"], report["other_class"]["verdict"]) == ("nothing", verdict)
        assert "wrong" not in report


def test_distances_of_numbers() -> None:
    ones = np.ones(100_000, dtype=np.float32)
    assert relative_l2(ones, ones) == 0.0
    assert relative_l2(ones * 1.5, ones) == pytest.approx(0.5)
    assert relative_l2(np.zeros(3), np.zeros(3)) == 0.0
    assert relative_l2(np.ones(3), np.zeros(3)) == FAR
    assert relative_l2(np.ones(3), np.ones(4)) == FAR
    assert relative_l2(np.array([np.nan]), np.ones(1)) == FAR
    assert relative_l2(np.ones(1), np.array([np.inf])) == FAR
    weights = np.repeat([1.0, 0.0], 2)
    assert relative_l2(np.array([1.0, 1.0, 9.0, 9.0]), np.ones(4), weights) == 0.0
    assert Distance(None, "x", math.nextafter(1.0, 0.0), 1.0).within
    assert not Distance(None, "x", FAR, 1.0).within


def test_every_kind_of_run_has_its_limits_and_none_lets_a_lie_of_a_fifth_pass() -> None:
    assert set(TOLERANCES) == {(compute, code) for compute in ("fp32", "bf16") for code in ("raw", "int8", "int4")}
    for limits in TOLERANCES.values():
        assert all(0 < value <= 0.2 for value in msgspec.structs.astuple(limits))
