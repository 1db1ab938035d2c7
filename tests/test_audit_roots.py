"""Cases about roots: snapshot and log say which state is right; whoever reported another one is accused with its own bundle."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from audit_cases import LiveRun, a_plan, other_hash
from runner_cases import SIGNERS, World
from store_worlds import EmbeddedWorld

from iota.replay_report import WRONG, report_of, what_of
from subnet.audit import build
from subnet.audit.case import Case, Findings, false_roots, root_digest
from subnet.audit.check import check_case
from subnet.audit.process import AuditProcess
from subnet.audit.redo import redo
from subnet.audit.signed import SignedWords
from subnet.errors import InputError, NotFound
from subnet.model.stage import prepare_torch
from subnet.run.state import new_state
from validator.audit_runner import MAX_TRIES
from validator.decision import RootResult, RunRoots

prepare_torch(1)


@pytest.fixture(scope="module")
def run() -> LiveRun:
    return LiveRun(a_plan((0, 2)), hotkeys=[signer.hotkey for signer in SIGNERS]).run(2)


def replay(run: LiveRun, case: Case) -> Findings:
    return redo(case, run.pool(), run.read, run.rows)


def root_case(run: LiveRun, stage: int, version: int, *said: str, snapshot: int = -1) -> Case:
    """About what members have reported of the state after ``version`` updates; nobody has agreed on anything."""
    ref = run.state_ref(stage, version, snapshot=snapshot)
    log = (*ref.log[:-1], msgspec.structs.replace(ref.log[-1], root="")) if ref.log else ()
    return msgspec.structs.replace(
        run.case(0, stage),
        step=version - 1,
        state=msgspec.structs.replace(ref, log=log),
        partials=(),
        merge=None,
        update=None,
        roots=tuple(zip(run.members, said, strict=False)),
    )


@pytest.mark.parametrize("version", [-1, 0, 2])
def test_a_case_about_roots_tells_who_has_another_state(run: LiveRun, version: int) -> None:
    true = run.pool().at(1, run.state_ref(1, version), run.read).state.stage_root()
    agreed = {step.step + 1: step.root for step in run.log[1]}
    assert true == agreed.get(version, true)
    case = root_case(run, 1, version, true, other_hash("r"))
    findings = replay(run, case)
    assert (findings.root, findings.digest) == (true, root_digest(true))
    assert false_roots(case, findings) == (run.members[1],)
    assert false_roots(root_case(run, 1, version, true, true), findings) == ()


def test_a_case_about_roots_goes_on_from_a_kept_state_and_a_snapshot(run: LiveRun) -> None:
    pool, seen = run.pool(), list[str]()
    pool.at(0, run.state_ref(0, 1), run.read)
    case = root_case(run, 0, 2, other_hash("r"), snapshot=1)
    true = next(step.root for step in run.log[0] if step.step == 1)
    assert redo(case, pool, lambda hash_: (seen.append(hash_), run.read(hash_))[1], run.rows).root == true
    assert case.state.manifest not in seen, "the kept state went on"
    assert replay(run, case).root == true


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"partials": "own"}, "about work as well"),
        ({"skipped": (0,)}, "about work as well"),
        ({"roots": "twice"}, "twice"),
        ({"roots": "no hash"}, "no hash"),
        ({"step": -3}, "no step"),
        ({"step": 1}, "gaps"),
    ],
)
def test_a_case_about_roots_must_be_sound(run: LiveRun, change: dict[str, Any], match: str) -> None:
    case, first = root_case(run, 0, 1, other_hash("r")), run.members[0]
    named: dict[str, Any] = {
        "own": run.case(0, 0).partials,
        "twice": ((first, other_hash("a")), (first, other_hash("b"))),
        "no hash": ((first, "root"),),
    }
    with pytest.raises(InputError, match=match):
        check_case(
            msgspec.structs.replace(
                case, **{k: named.get(v, v) if isinstance(v, str) else v for k, v in change.items()}
            )
        )


# --- by a validator and its worker ----------------------------------------------------------------------------------


def given(case: Case) -> Callable[..., Case]:
    """In place of making a case from a journal."""

    def make(*of: object) -> Case:
        return case

    return make


async def test_who_reported_another_root_is_accused_with_a_bundle_that_anyone_replays(
    run: LiveRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, replayer = EmbeddedWorld(tmp_path / "store"), AuditProcess(1 << 28)
    true = next(step.root for step in run.log[0] if step.step == 1)
    case = root_case(run, 0, 2, true, other_hash("r"))
    monkeypatch.setattr(build, "root_case", given(case))
    try:
        world = World(run, await store.start(), tmp_path / "runs", replayer)
        await world.put()
        found = await world.runner.roots(RunRoots(2, 0), new_state())
        assert (found.root, found.trouble, len(found.accused)) == (true, "", 1)
        (accused,) = found.accused
        liar = run.members[1]
        assert (accused.member, accused.charge, accused.digest) == (liar, "root", root_digest(true))
        assert accused.claimed == root_digest(other_hash("r"))
        assert replayer.started == 2, "the second run is a fresh process's"
        kept, findings = await world.runner.replay_case(accused.bundle)
        assert kept.roots == ((liar, other_hash("r")),)
        report = report_of(kept, accused.bundle, SignedWords((), (), (), 0), findings)
        assert report.verdict == WRONG
        assert str(liar) in report.wrong[0]
        assert str(liar) in what_of(kept)
    finally:
        await replayer.close()
        await store.stop()


async def test_a_state_that_cant_be_made_is_given_up_after_some_tries(
    run: LiveRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, replayer = EmbeddedWorld(tmp_path / "store"), AuditProcess(1 << 28)
    case = root_case(run, 0, 2, other_hash("r"))
    monkeypatch.setattr(build, "root_case", given(case))
    try:
        world = World(run, await store.start(), tmp_path / "runs", replayer)  # nothing is in it
        for _ in range(MAX_TRIES - 1):
            with pytest.raises(NotFound):
                await world.runner.roots(RunRoots(2, 0), new_state())
        found = await world.runner.roots(RunRoots(2, 0), new_state())
        assert isinstance(found, RootResult)
        assert (found.root, found.accused) == ("", ())
        assert found.trouble
    finally:
        await replayer.close()
        await store.stop()
