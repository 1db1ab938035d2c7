"""Submitted runs queue in their order, keep their place over restarts, and aren't taken twice or in each other's place."""

from __future__ import annotations

import msgspec
import pytest
from lead_cases import submission

from subnet.errors import Corrupt, Exists, InputError, NotFound
from validator import run_registry
from validator.run_registry import RunRegistry


def places(registry: RunRegistry) -> dict[str, int]:
    return {name: registry.place_of(name) for name in registry.entries}


def test_a_run_keeps_its_place_over_restarts_and_moves_up_only(tmp_path):
    registry = RunRegistry(tmp_path)
    for name in ("zeta", "alpha", "mid"):
        registry.add("submitter", submission(name))
    assert places(registry) == {"zeta": 0, "alpha": 1, "mid": 2}
    again = RunRegistry(tmp_path)
    assert places(again) == places(registry)
    active = again.active()
    assert active is not None
    assert active.name == "zeta"
    again.finish(active)
    later = RunRegistry(tmp_path)
    assert {name: later.place_of(name) for name in ("alpha", "mid")} == {"alpha": 0, "mid": 1}
    assert later.entries["zeta"].finished


def test_the_same_submission_again_is_the_same_run_and_another_is_refused(tmp_path):
    registry = RunRegistry(tmp_path)
    first = registry.add("submitter", submission("one"))
    assert registry.add("submitter", submission("one")) is first
    other = msgspec.structs.replace(submission("one"), data="cd" * 32)
    with pytest.raises(Exists, match="already here"):
        registry.add("submitter", other)
    with pytest.raises(NotFound, match="known runs: one"):
        registry.get("two")


def test_the_queue_is_bounded_and_nothing_is_lost_by_a_refusal(tmp_path, monkeypatch):
    monkeypatch.setattr(run_registry, "MAX_QUEUED", 2)
    registry = RunRegistry(tmp_path)
    registry.add("submitter", submission("one"))
    registry.add("submitter", submission("two"))
    with pytest.raises(InputError, match="2 runs are queued"):
        registry.add("submitter", submission("three"))
    assert list(RunRegistry(tmp_path).entries) == ["one", "two"]


def test_a_damaged_run_file_is_named(tmp_path):
    RunRegistry(tmp_path).add("submitter", submission("one"))
    path = tmp_path / "runs" / "one" / "run.msgpack"
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(Corrupt, match=r"run\.msgpack"):
        RunRegistry(tmp_path)


def test_costs_measured_anew_do_not_make_another_run(tmp_path):
    registry = RunRegistry(tmp_path)
    first = registry.add("submitter", submission("one"))
    again = msgspec.structs.replace(submission("one"), unit_costs=tuple(2.0 for _ in submission("one").unit_costs))
    assert registry.add("submitter", again) is first
