"""What the docs say can be typed and followed: links lead somewhere, commands and their flags exist, every page is in the nav."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.main import get_command

from iota.cli import miners, validators
from iota.cli.main import app
from neurons import miner, validator

COMMANDS = {"miner": miners.COMMANDS, "validator": validators.COMMANDS}
ROOT_COMMAND = get_command(app)
ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
SHELL_WORDS = {"\\", "|", ">", ">>", "2>&1", "&", "&&", ";", "...", "…"}


def without_code(text: str) -> str:
    text = FENCE.sub("", text)
    return re.sub(r"`[^`\n]+`", "", "\n".join(line for line in text.splitlines() if not line.startswith("    ")))


def anchors(path: Path) -> set[str]:
    """As GitHub makes them of headings."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", FENCE.sub("", path.read_text()), re.MULTILINE):
        words = re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower(), flags=re.UNICODE)
        found.add(words.strip().replace(" ", "-"))
    return found


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path):
    for target in LINK.findall(without_code(path.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        other = (path.parent / file).resolve() if file else path
        assert other.exists(), f"{target}: no such file"
        if anchor:
            assert anchor in anchors(other), f"{target}: no such heading, there are {sorted(anchors(other))}"


def commands(text: str) -> Iterator[str]:
    """Lines of code blocks, fenced as shell or indented, that call iota or a neuron."""
    blocks = [body for kind, body in FENCE.findall(text) if kind in ("", "sh", "bash", "console")]
    blocks += ["\n".join(line[4:] for line in FENCE.sub("", text).splitlines() if line.startswith("    "))]
    for block in blocks:
        for line in re.sub(r"\\\n\s*", " ", block).splitlines():
            for part in re.split(r"&&|;|\|\|?|\bdo\b|\$ ", line.split("#")[0]):
                part = part.strip()
                if re.match(r"(iota|python neurons/(validator|miner)\.py) \S", part):
                    yield part


def known_flags(words: list[str]) -> tuple[str, set[str], int]:
    """(command, its flags, how many words name it)."""
    if words[0] == "python":
        parser = miner.build_parser() if "miner" in words[1] else validator.build_parser()
        return words[1], _argparse_flags(parser), 2
    if words[1] in ("validator", "miner") and not (len(words) > 2 and words[2] in COMMANDS[words[1]]):
        parser = miner.build_parser() if words[1] == "miner" else validator.build_parser()
        return words[1], _argparse_flags(parser), 2
    command: Any = ROOT_COMMAND
    number = 1
    while hasattr(command, "commands") and number < len(words) and not words[number].startswith("-"):
        assert words[number] in command.commands, f"iota has no command {' '.join(words[1 : number + 1])}"
        command = command.commands[words[number]]
        number += 1
    flags = {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)}
    return " ".join(words[1:number]), flags | {"--help"}, number


def _argparse_flags(parser: argparse.ArgumentParser) -> set[str]:
    return {flag for action in parser._actions for flag in action.option_strings}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_and_their_flags_exist(path: Path):
    for line in commands(path.read_text()):
        words = [word for word in shlex.split(line) if word not in SHELL_WORDS]
        name, flags, number = known_flags(words)
        for word in words[number:]:
            if word.startswith("--") and len(word) > 2:
                assert word.split("=")[0] in flags, f"{line}: {name} has no flag {word}"


def test_commands_were_found():
    found = [line for path in PAGES for line in commands(path.read_text())]
    assert len(found) > 60
    assert isinstance(app, typer.Typer)


def test_every_page_is_in_the_nav_once():
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())

    def pages(entries: Any) -> Iterator[str]:
        for entry in entries:
            for value in entry.values() if isinstance(entry, dict) else [entry]:
                if isinstance(value, list):
                    yield from pages(value)
                else:
                    yield value

    named = list(pages(site["nav"]))
    assert len(named) == len(set(named))
    there = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert set(named) == there
