"""The examples run as they are, with few steps; each is short enough to be read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SAYS = {
    "quickstart.py": "run root",
    "detach_and_attach.py": "elsewhere: root",
    "with_asyncio.py": "seed-2",
    "callbacks.py": "gone",
    "compare_with_pytorch.py": "hold-out loss after",
    "own_modules.py": "run root",
    "lora.py": "run root",
}


def test_each_is_short_and_all_are_known() -> None:
    found = {path.name: len(path.read_text().splitlines()) for path in (ROOT / "examples").glob("*.py")}
    assert set(found) == set(SAYS)
    assert max(found.values()) <= 60, found


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SAYS)
def test_it_runs(name: str, tmp_path: Path) -> None:
    steps = {"callbacks.py": "30", "compare_with_pytorch.py": "20"}.get(name, "8")
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "IOTA_STEPS": steps, "IOTA_LOGDIR": str(tmp_path / "logs")},
        capture_output=True,
        text=True,
        timeout=850,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert SAYS[name] in done.stdout, done.stdout[-2000:]
