"""Arrows run one way: neurons, iota -> validator, miner -> subnet; heavy libraries live where the layout says."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("subnet", "validator", "miner", "iota", "neurons")
ALLOWED = {
    "subnet": {"subnet"},
    "validator": {"subnet", "validator"},
    "miner": {"subnet", "miner"},
    "iota": set(PACKAGES),
    "neurons": set(PACKAGES),
}
RANKS = [
    {"words", "errors", "allocator"},
    {"timing"},
    {"logs", "service", "flags", "policy"},
    {"run", "protocol"},
    {"score"},
    {"numerics"},
    {"model"},
    {"engine"},
    {"audit"},
]
ABOVE_PROTOCOL = {"store", "chain", "net"}
TORCH_ALLOWED = (
    "subnet/numerics/",
    "subnet/model/",
    "subnet/engine/",
    "subnet/audit/shadow.py",
    "subnet/audit/redo.py",
    "subnet/audit/worker.py",
    "miner/stage_job.py",
    "miner/compute.py",
    "miner/hardware.py",
    "iota/",
)


def _modules() -> list[Path]:
    return [p for package in PACKAGES for p in sorted((ROOT / package).rglob("*.py"))]


def _imports(path: Path) -> set[str]:
    """All absolute imports, function-level ones too; imports under TYPE_CHECKING count as well."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
    return found


def _rank(module: str) -> int | None:
    parts = module.split(".")
    if parts[0] != "subnet" or len(parts) < 2:
        return None
    for rank, names in enumerate(RANKS):
        if parts[1] in names:
            return rank
    return None


def test_files_were_seen() -> None:
    assert len(_modules()) > 40


@pytest.mark.parametrize("path", _modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_layers(path: Path) -> None:
    relative = path.relative_to(ROOT)
    package = relative.parts[0]
    imports = _imports(path)
    for module in imports:
        top = module.split(".")[0]
        if top in PACKAGES:
            assert top in ALLOWED[package], f"{relative} imports {module}"
    if package == "subnet" and len(relative.parts) > 1:
        own = relative.parts[1].removesuffix(".py")
        own_rank = _rank(f"subnet.{own}")
        for module in imports:
            parts = module.split(".")
            if parts[0] != "subnet" or len(parts) < 2 or parts[1] == own:
                continue
            other_rank = _rank(module)
            if own in ABOVE_PROTOCOL:
                below = RANKS[0] | {"timing", "logs", "service", "protocol", "net"}
                assert parts[1] in below, f"{relative}: {module}"
            elif own_rank is not None:
                assert other_rank is not None, f"{relative} imports {module}, which stands above it"
                assert other_rank < own_rank, f"{relative} imports {module}: not below it"


@pytest.mark.parametrize("path", _modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_libraries_live_where_they_may(path: Path) -> None:
    relative = str(path.relative_to(ROOT))
    tops = {module.split(".")[0] for module in _imports(path)}
    if "torch" in tops:
        assert relative.startswith(TORCH_ALLOWED), f"{relative} imports torch"
        assert not tops & {"asyncio", "aiohttp"}, f"{relative} imports torch and asyncio"
    if "bittensor" in tops:
        assert relative.startswith(("subnet/chain/", "subnet/protocol/signing.py")), f"{relative} imports bittensor"
    if "sqlite3" in tops:
        allowed = ("validator/journal", "subnet/chain/local", "subnet/store/hold_index.py")
        assert relative.startswith(allowed), f"{relative} imports sqlite3"
    if tops & {"boto3", "botocore"}:
        assert relative.startswith("subnet/store/s3_"), f"{relative} imports boto3"


@pytest.mark.parametrize("path", _modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_a_file_is_a_thought(path: Path) -> None:
    text = path.read_text()
    if text.strip():
        assert ast.get_docstring(ast.parse(text)), "no docstring: what does this file guarantee?"
    assert text.count("\n") <= 400, "more than 400 lines: split it"


def test_the_coordinator_needs_no_torch() -> None:
    code = "import sys; import validator.coordinator, validator.http_api; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60, check=True
    )
    assert done.stdout.strip() == "False"
