"""Submitted runs queue in their order, keep their place over restarts, and aren't taken twice or in each other's place."""

from __future__ import annotations

import msgspec
import pytest
from lead_cases import submission

from subnet.errors import ConfigError, Corrupt, Exists, InputError, NotFound
from subnet.policy.policy import AuditRules
from subnet.protocol import wire
from subnet.run.config import AuditSection, RunConfig
from validator import run_registry
from validator.run_registry import AuditsRequired, AuditsTooLarge, RunRegistry


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


def test_a_validator_may_take_only_runs_that_are_audited(tmp_path):
    def audited(name: str, audit: AuditSection):
        made = submission(name)
        config = msgspec.msgpack.decode(made.config, type=RunConfig)
        return msgspec.structs.replace(made, config=wire.encode(msgspec.structs.replace(config, audit=audit)))

    off = audited("off", AuditSection(rate=0.0, before_seal="none"))
    on = audited("on", AuditSection(rate=0.1, before_seal="probation"))
    registry = RunRegistry(tmp_path / "strict", rules=lambda: AuditRules(required="probation"))
    with pytest.raises(AuditsRequired, match="has audits off") as caught:
        registry.add("submitter", off)
    assert caught.value.refusal().code == "audits_required"
    assert "audit.before_seal" in caught.value.hint
    assert registry.add("submitter", on).name == "on"
    assert RunRegistry(tmp_path / "any").add("submitter", off).name == "off"

    def refused(rules: AuditRules) -> str:
        with pytest.raises(AuditsRequired) as caught:
            RunRegistry(tmp_path / "stricter", rules=lambda: rules).add("submitter", on)
        return str(caught.value)

    assert "audit.rate = 0.1; this validator's policy requires 0.2 at least" in refused(AuditRules(min_rate=0.2))
    assert "audit.probation_items = 16; this" in refused(AuditRules(min_probation_items=17))
    assert "requires 'all' (set audit.before_seal to \"all\"" in refused(AuditRules(required="all"))


def test_a_run_whose_audits_need_more_memory_than_there_is_is_refused(tmp_path):
    made = submission("large")
    config = msgspec.msgpack.decode(made.config, type=RunConfig)
    audit = AuditSection(rate=0.1, before_seal="probation")
    on = msgspec.structs.replace(made, config=wire.encode(msgspec.structs.replace(config, audit=audit)))
    registry = RunRegistry(tmp_path / "small", audit_memory_bytes=1 << 20)
    with pytest.raises(AuditsTooLarge, match="this validator gives them 1048576") as caught:
        registry.add("submitter", on)
    assert caught.value.refusal().code == "audit_memory"
    assert "--audit.memory" in caught.value.hint
    off = msgspec.structs.replace(config, audit=AuditSection(rate=0.0, before_seal="none"))
    registry.add("submitter", msgspec.structs.replace(made, config=wire.encode(off)))  # without audits it takes nothing
    assert RunRegistry(tmp_path / "large", audit_memory_bytes=1 << 30).add("submitter", on).name == "large"


def test_the_flags_of_audits():
    from neurons.validator import build_parser, settings_from

    flags = ["--audit.memory", "2GiB", "--audit.disk", "500MB"]
    settings = settings_from(build_parser().parse_args(flags))
    assert (settings.audit_memory_bytes, settings.audit_disk_bytes) == (2 << 30, 500_000_000)
    default = settings_from(build_parser().parse_args([]))
    assert default.audit_keep_cases_s == 90 * 86400
    assert settings_from(build_parser().parse_args(["--audit.keep_cases", "0.5"])).audit_keep_cases_s == 43200
    with pytest.raises(ConfigError, match=r"audit\.keep_cases"):
        settings_from(build_parser().parse_args(["--audit.keep_cases", "-1"]))
    with pytest.raises(ConfigError, match=r"audit\.disk"):
        settings_from(build_parser().parse_args(["--audit.disk", "lots"]))
