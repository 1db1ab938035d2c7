"""A submission in a process of its own: torch's settings here stay as they are, and an interrupt ends all of it.

It is ``iota run submit``, so what the command line can do and says is what happens here.
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import iota
from iota.processes import ProcessFailed
from subnet.errors import ConfigError, IotaError
from subnet.timing import Deadline

_POLL_S = 0.2
_END_S = 10.0


def submit_in_process(
    arguments: Sequence[str], deadline: Deadline, say: Callable[[str], None], command: str = "submit"
) -> None:
    """``iota run submit`` (or ``fork``) with these arguments; each line it prints is said. Raises its error in its own words."""
    root = str(Path(iota.__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "iota.cli.main", "run", command, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"},
        start_new_session=True,
    )
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    reader = threading.Thread(target=_read, args=(process, lines), name="iota submit", daemon=True)
    reader.start()
    last = ""
    try:
        while True:
            deadline.check("submitting the run")
            try:
                line = lines.get(timeout=min(_POLL_S, deadline.remaining_s() + 0.001))
            except queue.Empty:
                continue
            if line is None:
                break
            last = line
            if not line.startswith("error: "):
                say(line)
        status = process.wait(_END_S)
    finally:
        _end(process)
        reader.join(_END_S)
    if status:
        raise _failure(status, last)


def _read(process: subprocess.Popen[str], lines: queue.SimpleQueue[str | None]) -> None:
    assert process.stdout is not None
    with process.stdout as stream:
        for line in stream:
            if line.strip():
                lines.put(line.rstrip())
    lines.put(None)


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _failure(status: int, last: str) -> IotaError:
    words = last.removeprefix("error: ") or f"it ended with status {status}"
    return ConfigError(words) if status == 2 else ProcessFailed(f"the submission failed: {words}")
