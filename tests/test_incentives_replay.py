"""Recorded journals in the workshop: under the run's own policy a replay is the validator's scores, under another what it says."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from incentive_cases import small
from journal_cases import records_of
from lead_cases import Keys, Run
from score_cases import put_schedule

from iota.cli.main import main
from iota.incentives_replay import MAX_SAMPLES, Replayed, replay
from iota.incentives_source import measure, with_measured
from iota.incentives_worker import run_job
from iota.score_recompute import recompute_run
from subnet.policy.policy import SubnetPolicy, WeightsRules
from subnet.protocol import wire
from subnet.run import events as ev
from subnet.score.policy import ScorePolicy
from subnet.score.recompute import recompute
from validator.journal_store import JournalStore

DEFAULT = SubnetPolicy()
OTHER = SubnetPolicy(score=ScorePolicy(half_life_s=60.0, deadline_exponent=2, uptime_exponent=2))


def journal(directory: Path) -> tuple[Path, tuple[ev.Record, ...]]:
    """A second lies between two records."""
    run = Run(Keys(), "tiny")
    put_schedule(run, 54)
    decoded = (msgspec.msgpack.decode(data, type=ev.Record) for data in run.records)
    records = tuple(msgspec.structs.replace(r, time_ns=(1_700_000_000 + r.number) * 10**9) for r in decoded)
    JournalStore.create(directory / "journal.db", [wire.encode(record) for record in records], run.segments)
    return directory / "journal.db", records


def test_both_sides_are_what_a_validator_with_that_policy_would_have(tmp_path: Path) -> None:
    path, records = journal(tmp_path)
    found = replay(str(path), "", DEFAULT, OTHER)
    now_s = max(record.time_ns for record in records) / 1e9
    a, b = recompute(records, DEFAULT.score, now_s), recompute(records, OTHER.score, now_s)
    assert {one.hotkey: one.last_score_a for one in found.earned} == {k: s.total for k, s in a.items()}
    assert {one.hotkey: one.last_score_b for one in found.earned} == {k: s.total for k, s in b.items()}
    assert any(one.share_a != one.share_b for one in found.earned)
    assert sum(one.share_a for one in found.earned) == pytest.approx(1.0)
    assert found.changed["score.half_life_s"] == (3600.0, 60.0)
    assert found.num_records == len(records)
    assert 0 < found.num_samples <= MAX_SAMPLES + 1


def test_the_same_policy_on_both_sides_changes_nothing_and_what_is_burned_is_nobodys(tmp_path: Path) -> None:
    path, _ = journal(tmp_path)
    same = replay(str(path), "", DEFAULT, DEFAULT)
    assert all(one.share_a == one.share_b for one in same.earned)
    burning = replay(str(path), "", DEFAULT, SubnetPolicy(weights=WeightsRules(burn_share=0.5)))
    for one in burning.earned:
        assert one.share_b == pytest.approx(one.share_a / 2)


async def test_a_saved_journal_and_a_directory_give_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(Keys(), "tiny")
    put_schedule(run, 54)
    await recompute_run(run.keys, "tiny", ScorePolicy(), save=tmp_path / "saved")
    JournalStore.create(tmp_path / "runs" / "tiny" / "journal.db", run.records, run.segments)
    (tmp_path / "b.toml").write_text("[score]\nhalf_life_s = 60.0\n")
    told: list[Replayed] = []
    for place in (tmp_path / "saved", tmp_path / "runs" / "tiny", tmp_path):
        arguments = ["incentives", "replay", str(place), "--policy", str(tmp_path / "b.toml"), "--json"]
        assert await asyncio.to_thread(main, arguments) == 0
        told.append(msgspec.json.decode(capsys.readouterr().out, type=Replayed))
    assert told[0] == told[1] == told[2]
    assert await asyncio.to_thread(main, ["incentives", "replay", str(tmp_path / "saved"), "--policy", "default"]) == 0
    text = capsys.readouterr().out
    assert "A and B are the same policy" in text
    assert told[0].earned[0].hotkey in text


def test_what_a_replay_cant_apply_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, _ = journal(tmp_path)
    (tmp_path / "b.toml").write_text("[audit]\nmin_rate = 0.5\n")
    assert main(["incentives", "replay", str(path), "--policy", str(tmp_path / "b.toml")]) == 0
    assert "a replay can't apply it" in capsys.readouterr().out


def test_a_journal_of_another_version_or_none_is_one_clear_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "newer").write_bytes(b"iota/journal/2\nwhatever")
    (tmp_path / "text").write_text("no journal at all")
    (tmp_path / "empty").write_bytes(b"iota/journal/1\n")
    cases = {
        tmp_path / "newer": "version 2, this iota reads version 1",
        tmp_path / "text": "is no journal",
        tmp_path / "empty": "has no segment",
        tmp_path / "nowhere": "cannot read",
        Path("http://127.0.0.1:1"): "save its journal first",
    }
    for place, wanted in cases.items():
        name = str(place).replace("http:/", "http://")
        assert main(["incentives", "replay", name, "--policy", "default"]) != 0
        out = capsys.readouterr()
        assert wanted in out.err
        assert out.err.count("\n") == 1
        assert not out.out


# --- machines measured in a journal ----------------------------------------------------------------------------------


def test_members_of_a_journal_become_machines(tmp_path: Path) -> None:
    path, records = journal(tmp_path)
    members = measure(str(path), "")
    sealed = {entry.member.hotkey for r in records if isinstance(r.event, ev.StageSealed) for entry in r.event.entries}
    assert {member.hotkey for member in members} <= sealed
    assert all(member.flops_per_s > 0 for member in members)
    scenario = with_measured(small(24, 0.5), members)
    for name, hardware in scenario.hardware.items():
        assert len(hardware.measured) == len(members)
        speeds = sorted(own[0] for own in hardware.measured)
        assert speeds[0] <= small().hardware[name].flops_per_s * 1.000001 <= speeds[-1] * 1.000002
    assert run_job((DEFAULT, scenario, 1)).kinds["honest fast"].income_usd > 0


def test_a_journal_in_which_nobody_worked_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(Keys(), "tiny")
    first = [r.event for r in records_of(54)][:1]
    run.put(*(msgspec.structs.replace(e, run_id=run.run_id) for e in first if isinstance(e, ev.RunPlanned)))
    JournalStore.create(tmp_path / "journal.db", run.records, run.segments)
    arguments = ["incentives", "simulate", "default", "--journal", str(tmp_path), "--miners", "20", "--days", "0.2"]
    assert main(arguments) != 0
    assert "nobody has sealed any work" in capsys.readouterr().err
