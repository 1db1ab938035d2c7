"""A bundle replays to the same digest from its directory alone; what is lacking is named, what is damaged or foreign refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from audit_cases import LiveRun, a_plan, edit_item, other_hash
from typer.testing import CliRunner

from iota.cli.main import app, main
from subnet.audit.bundle import (
    BLOBS_NAME,
    CASE_NAME,
    Needed,
    decode_case,
    encode_case,
    needed_blobs,
    open_bundle,
    put_blob,
    read_bundle,
    verify_claims,
    write_bundle,
)
from subnet.audit.case import Case, SignedClaim
from subnet.audit.messages import ReplayRequest
from subnet.audit.redo import redo
from subnet.audit.signed import PURPOSE_RECEIPTS, check_signed
from subnet.audit.worker import Replayer
from subnet.errors import HashMismatch, InputError, IotaError, NotFound, TooLarge, VersionUnsupported
from subnet.model.hardware_class import hardware_class
from subnet.model.stage import prepare_torch
from subnet.protocol import wire
from subnet.protocol.messages import BackwardReceipt, CheckClaim, CommitClaim, FingerprintClaim, MergedClaim
from subnet.protocol.signing import Signer, sign_statement
from subnet.words import Member

prepare_torch(1)

BUDGET = 1 << 40
ALICE, BOB = Signer.from_uri("//Alice"), Signer.from_uri("//Bob")


@pytest.fixture(scope="module")
def run() -> LiveRun:
    return LiveRun(a_plan((0, 2)), hotkeys=[ALICE.hotkey, BOB.hotkey]).run(2)


def blobs_of(run: LiveRun, case: Case, held: int | None = None) -> dict[str, bytes]:
    """As whoever fetches gathers them: in rounds, row groups out of their shards."""
    found: dict[str, bytes] = {}
    for _ in range(8):
        needed = needed_blobs(case, found.get, held=held)
        if not needed:
            return found
        for need in needed:
            data = run.blobs[need.shard or need.hash]
            found[need.hash] = data[need.start : need.start + need.size_bytes] if need.shard else data
            assert need.size_bytes in (0, len(found[need.hash]))
    raise AssertionError("no end of it")


def bundle_at(path: Path, run: LiveRun, case: Case) -> Path:
    write_bundle(path, case, blobs_of(run, case))
    return path


@pytest.fixture
def bundle(tmp_path: Path, run: LiveRun) -> Path:
    return bundle_at(tmp_path / "bundle", run, run.case(1, 0))


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("mode", ["plain", "tied", "delayed"])
def test_a_bundle_replays_to_the_same_digest_from_its_directory(tmp_path: Path, mode: str, stage: int) -> None:
    changes: dict[str, dict[str, Any]] = {"tied": {"tie_word_embeddings": True}, "delayed": {"update_delay": 1}}
    live = LiveRun(a_plan((0, 2), **changes.get(mode, {}))).run(2)
    case = live.case(1, stage)
    directory = bundle_at(tmp_path / "bundle", live, case)
    assert read_bundle(directory).case == case
    found = Replayer().replay(ReplayRequest(str(directory), BUDGET))
    assert found.digest == redo(case, live.pool(), live.read, live.rows).digest
    assert not any(partial.wrong for partial in found.partials)
    assert found.merge is not None
    assert not found.merge.wrong
    assert not found.wrong_roots


def test_rounds_name_everything_once_and_only_what_is_needed(run: LiveRun) -> None:
    case = run.case(1, 0)
    first = needed_blobs(case, lambda _: None)
    assert len({need.hash for need in first}) == len(first)
    assert Needed(case.planned.data, 0) in first
    assert Needed(case.state.manifest, 0) in first
    assert not any(need.shard for need in first)
    found = blobs_of(run, case)
    groups = [need for need in needed_blobs(case, lambda h: found[h] if h in names(case) else None) if need.shard]
    assert groups
    assert all(need.shard_bytes == len(run.blobs[need.shard]) for need in groups)
    assert len(groups) < len(run.order.manifest.train.shards[0].row_group_hashes) or len(groups) == 3
    assert needed_blobs(case, found.get) == []
    middle = LiveRun(a_plan((0, 1, 3))).run(1).case(0, 1)
    assert middle.planned.data not in {need.hash for need in needed_blobs(middle, lambda _: None)}


def names(case: Case) -> set[str]:
    return {case.planned.data, case.state.manifest}


def test_a_state_that_is_held_needs_only_the_log_behind_it(tmp_path: Path, run: LiveRun) -> None:
    before, case = run.case(0, 0), run.case(1, 0)
    held = {need.hash for need in needed_blobs(case, lambda _: None, held=0)}
    assert case.state.manifest not in held
    assert {blob for log in case.state.log[1:] for _, _, blob, _ in log.partitions} <= held
    assert not {blob for log in case.state.log[:1] for _, _, blob, _ in log.partitions} & held
    replayer = Replayer()
    replayer.replay(ReplayRequest(str(bundle_at(tmp_path / "one", run, before)), BUDGET))
    assert replayer.held == {0: 1}
    write_bundle(tmp_path / "two", case, blobs_of(run, case, held=1))
    assert replayer.replay(ReplayRequest(str(tmp_path / "two"), BUDGET)).wrong_roots == ()
    with pytest.raises(NotFound, match=case.state.manifest):
        Replayer().replay(ReplayRequest(str(tmp_path / "two"), BUDGET))


def test_what_is_lacking_is_named_at_once(bundle: Path) -> None:
    lost = sorted(path.name for path in (bundle / BLOBS_NAME).iterdir())[:3]
    for name in lost:
        (bundle / BLOBS_NAME / name).unlink()
    with pytest.raises(NotFound) as caught:
        read_bundle(bundle)
    named = [need.hash for need in open_bundle(bundle).missing()]
    assert all(name in str(caught.value) for name in named)
    assert set(named) <= set(lost)
    assert "put each into" in caught.value.hint


def test_every_damaged_blob_is_refused(bundle: Path) -> None:
    whole = read_bundle(bundle)
    for path in sorted((bundle / BLOBS_NAME).iterdir()):
        data = path.read_bytes()
        for damaged in (data[:-1], data + b"\0", bytes([data[0] ^ 1]) + data[1:]):
            path.write_bytes(damaged)
            with pytest.raises((HashMismatch, TooLarge)):
                whole.blob(path.name)
        path.write_bytes(data)
    assert whole.blob(whole.case.planned.data)


def test_damage_ends_a_replay_without_a_verdict(bundle: Path) -> None:
    case = read_bundle(bundle).case
    path = bundle / BLOBS_NAME / case.state.log[0].partitions[0][2]
    path.write_bytes(path.read_bytes()[::-1])
    with pytest.raises(HashMismatch, match="damaged"):
        Replayer().replay(ReplayRequest(str(bundle), BUDGET))


def test_only_ordinary_files_of_bounded_size_are_read(bundle: Path) -> None:
    whole = read_bundle(bundle)
    path = bundle / BLOBS_NAME / whole.case.state.log[0].partitions[0][2]
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(InputError, match="no ordinary file"):
        whole.blob(path.name)
    path.unlink()
    path.mkdir()
    with pytest.raises(InputError):
        whole.blob(path.name)
    path.rmdir()
    with path.open("wb") as file:
        file.truncate(1 << 34)
    with pytest.raises(TooLarge):
        whole.blob(path.name)
    with (bundle / CASE_NAME).open("wb") as file:
        file.truncate(1 << 34)
    with pytest.raises(TooLarge):
        read_bundle(bundle)


@pytest.mark.parametrize("name", ["../case.msgpack", "", "x" * 64, "A" * 64])
def test_a_name_that_is_no_hash_is_never_a_path(bundle: Path, name: str) -> None:
    whole = read_bundle(bundle)
    with pytest.raises(InputError):
        whole.blob(name)
    with pytest.raises(HashMismatch):
        put_blob(bundle, name, b"x")


def test_foreign_bytes_are_no_case(run: LiveRun, tmp_path: Path) -> None:
    data = encode_case(run.case(1, 0))
    assert decode_case(data) == run.case(1, 0)
    for broken in (b"", b"\xc1", data[:-1], data[: len(data) // 2], b"\x81\xa1x" * 100_000):
        with pytest.raises(InputError):
            decode_case(broken)
    write_bundle(tmp_path, msgspec.structs.replace(run.case(1, 0), version=9), {})
    with pytest.raises(VersionUnsupported):
        open_bundle(tmp_path)
    with pytest.raises(NotFound):
        open_bundle(tmp_path / "nowhere")


def test_a_case_of_another_model_than_it_says_is_refused(tmp_path: Path, run: LiveRun) -> None:
    case = run.case(1, 0)
    config = {**case.planned.model_config, "intermediate_size": 64}
    planned = msgspec.structs.replace(case.planned, model_config=config)
    directory = bundle_at(tmp_path / "b", run, msgspec.structs.replace(case, planned=planned))
    with pytest.raises(InputError, match="not those of its model"):
        Replayer().replay(ReplayRequest(str(directory), BUDGET))


def test_another_hardware_class_says_nothing(tmp_path: Path, run: LiveRun) -> None:
    ours = hardware_class(run.plan)
    right = bundle_at(tmp_path / "a", run, msgspec.structs.replace(run.case(1, 0), hardware_class=ours))
    other = (other_hash("class"), *ours[1:])
    wrong = bundle_at(tmp_path / "b", run, msgspec.structs.replace(run.case(1, 0), hardware_class=other))
    assert Replayer().replay(ReplayRequest(str(right), BUDGET)).wrong_roots == ()
    with pytest.raises(IotaError) as caught:
        Replayer().replay(ReplayRequest(str(wrong), BUDGET))
    assert caught.value.code == "other_hardware"


def test_two_runs_in_one_process_share_nothing(tmp_path: Path, run: LiveRun) -> None:
    other = LiveRun(a_plan((0, 2), attention="eager")).run(2)
    replayer = Replayer()
    for number, live in enumerate((run, other, run)):
        directory = bundle_at(tmp_path / str(number), live, live.case(1, 1))
        findings = replayer.replay(ReplayRequest(str(directory), BUDGET))
        assert not any(partial.wrong for partial in findings.partials)


# --- signed claims -----------------------------------------------------------------------------------------------


def claims_of(case: Case, member: Member) -> list[Any]:
    partial = next(partial for partial in case.partials if partial.member == member)
    assert case.merge is not None
    found: list[Any] = [
        BackwardReceipt(case.step, i.microbatch, case.stage, 1, i.gradient, i.backward, 0.1, i.loss_bits, i.forward)
        for i in partial.items
    ]
    found.append(CommitClaim(case.step, case.merge.group, 1, partial.commitment))
    found.append(FingerprintClaim(case.step, case.merge.group, 1, case.stage, partial.fingerprints))
    found += [
        MergedClaim(case.step, case.merge.group, 1, one.partition, one.hash, one.blob, one.size_bytes, one.squares)
        for one in case.merge.merged
        if one.owner == member
    ]
    return found


def signed(claims: list[Any], signer: Signer) -> list[SignedClaim]:
    leaves = [wire.encode(claim) for claim in claims]
    root = wire.merkle_root(leaves)
    signature = sign_statement(signer, PURPOSE_RECEIPTS, root)
    return [SignedClaim(leaf, root, wire.merkle_proof(leaves, i), signature) for i, leaf in enumerate(leaves)]


def with_claims(case: Case, claims: list[SignedClaim]) -> Case:
    return msgspec.structs.replace(case, claims=tuple(claims))


def test_signed_claims_are_verified_and_counted(run: LiveRun) -> None:
    case = run.case(1, 0)
    mine = claims_of(case, run.members[0])
    found = check_signed(with_claims(case, signed(mine, ALICE)))
    assert found.wrong == ()
    assert found.verified == ((ALICE.hotkey, len(mine)),)
    assert found.unsigned == (BOB.hotkey,)
    both = with_claims(case, signed(mine, ALICE) + signed(claims_of(case, run.members[1]), BOB))
    assert check_signed(both).unsigned == ()
    assert verify_claims(both) == []


def test_claims_that_prove_nothing_are_named(run: LiveRun) -> None:
    case = run.case(1, 0)
    claims = signed(claims_of(case, run.members[0]), ALICE)
    (first, second), replace = claims[:2], msgspec.structs.replace
    bad: list[tuple[str, Case, SignedClaim]] = [
        ("is not signed by", case, signed(claims_of(case, run.members[0]), BOB)[0]),
        ("is not signed by", case, replace(first, signature=bytes(64))),
        ("not in the list", case, replace(first, proof=second.proof)),
        ("not in the list", case, replace(first, root=b"")),
        ("it can't be read", case, replace(first, claim=b"\xc1")),
        ("forward output", edit_item(case, 0, forward=other_hash("x")), first),
        ("says otherwise: gradient", edit_item(case, 0, gradient=other_hash("x")), first),
    ]
    for words, of, claim in bad:
        found = check_signed(with_claims(of, [claim]))
        assert (found.verified, found.beside) == ((), 0)
        (line,) = found.wrong
        assert words in line


def test_claims_about_other_work_and_those_taken_back_are_left_aside(run: LiveRun) -> None:
    case = run.case(1, 0)
    claims = claims_of(case, run.members[0])
    assert check_signed(with_claims(run.case(0, 0), signed(claims[:1], ALICE))).beside == 1
    assert check_signed(with_claims(case, signed([CheckClaim(1, 0, 1, True)], ALICE))).beside == 1
    older = msgspec.structs.replace(claims[0], generation=0, forward=other_hash("first try"))
    found = check_signed(with_claims(case, signed([older, claims[0]], ALICE)))
    assert (found.wrong, found.beside, found.verified) == ((), 1, ((ALICE.hotkey, 1),))


# --- the command -------------------------------------------------------------------------------------------------


def test_the_command_says_what_is_right_in_words(
    bundle: Path, run: LiveRun, capsys: pytest.CaptureFixture[str]
) -> None:
    case = read_bundle(bundle).case
    write_bundle(bundle, with_claims(case, signed(claims_of(case, run.members[0]), ALICE)), {})
    assert main(["audit", "replay", str(bundle)]) == 0
    said = capsys.readouterr().out
    assert f"signed by {ALICE.hotkey}" in said
    assert f"{BOB.hotkey}: no commitment" in said
    assert "verdict: all that was claimed is right" in said


def test_the_command_names_a_lie_and_exits_1(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = read_bundle(bundle).case
    write_bundle(bundle, edit_item(case, 0, forward=other_hash("x")), {})
    assert main(["audit", "replay", str(bundle), "--json"]) == 1
    said = capsys.readouterr()
    assert "t1/m0/s0: output claimed as" in said.err
    report = msgspec.json.decode(said.out)
    assert (report["verdict"], len(report["wrong"])) == ("wrong", 1)
    assert report["partials"][0]["wrong"] == [report["wrong"][0].removeprefix(f"{report['partials'][0]['member']}: ")]


def test_the_command_refuses_what_is_no_bundle_with_2(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "replay", str(bundle / "nowhere")]) == 2
    next((bundle / BLOBS_NAME).iterdir()).unlink()
    assert main(["audit", "replay", str(bundle)]) == 2
    assert "lacks" in capsys.readouterr().err
    assert CliRunner().invoke(app, ["audit", "--help"]).exit_code == 0
