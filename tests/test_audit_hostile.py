"""A bundle made to do harm ends in one line and an exit status: no traceback, no memory without end, no verdict by accident."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from audit_cases import LiveRun, a_plan, edit_item, edit_partial, other_hash
from hostile_cases import mutants
from test_audit_bundle import bundle_at

from iota import audit_fetch
from iota.cli.main import main
from subnet.audit.bundle import BLOBS_NAME, CASE_NAME, encode_case, put_blob
from subnet.audit.case import Case
from subnet.errors import InputError, OutOfSpace, TooLarge
from subnet.model.stage import prepare_torch
from subnet.protocol.audit_api import CaseDetail, CaseView
from subnet.store.base import Grant

prepare_torch(1)


@pytest.fixture(scope="module")
def run() -> LiveRun:
    return LiveRun(a_plan((0, 2))).run(2)


@pytest.fixture(scope="module")
def other_run() -> LiveRun:
    """Another model, of other widths."""
    return LiveRun(a_plan((0, 2), hidden_size=16)).run(0)


@pytest.fixture
def bundle(tmp_path: Path, run: LiveRun) -> Path:
    return bundle_at(tmp_path / "bundle", run, run.case(1, 0))


def replayed(bundle: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, dict[str, Any], str]:
    """Exit status, report, and what was said on stderr."""
    capsys.readouterr()
    status = main(["audit", "replay", str(bundle), "--memory", "1GiB", "--json", *flags])
    said = capsys.readouterr()
    return status, msgspec.json.decode(said.out), said.err


@pytest.mark.parametrize("seed", range(2))
def test_whatever_a_leaf_of_the_case_is_replaced_by_there_is_an_answer(
    bundle: Path, capsys: pytest.CaptureFixture[str], seed: int
) -> None:
    data = (bundle / CASE_NAME).read_bytes()
    statuses: dict[int, int] = {}
    for words, mutant in mutants(data, seed, 40):
        (bundle / CASE_NAME).write_bytes(mutant)
        status, report, said = replayed(bundle, capsys)
        assert status in (0, 1, 2, 3), words
        assert "Traceback" not in said, words
        assert (status == 2) == (report["verdict"] == "unusable"), words
        assert status < 2 or report["why"], words
        statuses[status] = statuses.get(status, 0) + 1
    assert statuses[2] > 10
    prepare_torch(1)


def _blob(case: Case) -> str:
    return case.partials[0].items[0].gradient


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _flip(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(bytes([data[0] ^ 1]) + data[1:])


def _huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _endless(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


DAMAGE: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "cut": (_cut, ("hash_mismatch", "bad_input")),
    "flipped": (_flip, ("hash_mismatch", "bad_input")),
    "huge": (_huge, ("too_large",)),
    "gone": (Path.unlink, ("not_found",)),
    "a pipe": (_pipe, ("not_found", "bad_input")),
    "a folder": (_folder, ("not_found", "bad_input")),
    "endless": (_endless, ("not_found", "bad_input")),
}


@pytest.mark.parametrize("what", ["case", "blob"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_files_that_are_not_what_they_should_be(
    bundle: Path, run: LiveRun, capsys: pytest.CaptureFixture[str], what: str, damage: str
) -> None:
    harm, codes = DAMAGE[damage]
    path = bundle / CASE_NAME if what == "case" else bundle / BLOBS_NAME / _blob(run.case(1, 0))
    if what == "case" and damage == "flipped":
        path.write_bytes(b"\xc1" + path.read_bytes()[1:])
    else:
        harm(path)
    status, report, said = replayed(bundle, capsys)
    assert (status, report["verdict"]) == (2, "unusable")
    assert report["code"] in codes
    assert said.count("error: ") == 1
    assert "Traceback" not in said


def _with_blobs(bundle: Path, case: Case) -> None:
    (bundle / CASE_NAME).write_bytes(encode_case(case))


def test_a_case_that_names_work_outside_of_its_m_set(bundle: Path, run: LiveRun, capsys: Any) -> None:
    _with_blobs(bundle, edit_item(run.case(1, 0), 0, microbatch=1))
    status, report, _ = replayed(bundle, capsys)
    assert (status, report["code"]) == (2, "bad_input")
    assert "items aren't its m-set" in report["why"]


@pytest.mark.parametrize("name", ["../../../etc/passwd", "/etc/passwd", "blobs/" + "0" * 58, "0" * 63 + "\0"])
def test_names_that_are_paths(bundle: Path, run: LiveRun, capsys: Any, name: str) -> None:
    for case in (edit_item(run.case(1, 0), 0, gradient=name), edit_item(run.case(1, 0), 0, forward=name)):
        _with_blobs(bundle, case)
        status, report, _ = replayed(bundle, capsys)
        assert (status, report["code"]) == (2, "bad_input")


def test_another_version(bundle: Path, run: LiveRun, capsys: Any) -> None:
    _with_blobs(bundle, msgspec.structs.replace(run.case(1, 0), version=2))
    assert replayed(bundle, capsys)[1]["code"] == "version_unsupported"


def test_the_evidence_of_another_run(bundle: Path, run: LiveRun, other_run: LiveRun, capsys: Any) -> None:
    replace, case = msgspec.structs.replace, run.case(1, 0)
    planned = other_run.planned
    put_blob(bundle, planned.snapshot, other_run.blobs[planned.snapshot])
    foreign = {
        "model": replace(case, planned=replace(planned, data=case.planned.data)),
        "snapshot": replace(case, state=replace(case.state, manifest=planned.snapshot)),
        "snapshot, said to be the run's": replace(
            case,
            state=replace(case.state, manifest=planned.snapshot),
            planned=replace(case.planned, snapshot=planned.snapshot),
        ),
        "schedule": replace(
            case,
            planned=replace(
                case.planned,
                config=replace(
                    case.planned.config, optimizer=replace(case.planned.config.optimizer, learning_rate=0.5)
                ),
            ),
        ),
    }
    for words, evidence in foreign.items():
        _with_blobs(bundle, evidence)
        status, report, said = replayed(bundle, capsys)
        assert (status, report["verdict"]) == (2, "unusable"), words
        assert "Traceback" not in said, words


def test_a_bundle_that_is_not_the_one_the_journal_names(bundle: Path, capsys: Any) -> None:
    right = replayed(bundle, capsys)[1]["bundle"]
    assert replayed(bundle, capsys, "--expect", right)[0] == 0
    status, report, _ = replayed(bundle, capsys, "--expect", other_hash("x"))
    assert (status, report["code"]) == (2, "hash_mismatch")


def test_a_case_that_takes_more_memory_than_there_is(bundle: Path, capsys: Any) -> None:
    status, report, said = replayed(bundle, capsys, "--memory", "1MiB")
    assert (status, report["verdict"], report["code"]) == (3, "nothing", "out_of_space")
    assert "Traceback" not in said


def test_a_worker_is_held_to_its_budget_by_the_system() -> None:
    """A case that slips past the estimate can't take the machine down."""
    code = (
        "from subnet.audit.worker import LIBRARIES_BYTES, MemoryBound\n"
        "bound = MemoryBound(); bound.set(64 << 20, 'cpu'); kept = bytearray(32 << 20)\n"
        "try:\n    bytearray(LIBRARIES_BYTES + (64 << 20)); print('unbounded')\n"
        "except MemoryError:\n    print('bounded')\n"
    )
    root = Path(__file__).resolve().parent.parent
    found = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["bounded"]


def test_what_falls_over_unforeseen_is_this_machines_fault(
    bundle: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("in a kernel")

    monkeypatch.setattr("subnet.audit.worker.redo", broken)
    status, report, said = replayed(bundle, capsys)
    assert (status, report["verdict"], report["code"]) == (3, "nothing", "machine_fault")
    assert "ZeroDivisionError" in report["why"]
    assert "Traceback" not in said


# --- a validator that isn't to be trusted --------------------------------------------------------------------------


def detail_of(bundle: str = "a" * 64, *blobs: tuple[str, int]) -> CaseDetail:
    return CaseDetail("r", CaseView(1, "hotkey", 1, 0, "partial", "convicted", bundle, "d", True), blobs)


def test_fetching_refuses_paths_and_more_than_was_asked_for(tmp_path: Path) -> None:
    check = audit_fetch._check_detail
    check(detail_of("a" * 64, ("b" * 64, 10)), 1, 10)
    for found in (detail_of("../x"), detail_of("a" * 64, ("../../x", 1)), detail_of("a" * 64, ("/etc/passwd", 1))):
        with pytest.raises(InputError, match="no hash"):
            check(found, 1, 10)
    with pytest.raises(TooLarge):
        check(detail_of("a" * 64, ("b" * 64, 11)), 1, 10)
    with pytest.raises(InputError, match="no bundle"):
        check(detail_of(""), 1, 10)
    with pytest.raises(OutOfSpace):
        audit_fetch._check_directory(tmp_path / "out", detail_of("a" * 64, ("b" * 64, 1 << 60)))
    assert not (tmp_path / "out").exists()


def test_fetching_refuses_other_blobs_than_were_named() -> None:
    check, case, blob = audit_fetch._check_grants, ("a" * 64, 0), ("b" * 64, 10)

    def grants(*refs: tuple[str, int]) -> tuple[Grant, ...]:
        return tuple(Grant("http://store", "GET", {}, hash_, size_bytes, 0) for hash_, size_bytes in refs)

    check("url", 1, grants(("a" * 64, 5), blob), [case, blob])
    wrong = [(grants(), [case]), (grants(blob), [case]), (grants(("a" * 64, 5), ("b" * 64, 11)), [case, blob])]
    for given, refs in wrong:
        with pytest.raises(InputError):
            check("url", 1, given, refs)
    with pytest.raises(TooLarge):
        check("url", 1, grants(("a" * 64, 1 << 40)), [case])


def test_a_partial_without_its_commitment(bundle: Path, run: LiveRun, capsys: Any) -> None:
    case = run.case(1, 0)
    commitment = msgspec.structs.replace(case.partials[1].commitment, hashes=())
    _with_blobs(bundle, edit_partial(case, 1, commitment=commitment))
    assert replayed(bundle, capsys)[0] == 2
    shutil.rmtree(bundle / BLOBS_NAME)
    _with_blobs(bundle, case)
    assert replayed(bundle, capsys)[1]["code"] == "not_found"
