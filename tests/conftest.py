"""Every test runs in a home of its own, on one thread, and leaves no task, process or descriptor behind."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent))

from postgres_server import postgres  # noqa: F401 - a fixture
from seaweed import RUNNING, seaweed  # noqa: F401 - a fixture


@pytest.fixture(autouse=True)
def own_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("home")))


def _children() -> set[int]:
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            found.update(int(pid) for pid in (task / "children").read_text().split())
        except FileNotFoundError:
            continue
    return found


def _sockets() -> int:
    count = 0
    for fd in Path("/proc/self/fd").iterdir():
        try:
            count += str(fd.readlink()).startswith("socket:")
        except FileNotFoundError:
            continue
    return count


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """No child process and no socket outlives a test."""
    children, sockets = _children(), _sockets()
    yield
    left = _children() - children - RUNNING
    assert not left, f"child processes outlived the test: {left}"
    if _sockets() > sockets:
        gc.collect()  # slow once torch is loaded, so only where something is left
        assert _sockets() <= sockets, "a socket outlived the test"
