"""The other end of the warm parent: starts named processes through it, knows which have ended and how.

Nothing outlives this object: closing it (or the death of this process, however it comes) ends every process it started.
Not thread-safe; it has no thread of its own.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import iota
from subnet.allocator import with_huge_pages
from subnet.errors import ConfigError, IotaError
from subnet.timing import Deadline

_END_S = 25.0
_POLL_S = 0.1
_FORK_S = 60.0
"""Until a requested process is forked: the parent may still be importing."""


@dataclass
class Child:
    """One process by name; ``status`` is None while it runs, negative: the signal that ended it."""

    name: str
    log: Path
    pid: int | None = None
    status: int | None = None

    @property
    def running(self) -> bool:
        return self.pid is not None and self.status is None

    def last_words(self) -> str:
        """Its last error, else its last line."""
        try:
            lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        except FileNotFoundError:
            return ""
        errors = [line for line in lines if line.startswith("error: ")]
        return (errors or lines or [""])[-1].removeprefix("error: ")


class ProcessFailed(IotaError):
    """A process of a local swarm ended by itself."""

    code = "process_failed"


class ForkServer:
    """The warm parent as a child of this process, and its children by name."""

    def __init__(self, log_dir: Path, *, remove: Path | None = None) -> None:
        """``remove``: a temporary directory that goes once this process and all children have ended, however they did."""
        log_dir.mkdir(parents=True, exist_ok=True)
        self._log_dir = log_dir
        self.children: dict[str, Child] = {}
        self.warm = False
        self._requests: dict[int, Child] = {}
        self._by_pid: dict[int, Child] = {}
        self._pending = b""
        root = str(Path(iota.__file__).resolve().parent.parent)
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        with (log_dir / "forkserver.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "iota.forkserver", *(("--remove", str(remove)) if remove else ())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=with_huge_pages(os.environ)
                | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
            )

    def keep(self) -> None:
        """What would be removed is of use: a log says why something failed."""
        stdin = self._process.stdin
        if stdin is not None and not stdin.closed:
            with suppress(BrokenPipeError):
                stdin.write(b'{"keep": true}\n')
                stdin.flush()

    def request(self, name: str, entry: str, settings: dict[str, Any]) -> Child:
        """Ask for a process; it is forked at once, or when the parent is warm. A name is free again after its end."""
        previous = self.children.get(name)
        if previous is not None and previous.status is None:
            raise ValueError(f"a process called {name} is running")
        child = Child(name, self._log_dir / f"{name}.log")
        number = len(self._requests)
        self._requests[number] = child
        self.children[name] = child
        line = json.dumps({"id": number, "entry": entry, "settings": settings, "log": str(child.log)}) + "\n"
        stdin = self._process.stdin
        assert stdin is not None
        try:
            stdin.write(line.encode())
            stdin.flush()
        except BrokenPipeError as error:
            raise self._ended() from error
        return child

    def poll(self, timeout_s: float = 0.0) -> None:
        """Take in what the parent reports, waiting at most ``timeout_s`` for the first report."""
        stdout = self._process.stdout
        assert stdout is not None
        while select.select([stdout], [], [], timeout_s)[0]:
            chunk = os.read(stdout.fileno(), 1 << 16)
            if not chunk:
                raise self._ended()
            *lines, self._pending = (self._pending + chunk).split(b"\n")
            for line in lines:
                self._take(json.loads(line))
            timeout_s = 0.0

    def wait_pid(self, name: str, deadline: Deadline) -> int:
        """The process id of a requested process, once it is forked."""
        child = self.children[name]
        while child.pid is None:
            deadline.check(f"starting {name}")
            self.poll(min(_POLL_S, deadline.remaining_s()))
        return child.pid

    def wait_end(self, name: str, deadline: Deadline) -> int:
        """The exit status of a process, once it has ended."""
        child = self.children[name]
        while child.status is None:
            deadline.check(f"waiting for {name} to end")
            self.poll(min(_POLL_S, deadline.remaining_s()))
        return child.status

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """Send a signal, to a requested process once it is forked; pausing and continuing reach its whole group."""
        child = self.children.get(name)
        if child is not None and child.status is None:
            self.wait_pid(name, Deadline.after(_FORK_S))
        self.send(name, number, group=number in (signal.SIGSTOP, signal.SIGCONT, signal.SIGTSTP))

    def send(self, name: str, number: int, *, group: bool = False) -> int | None:
        """Send a signal to a process, or to its whole group; its process id, None where it doesn't run (yet).

        SIGKILL lets the rest of a paused group go on, so that a helper process sees the end and ends too.
        """
        self.poll()
        child = self.children.get(name)
        if child is None or not child.running or child.pid is None:
            return None
        try:
            (os.killpg if group else os.kill)(child.pid, number)
        except ProcessLookupError:
            return None  # it has ended this moment; the parent's report is under way
        if number == signal.SIGKILL and not group:
            with suppress(ProcessLookupError):  # it may be too young to have a group
                os.killpg(child.pid, signal.SIGCONT)
        return child.pid

    def check(self, *names: str) -> None:
        """Raise when one of these processes has ended."""
        self.poll()
        for name in names:
            child = self.children.get(name)
            if child is not None and child.status is not None:
                raise failure_of(child)

    def close(self) -> None:
        """End every process: SIGTERM, and SIGKILL for who doesn't listen."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        for child in self.children.values():  # a paused process can't hear SIGTERM
            if child.running and child.pid is not None:
                try:
                    os.killpg(child.pid, signal.SIGCONT)
                except ProcessLookupError:
                    continue
        with suppress(BrokenPipeError):  # the parent is gone already, and its children with it
            stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        finally:
            stdout.close()

    def _take(self, message: dict[str, Any]) -> None:
        if "warm" in message:
            self.warm = True
        elif "exited" in message:
            child = self._by_pid.get(message["exited"])
            if child is not None:
                child.status = message["status"]
        else:
            child = self._requests[message["id"]]
            child.pid = message["pid"]
            self._by_pid[message["pid"]] = child

    def _ended(self) -> ProcessFailed:
        log = self._log_dir / "forkserver.log"
        lines = log.read_text(errors="replace").strip().splitlines()
        return ProcessFailed(
            f"the swarm's parent process ended: {lines[-1] if lines else 'no output'}", hint=f"see {log}"
        )


def started_at(pid: int) -> int | None:
    """When a process was started, in the kernel's ticks: with its id this names it for good. None: it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in ("Z", "X") else int(fields[19])


def failure_of(child: Child) -> IotaError:
    """A process that ended by itself, in its own words where it had some."""
    words = child.last_words()
    if child.status == 2 and words:
        return ConfigError(f"{child.name}: {words}")
    how = (
        f"ended with status {child.status}"
        if (child.status or 0) >= 0
        else f"was ended by signal {-(child.status or 0)}"
    )
    return ProcessFailed(f"{child.name} {how}{': ' + words if words else ''}", hint=f"see {child.log}")
