"""Every error code in the source is explained on the troubleshooting page and provoked by a test, and the page has no others."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("subnet", "validator", "miner", "iota", "neurons")
CALLS = ("Refusal", "NoWeights")


def _named(node: ast.ClassDef) -> str | None:
    """The ``code`` that a class gives its errors."""
    for line in node.body:
        if not isinstance(line, ast.Assign):
            continue
        target, value = line.targets[0], line.value
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            pairs = list(zip(target.elts, value.elts, strict=True))
        else:
            pairs = [(target, value)]
        for name, constant in pairs:
            if isinstance(name, ast.Name) and name.id == "code" and isinstance(constant, ast.Constant):
                return str(constant.value)
    return None


@cache
def codes() -> dict[str, set[str]]:
    """By code, the names by which a test can provoke it: the code itself and its classes."""
    found: dict[str, set[str]] = {}
    for path in (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and (code := _named(node)):
                found.setdefault(code, {code}).add(node.name)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CALLS and node.args:
                first = node.args[0]
                if isinstance(first, ast.Constant) and isinstance(first.value, str):
                    found.setdefault(first.value, {first.value})
    return {code: names for code, names in found.items() if code}


@cache
def explained() -> set[str]:
    table = (ROOT / "docs" / "troubleshooting.md").read_text().split("## Error codes")[1]
    rows = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    return {code for row in rows for code in re.findall(r"`(\w+)`", row)}


@cache
def all_tests() -> str:
    return "\n".join(path.read_text() for path in (ROOT / "tests").rglob("*.py") if path.name != "test_error_codes.py")


def test_codes_were_found():
    assert len(codes()) > 70


def test_every_code_is_explained_and_every_explained_code_is_one():
    assert sorted(set(codes()) - explained()) == [], "explain them in docs/troubleshooting.md"
    assert sorted(explained() - set(codes())) == [], "docs/troubleshooting.md explains codes that nothing says"


@pytest.mark.parametrize("code", sorted(codes()))
def test_every_code_is_provoked_by_a_test(code: str):
    names = "|".join(re.escape(name) for name in sorted(codes()[code]))
    assert re.search(rf"\b({names})\b", all_tests()), f"no test provokes {code}"
