"""The references are as the code says; every command has an example that parses, and JSON where it has a result."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.main import get_command

from iota.cli import reference as cli_reference
from iota.cli.examples import EXAMPLES
from iota.cli.main import app, main
from iota.cli.reference import WITHOUT_JSON, leaves, split_help
from neurons.entry import EXIT_STATUS
from subnet.run import reference as run_reference
from subnet.run.config import RunConfig

ROOT = Path(__file__).resolve().parent.parent
LEAVES: dict[str, Any] = dict(leaves(get_command(app)))


@pytest.mark.parametrize("module", ["iota.cli.reference", "subnet.run.reference"])
def test_the_page_is_as_the_code_says(module: str) -> None:
    command = [sys.executable, "-m", module, "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_a_page_that_is_not_is_told_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for module in (cli_reference, run_reference):
        page = tmp_path / "page.md"
        page.write_text(module.render().replace("| 0 |", "| 1 |").replace("`steps`", "`stops`"))
        monkeypatch.setattr(module, "PAGE", page)
        assert module.main(["--check"]) == 1


def test_every_command_prints_json_or_says_why_not() -> None:
    with_json = {path for path, command in LEAVES.items() if any("--json" in p.opts for p in command.params)}
    assert sorted(set(LEAVES) - with_json) == sorted(set(WITHOUT_JSON) & set(LEAVES))
    assert not with_json & set(WITHOUT_JSON)


def examples(path: str) -> list[str]:
    return [*EXAMPLES.get(path, ()), *split_help(LEAVES[path].help or "")[1]]


@pytest.mark.parametrize("path", sorted(LEAVES))
def test_every_command_has_an_example_that_parses(path: str) -> None:
    assert examples(path)
    for line in examples(path):
        words = shlex.split(line)
        assert words[: 1 + len(path.split())] == ["iota", *path.split()], line
        rest = words[1 + len(path.split()) :]
        LEAVES[path].make_context(path, rest)  # raises what a person would be told


def test_examples_name_commands_there_are() -> None:
    assert set(EXAMPLES) <= set(LEAVES)


def test_examples_are_shown_by_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "export", "--help"]) == 0
    assert EXAMPLES["run export"][0] in capsys.readouterr().out


def test_every_key_of_a_run_file_is_in_its_reference_with_what_is_allowed() -> None:
    page = run_reference.render()
    for section in msgspec.structs.fields(RunConfig):
        part = page.split(f"\n## [{section.name}]\n")[1].split("\n## ")[0]
        for field in msgspec.structs.fields(section.type):
            assert f"| `{field.name}` |" in part
    assert "| `stages` | whole number | `1` | 1 to 256 |" in page
    assert "raw, int8, int4" in page


RUN = """
[run]
name = "small"
[model.config]
model_type = "llama"
vocab_size = 300
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 2
num_attention_heads = 2
[data]
sources = ["book.txt"]
sequence_length = 32
"""


def said(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> Any:
    """The one JSON value on stdout of a command that succeeds."""
    assert main([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_json_of_commands_that_need_nobody(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "book.txt").write_text("Call me Ishmael. Some years ago, never mind how long precisely. " * 200)
    (tmp_path / "run.toml").write_text(RUN)
    assert said(capsys, "version")["protocol"] > 0
    policy = said(capsys, "policy", "show", "--default")
    assert "score" in policy
    assert main(["policy", "show", "--default"]) == 0
    (tmp_path / "policy.toml").write_text(capsys.readouterr().out)
    assert said(capsys, "policy", "check", tmp_path / "policy.toml")["not_default"] == []
    assert said(capsys, "policy", "diff", "default", tmp_path / "policy.toml") == []
    assert said(capsys, "plan", tmp_path / "run.toml")
    made = said(capsys, "data", "prepare", tmp_path / "book.txt", "--out", tmp_path / "data", "--vocab-size", "300")
    assert made["train_tokens"] > 0
    wallets = ("--wallet.path", tmp_path / "wallets")
    new = said(capsys, "wallet", "new", "--wallet.name", "one", *wallets)
    out = said(capsys, "wallet", "export", tmp_path / "id", "--wallet.name", "one", *wallets)
    back = said(capsys, "wallet", "import", tmp_path / "id", "--wallet.name", "two", *wallets)
    assert new["hotkey"] == out["hotkey"] == back["hotkey"]
    (tmp_path / "v" / "runs").mkdir(parents=True)
    assert said(capsys, "journal", "show", "--dir", tmp_path / "v") == []


def test_a_command_that_fails_prints_no_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "list", "--validator.url", "http://127.0.0.1:1", "--json"]) == 1
    heard = capsys.readouterr()
    assert heard.out == ""
    assert heard.err.startswith("error: ")
    assert {0, 1, 2, 3, 130} == set(EXIT_STATUS)
