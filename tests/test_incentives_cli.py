"""``iota incentives`` on the command line: JSON that decodes, a page that needs nothing else, one clear line for each mistake."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest
from incentive_cases import SCENARIO

from iota.cli.main import main
from subnet.incentives.behaviour import REGISTER
from subnet.incentives.summary import Comparison, Result

SMALL = ["--miners", "16", "--days", "0.4", "--seeds", "2"]
LISTED = {"honest", "price_sensitive", "free_rider", "lazy_quantiser", "forward_only", "copier", "sybils", "colluders",
          "sleeper", "uptime_farmer"}  # fmt: skip


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    status = main(["incentives", *map(str, arguments)])
    out = capsys.readouterr()
    return status, out.out, out.err


def test_simulate_tells_all_as_json_twice_the_same_and_writes_a_page_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "report.html"
    first = run(capsys, "simulate", "default", *SMALL, "--json", "--report", page)
    again = run(capsys, "simulate", "default", *SMALL, "--json", "--processes", 1)
    assert first[0] == again[0] == 0
    assert first[1] == again[1]
    result = msgspec.json.decode(first[1], type=Result)
    assert {kind.behaviour for kind in result.kinds} == LISTED
    assert result.seeds == (1, 2)
    assert sum(kind.share.mean for kind in result.kinds) == pytest.approx(1.0)
    text = page.read_text()
    assert not re.search(r"(src|href)=|url\(|@import|https?://", text), "it needs something from elsewhere"
    assert "prefers-color-scheme:dark" in text
    assert "max-width:620px" in text
    for kind in result.kinds:
        assert kind.name in text
    svgs = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(svgs) > len(result.kinds)
    for svg in svgs:
        assert ElementTree.fromstring(svg).get("viewBox")
        assert "nan" not in svg
        assert "inf" not in svg


def test_compare_tells_what_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "b.toml").write_text("[score]\ndeadline_exponent = 2\n")
    page = tmp_path / "report.html"
    status, out, _ = run(capsys, "compare", "default", tmp_path / "b.toml", *SMALL, "--json", "--report", page)
    assert status == 0
    found = msgspec.json.decode(out, type=Comparison)
    assert found.changed == {"score.deadline_exponent": (1, 2)}
    assert "score.deadline_exponent" in page.read_text()
    status, out, _ = run(capsys, "compare", "default", tmp_path / "b.toml", *SMALL)
    assert status == 0
    assert "score.deadline_exponent: 1 in A, 2 in B" in out
    assert "uptime farmer" in out


def test_a_value_that_changes_nothing_in_a_simulation_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "b.toml").write_text("[audit]\nlost_max = 8\n[work]\nredone_pay = 0.5\n")
    found = [run(capsys, "compare", "default", tmp_path / "b.toml", *SMALL)[1]]
    found.append(run(capsys, "simulate", tmp_path / "b.toml", *SMALL)[1])
    for text in found:
        assert re.search(r"without effect in a simulation: .*redone_pay.*lost_max|lost_max.*redone_pay", text)
    assert "without effect" not in run(capsys, "simulate", "default", *SMALL)[1]


def test_simulate_prints_a_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "simulate", "default", *SMALL)
    assert status == 0
    assert "honesty" in out.splitlines()[-1]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (SCENARIO.replace('hardware = "plain"', ""), "missing required field `hardware`"),
        (SCENARIO.replace("flops_per_s = 1e13", ""), "missing required field `flops_per_s`"),
        (SCENARIO.replace('"honest"', '"nice"'), "unknown behaviour 'nice'"),
        (SCENARIO.replace('hardware = "plain"', 'hardware = "fast"'), "unknown hardware 'fast'"),
        (SCENARIO + "speed = 3\n", "unknown field `speed`"),
        (SCENARIO + "options = { seats = 0 }\n", "seats = 0 is not allowed"),
        (SCENARIO + "options = { seats = 'two' }\n", "Expected `int`"),
        (SCENARIO + "options = { greed = 1 }\n", "unknown field `greed`"),
        (SCENARIO.replace("count = 6", "count = 0"), "count = 0 is not allowed"),
        (SCENARIO.replace("days = 3", "days = -3"), "days = -3.0 is not allowed"),
        (SCENARIO.replace("[hardware.plain]", "[run.audit]\nrate = 2.0\n[hardware.plain]"), "audit.rate = 2.0"),
        (SCENARIO.replace("count = 6", "count = 20000").replace("days = 3", "days = 3650"), "folds_per_tempo"),
        (
            SCENARIO.replace("count = 6", "count = 20000") + "options = { seats = 9 }\n",
            "hotkeys of all groups = 180000",
        ),
        (SCENARIO.replace("days = 3", "days = three"), "is not TOML"),
    ],
)
def test_a_scenario_with_a_mistake_is_one_clear_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, wanted: str
) -> None:
    (tmp_path / "scenario.toml").write_text(text)
    status, out, err = run(capsys, "simulate", "default", "--scenario", tmp_path / "scenario.toml")
    assert status != 0
    assert wanted in err
    assert err.count("\n") == 1
    assert "scenario.toml" in err
    assert not out


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["simulate", "POLICY"], "score.half_life_s = 0.5 is not allowed"),
        (["simulate", "nowhere.toml"], "does not exist"),
        (["compare", "default", "POLICY"], "allowed: 1 to 1e+08"),
        (["simulate", "default", "--scenario", "nothing"], "or one of: standard"),
        (["simulate", "default", "--seeds", "0"], "seeds = 0 is not allowed"),
        (["simulate", "default", "--miners", "3"], "miners = 3 is not allowed"),
        (["simulate", "default", "--days", "nan"], "days = nan is not allowed"),
        (["simulate", "default", "--journal", "nowhere.db"], "cannot read"),
    ],
)
def test_bad_input_is_one_clear_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], wanted: str
) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text("[score]\nhalf_life_s = 0.5\n")
    status, out, err = run(capsys, *(str(policy) if a == "POLICY" else a for a in arguments))
    assert status != 0
    assert wanted in err
    assert err.count("\n") == 1
    assert not out


def test_the_page_of_docs_lists_every_behaviour() -> None:
    doc = (Path(__file__).parent.parent / "docs" / "incentives.md").read_text()
    for name in LISTED:
        assert name in REGISTER
        assert f"`{name}`" in doc
