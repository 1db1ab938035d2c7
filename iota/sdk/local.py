"""A swarm of this machine: processes that end with the context (or this process), or a detached one that goes on.

The processes are started and asked in one thread of their own: the kernel ties them to the thread that started them.
"""

from __future__ import annotations

import atexit
import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import msgspec

import iota
from iota.forkserver import TEMPORARY
from iota.own_modules import keep_code
from iota.processes import ProcessFailed, failure_of, started_at
from iota.sdk.calls import Calls
from iota.sdk.swarm import Say, Swarm
from iota.swarm import LocalSwarm, SwarmOptions
from iota.upcommand import claim_directory
from subnet.errors import ConfigError, IotaError
from subnet.run.runfile import load_run_file
from subnet.store.disk import atomic_write
from subnet.timing import Deadline

_POLL_S = 0.1
_START_S = 120.0
_END_S = 40.0
_URL = re.compile(r"\bvalidator (http://\S+)")


def local(
    miners: int = 6,
    *,
    directory: str | Path | None = None,
    device: str = "auto",
    detach: bool = False,
    options: SwarmOptions | None = None,
) -> Swarm:
    """Start chain, store, validator and ``miners`` on this machine; returns when the validator answers.

    Without ``directory`` everything is written to a temporary one and deleted with the swarm. The swarm ends with its
    context (``with iota.local() as swarm:``), with ``close()``, or with this process, whatever happens to it; Ctrl-C while
    a run is iterated only stops the iteration. ``detach=True`` leaves it running, as ``iota up`` does, in ``directory``
    (default ``iota-swarm``): the same call again finds it, ``shutdown()`` ends it. ``options``: the rest of what a swarm
    can be told; they don't apply to a detached one.
    """
    if not 1 <= miners <= 200:
        raise ConfigError(f"{miners} miners are not allowed", hint="allowed: 1 to 200")
    if detach:
        if options is not None:
            raise ConfigError("options don't apply to a detached swarm", hint="start one with: iota up")
        return DetachedSwarm(claim_directory(Path(directory or "iota-swarm")), miners, device)
    chosen = options or SwarmOptions(device=device, private=True)
    if directory is not None:
        return OwnSwarm(claim_directory(Path(directory)), miners, chosen, temporary=False)
    made = Path(tempfile.mkdtemp(prefix=TEMPORARY))
    return OwnSwarm(made, miners, dataclasses.replace(chosen, temporary=True), temporary=True)


class OwnSwarm(Swarm):
    """A swarm that lives as long as this object; made by :func:`local`."""

    def __init__(self, directory: Path, miners: int, options: SwarmOptions, *, temporary: bool) -> None:
        self.directory, self._temporary, self._closed = directory, temporary, False
        self._driver = Calls(1)
        self._submitting = threading.Lock()
        self.processes = LocalSwarm(directory, None, miners, options)
        """For experiments: ``kill``, ``add_miner`` and the like; to be used in one thread at a time, see :meth:`driven`."""
        try:
            self._driver.blocking(self.processes.start)
            url = self.processes.validator_url
        except BaseException:
            self._end()
            raise
        atexit.register(self._at_exit)
        super().__init__(
            url,
            wallet="owner",
            wallet_path=directory / "wallets",
            work_dir=directory / "submissions",
            warn=False,
            same_class=True,
            poll_s=0.25,
        )

    def close(self) -> None:
        """End every process of the swarm; a temporary directory goes with them."""
        if not self._closed:
            atexit.unregister(self._at_exit)
            super().close()
            self._end()

    def _at_exit(self) -> None:
        """The interpreter ends and its threads have: what nobody has closed."""
        self.processes.stop()
        if self._temporary:
            shutil.rmtree(self.directory, ignore_errors=True)

    def kill_miner(self, number: int) -> None:
        """``kill -9`` of a miner (0 is the first): to see that nothing is lost."""
        self._driver.blocking(lambda: self.processes.kill(number))

    def add_miner(self) -> int:
        """Register and start one more miner; its number."""
        return self._driver.blocking(self.processes.add_miner)

    def check(self) -> None:
        """Raise what the chain, the store or the validator died of."""
        processes = self.processes
        try:
            self._driver.blocking(lambda: processes.parent.check("chain", "store", processes.leader))
        except IotaError:
            self._temporary = False  # its logs say why
            processes.parent.keep()
            raise

    def detached_words(self, name: str) -> str:
        return (
            f"stopped looking; run {name} goes on until this swarm ends (its context, close(), or this process)."
            f' Look again: swarm.run("{name}"); iota.local(detach=True) leaves a swarm running'
        )

    def _end(self) -> None:
        self._closed = True
        try:
            self._driver.blocking(self.processes.stop)
        finally:
            self._driver.close()
            if self._temporary:
                shutil.rmtree(self.directory, ignore_errors=True)

    def _submit(self, path: Path, deadline: Deadline, say: Say) -> None:
        """In a process that the swarm's warm parent forks: nothing heavy is imported again."""
        config, log = load_run_file(path), self.processes.log_of("submit")
        with self._submitting:
            start = log.stat().st_size if log.exists() else 0
            self._driver.blocking(lambda: self.processes.submit(config))
            while not self._driver.blocking(self._submitted):
                start = _say_new(log, start, say)
                deadline.check("submitting the run")
                time.sleep(_POLL_S)
            _say_new(log, start, say)

    def _submitted(self) -> bool:
        self.processes.parent.poll()
        child = self.processes.parent.children["submit"]
        if child.status not in (None, 0):
            raise failure_of(child)
        return child.status == 0


def _say_new(log: Path, start: int, say: Say) -> int:
    """Say the whole lines behind byte ``start``; where the next begins."""
    if not log.exists():
        return start
    with log.open("rb") as stream:
        stream.seek(start)
        data = stream.read()
    whole = data[: data.rfind(b"\n") + 1]
    for line in whole.decode(errors="replace").splitlines():
        if line.strip() and not line.startswith("error: "):
            say(line)
    return start + len(whole)


class _Mark(msgspec.Struct, frozen=True):
    """``up.json``: which process a detached swarm is."""

    pid: int
    started: int
    url: str


class DetachedSwarm(Swarm):
    """A swarm that goes on when this process ends: ``iota up --stay`` in a session of its own; made by :func:`local`."""

    def __init__(self, directory: Path, miners: int, device: str) -> None:
        self.directory = directory
        self._process: subprocess.Popen[bytes] | None = None
        self._mark = self._running() or self._start(miners, device)
        super().__init__(
            self._mark.url,
            wallet="owner",
            wallet_path=directory / "wallets",
            work_dir=directory / "submissions",
            warn=False,
            same_class=True,
            poll_s=0.25,
        )

    def check(self) -> None:
        """Raise where the swarm's process has ended."""
        if started_at(self._mark.pid) != self._mark.started:
            raise ProcessFailed(f"the swarm in {self.directory} has ended", hint=f"see {self.directory / 'up.log'}")

    def shutdown(self) -> None:
        """End it, and let go of it."""
        if started_at(self._mark.pid) == self._mark.started:
            with suppress(ProcessLookupError):
                os.kill(self._mark.pid, signal.SIGINT)
        deadline = Deadline.after(_END_S)
        while started_at(self._mark.pid) == self._mark.started:
            deadline.check(f"ending the swarm in {self.directory} (process {self._mark.pid})")
            time.sleep(_POLL_S)
        if self._process is not None:
            self._process.wait(_END_S)
        (self.directory / "up.json").unlink(missing_ok=True)
        self.close()

    def _submit(self, path: Path, deadline: Deadline, say: Say) -> None:
        keep_code(load_run_file(path), self.directory)
        super()._submit(path, deadline, say)

    def detached_words(self, name: str) -> str:
        return (
            f'detached; run {name} and the swarm go on. Look again: iota.attach("{self.url}", "{name}");'
            f' end the swarm: iota.local(detach=True, directory="{self.directory}").shutdown()'
        )

    def _running(self) -> _Mark | None:
        try:
            mark = msgspec.json.decode((self.directory / "up.json").read_bytes(), type=_Mark)
        except (FileNotFoundError, msgspec.MsgspecError):
            return None
        return mark if started_at(mark.pid) == mark.started else None

    def _start(self, miners: int, device: str) -> _Mark:
        root = str(Path(iota.__file__).resolve().parent.parent)
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        command = [sys.executable, "-P", "-m", "iota.cli.main", "up", "--stay", "--plain", "--private"]
        command += ["--miners", str(miners)]
        with (self.directory / "up.log").open("wb") as log:
            self._process = subprocess.Popen(
                [*command, "--dir", str(self.directory), "--device", device],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
                start_new_session=True,
            )
        started = started_at(self._process.pid)
        try:
            url = self._url(self._process, Deadline.after(_START_S))
        except BaseException:
            self._process.terminate()
            self._process.wait(_END_S)
            raise
        mark = _Mark(self._process.pid, started or 0, url)
        atomic_write(self.directory / "up.json", msgspec.json.encode(mark))
        return mark

    def _url(self, process: subprocess.Popen[bytes], deadline: Deadline) -> str:
        log = self.directory / "up.log"
        while True:
            text = log.read_text(errors="replace")
            if found := _URL.search(text):
                return found[1]
            if process.poll() is not None:
                raise _ended(text, log)
            deadline.check(f"starting a swarm in {self.directory} (see {log})")
            time.sleep(_POLL_S)


def _ended(text: str, log: Path) -> IotaError:
    lines = [line for line in text.splitlines() if line.strip()]
    return ProcessFailed(f"the swarm ended: {lines[-1] if lines else 'no output'}", hint=f"see {log}")
