"""A policy is a checked type: what a file says, what is allowed at all, and how far one live change may go."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iota.cli.main import main
from subnet.errors import ConfigError, VersionUnsupported
from subnet.policy.api import PolicyLine
from subnet.policy.change import ChangeTooLarge, check_change, differences, towards
from subnet.policy.policy import SECTIONS, AdmissionRules, AuditRules, SubnetPolicy, WeightsRules
from subnet.policy.reference import BEGIN, END, reference
from subnet.policy.score import ScorePolicy, WorkPolicy
from subnet.policy.text import dump_policy, load_policy, parse_policy
from subnet.policy.values import type_of, values_of
from subnet.score.api import ScoreList

DOCS = Path(__file__).resolve().parent.parent / "docs"


def _value(section: type, name: str) -> st.SearchStrategy[object]:
    value = values_of(section)[name]
    if value.choices:
        return st.sampled_from(value.choices)
    if type_of(section, name) is int:
        return st.integers(int(value.low), int(value.high))
    return st.floats(value.low, value.high)


POLICIES = st.builds(
    SubnetPolicy,
    **{
        heading: st.builds(section, **{name: _value(section, name) for name in values_of(section)})
        for heading, section in SECTIONS.items()
    },
)


@given(POLICIES)
@settings(deadline=None)
def test_a_file_gives_back_what_was_written(policy: SubnetPolicy):
    text = dump_policy(policy)
    again = parse_policy(text.encode())
    assert again == policy
    assert again.digest == policy.digest
    assert msgspec.json.decode(msgspec.json.encode(policy), type=SubnetPolicy).digest == policy.digest
    assert tomllib.loads(text)["format"] == 1


def test_every_value_has_a_comment_and_every_field_is_a_value():
    text = dump_policy(SubnetPolicy())
    for heading, section in SECTIONS.items():
        assert list(values_of(section)) == [field.name for field in msgspec.structs.fields(section)], heading
        for value in values_of(section).values():
            assert value.why.split()[0] in text
            assert value.unit
    assert "# Allowed: 1 to 1e+08; in s; default: 3600.0. A change: by a factor of 4 at most." in text


def test_the_digest_tells_policies_apart_and_not_how_they_are_written():
    assert parse_policy(b"").digest == SubnetPolicy().digest
    assert parse_policy(b"[score]\nhalf_life_s = 7200").digest == parse_policy(b"[score]\nhalf_life_s = 7.2e3").digest
    assert parse_policy(b"[score]\nhalf_life_s = 7200").digest != SubnetPolicy().digest


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[score]\nhalf_life_s = 0.5", "score.half_life_s = 0.5 is not allowed (allowed: 1 to 1e+08)"),
        ("[score]\nhalf_life_s = nan", "score.half_life_s = NaN is not allowed (allowed: 1 to 1e+08)"),
        ("[score]\nhalf_life_s = '1 h'", 'score.half_life_s = "1 h" is not allowed (allowed: a number, 1 to 1e+08)'),
        (
            "[score]\nuptime_exponent = 1.5",
            "score.uptime_exponent = 1.5 is not allowed (allowed: a whole number, 0 to 8)",
        ),
        ("[score]\nuptime_exponent = true", "score.uptime_exponent = true is not allowed"),
        ("[score]\nhalf_lif_s = 1", "unknown key score.half_lif_s (did you mean half_life_s?)"),
        ("[work]\nhalf_life_s = 1", "unknown key work.half_life_s (it belongs under [score])"),
        ("half_life_s = 1", "unknown key half_life_s (it belongs under [score])"),
        ("[fees]", "unknown section [fees] (allowed: work, score, audit, weights, admission)"),
        ("[scores]", "unknown section [scores] (did you mean [score]?)"),
        ("score = 1", "score = 1 is not allowed (score is a section: write [score])"),
        ("[audit]\nmin_rate = 0", "audit.min_rate = 0 is not allowed (allowed: 0.001 to 1)"),
        (
            "[audit]\nrequired = 'some'",
            'audit.required = "some" is not allowed (allowed: one of none, probation, all, in',
        ),
        ("[weights]\nburn_share = 1.5", "weights.burn_share = 1.5 is not allowed (allowed: 0 to 1)"),
        ("[weights", "not TOML"),
        ("#" * 70_000, "70000 bytes are no policy"),
    ],
)
def test_a_mistake_is_one_line(text: str, said: str, tmp_path: Path):
    path = tmp_path / "policy.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_policy(path)
    assert str(caught.value).startswith(f"{path}: {said}")
    assert "\n" not in str(caught.value)


def test_a_mistake_ends_the_command_with_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "policy.toml"
    path.write_text("[weights]\nburn_share = 2")
    assert main(["policy", "check", str(path)]) == 2
    said = capsys.readouterr().err
    assert said == f"error: {path}: weights.burn_share = 2 is not allowed (allowed: 0 to 1)\n"


def test_another_format_and_no_file(tmp_path: Path):
    path = tmp_path / "policy.toml"
    path.write_text("format = 2\n[fees]\nrate = 1")
    with pytest.raises(VersionUnsupported, match="format = 2: this version reads policies of format 1"):
        load_policy(path)
    path.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="not UTF-8 at byte 0"):
        load_policy(path)
    with pytest.raises(ConfigError, match="does not exist"):
        load_policy(tmp_path / "nothing")


# --- a live change -------------------------------------------------------------------------------------------------

BASE = SubnetPolicy()


def changed(heading: str, **values: object) -> SubnetPolicy:
    return msgspec.structs.replace(BASE, **{heading: msgspec.structs.replace(getattr(BASE, heading), **values)})


@pytest.mark.parametrize(
    ("heading", "name", "allowed", "refused"),
    [
        ("score", "half_life_s", [900.0, 14_400.0], [899.9, 14_401.0]),
        ("score", "audit_exponent", [1, 3], [0, 4]),
        ("score", "uptime_prior_s", [225.0, 3600.0], [224.0, 0.0, 3601.0]),
        ("score", "unproven_leases", [4.0, 0.0, 64.0], [64.1]),
        ("weights", "burn_share", [0.25], [0.26, 1.0]),
        ("weights", "version_key", [2**62], []),
        ("audit", "min_rate", [0.004], [0.0041, 1.0]),
        ("audit", "min_probation_items", [4], [5]),
        ("audit", "required", ["probation", "all"], []),
        ("admission", "min_stake", [1.0, 40.0], [40.5]),
    ],
)
def test_one_change_goes_so_far_and_no_further(heading: str, name: str, allowed: list[object], refused: list[object]):
    for value in allowed:
        check_change(BASE, changed(heading, **{name: value}))
    for value in refused:
        with pytest.raises(ChangeTooLarge, match=f"{heading}.{name} = {value!r} is too far from") as caught:
            check_change(BASE, changed(heading, **{name: value}))
        assert "--in-steps" in caught.value.hint


@given(POLICIES, POLICIES)
@settings(deadline=None, max_examples=20)
def test_steps_arrive_and_each_is_allowed(old: SubnetPolicy, new: SubnetPolicy):
    for _ in range(5_000):  # a number of losses goes up by a few at a time
        nearer = towards(old, new)
        check_change(old, nearer)
        if nearer == new:
            break
        assert nearer != old, "it stands still"
        old = nearer
    assert towards(old, new) == new


def test_the_way_back_is_open():
    """Whatever one change did, the next may undo it: no value is a trap."""
    for heading, section in SECTIONS.items():
        for name, value in values_of(section).items():
            if value.choices:
                continue
            far = towards(BASE, changed(heading, **{name: type_of(section, name)(value.high)}))
            assert towards(far, BASE) == BASE, f"{heading}.{name}"


def test_differences_in_order_of_the_file():
    new = SubnetPolicy(
        WorkPolicy(witness_pay=0.5),
        ScorePolicy(half_life_s=7200.0),
        AuditRules(required="all"),
        WeightsRules(burn_share=0.5),
        AdmissionRules(min_stake=1.0),
    )
    found = differences(BASE, new)
    assert [one.name for one in found] == [
        "work.witness_pay",
        "score.half_life_s",
        "audit.required",
        "weights.burn_share",
        "admission.min_stake",
    ]
    assert [one.nearest for one in found if one.is_too_large] == [0.25]
    with pytest.raises(ChangeTooLarge, match=r"burn_share = 0.5 is too far from 0.0 .* by 0.25 at most"):
        check_change(BASE, new)


# --- commands and docs ---------------------------------------------------------------------------------------------


def test_show_check_and_diff(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path, other = tmp_path / "policy.toml", tmp_path / "other.toml"
    assert main(["policy", "show", "--default"]) == 0
    path.write_text(capsys.readouterr().out)
    assert load_policy(path) == BASE
    other.write_text("[weights]\nburn_share = 0.5\n[score]\nhalf_life_s = 7200")
    assert main(["policy", "check", str(other)]) == 0
    assert "weights.burn_share = 0.5 (default 0.0)" in capsys.readouterr().out
    assert main(["policy", "diff", str(path), str(other)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "score.half_life_s: 3600.0 -> 7200.0",
        "weights.burn_share: 0.0 -> 0.5   too far for one change (by 0.25 at most): 0.25 is allowed",
    ]
    assert main(["policy", "diff", str(path), "default"]) == 0
    assert capsys.readouterr().out == "the same policy\n"
    assert main(["policy", "show"]) == 2


def test_a_policy_from_what_a_validator_lists(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    policy = changed("score", half_life_s=7200.0)
    line = PolicyLine(policy, policy.digest, 1.0, 7, "hotkey", 0.0)
    path = tmp_path / "scores.json"
    path.write_bytes(msgspec.json.encode(ScoreList(1.0, policy.score, (), (), line)))
    assert main(["policy", "show", "--from", str(path)]) == 0
    assert parse_policy(capsys.readouterr().out.encode()) == policy
    path.write_text(json.dumps({"scores": []}))
    assert main(["policy", "show", "--from", str(path)]) == 2
    assert "holds no policy" in capsys.readouterr().err


def test_the_page_is_made_from_the_type():
    text = (DOCS / "policy.md").read_text(encoding="utf-8")
    made = text[text.index(BEGIN) : text.index(END) + len(END)]
    assert made == reference(), "write it anew with python -m subnet.policy.reference"
