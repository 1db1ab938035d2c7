"""A warm parent: imports the heavy libraries once, stays single-threaded, and forks the processes of a local swarm on demand.

Run as ``python -m iota.forkserver [--remove DIR]``; talks JSON lines on stdin and stdout. End-of-file on stdin ends every child
(SIGTERM, then SIGKILL after a grace), so nothing outlives the process that started it, even if that one was killed. A temporary
directory is removed then, unless a line ``{"keep": true}`` came before.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import select
import signal
import sys
import time
from typing import Any

GRACE_S = 10.0
TEMPORARY = "iota-swarm-"
"""How the name of a swarm's temporary directory begins."""
_PR_SET_PDEATHSIG = 1
LIGHT = ("chain", "store", "validator")
"""Entries that need no torch: they may start before the heavy imports are done."""


LIGHT_MODULES = ("iota.entries", "subnet.chain.local_server", "subnet.store.server", "validator.serve")
HEAVY_MODULES = (
    "torch",
    "transformers.models.llama.modeling_llama",
    "transformers.masking_utils",
    "iota.submit",
    "iota.plan",
    "subnet.model.hardware_class",
    "miner.start",
    "miner.node",
    "subnet.engine.stage_executor",
)


def load(modules: tuple[str, ...]) -> None:
    """Import what the processes will need; it creates no thread (this process forks)."""
    for name in modules:
        importlib.import_module(name)


def warm_up() -> None:
    """Import what every miner and the submitter need."""
    load(HEAVY_MODULES)
    sys.modules["torch"].set_num_threads(1)
    gc.freeze()  # the children then share these pages for longer


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _child(entry: str, settings: dict[str, Any], log: str) -> int:
    os.setpgid(0, 0)
    _die_with_parent()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    with open(os.devnull, "rb") as null, open(log, "ab", buffering=0) as out:  # noqa: PTH123
        os.dup2(null.fileno(), 0)
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    from iota.entries import run_entry

    return run_entry(entry, settings)


def _fork(request: dict[str, Any]) -> int:
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        code = _child(request["entry"], request["settings"], request["log"])
    except BaseException:  # noqa: BLE001 - the traceback goes to the child's log, the code to the parent
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _say(**fields: Any) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def _reap(children: set[int]) -> None:
    for pid in list(children):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            children.discard(pid)
            _say(exited=pid, status=os.waitstatus_to_exitcode(status))


def _end(children: set[int]) -> None:
    for number, wait_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, GRACE_S)):
        for pid in children:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue
        deadline = time.monotonic() + wait_s
        while children and time.monotonic() < deadline:
            for pid in list(children):
                if os.waitpid(pid, os.WNOHANG)[0]:
                    children.discard(pid)
            time.sleep(0.02)


def _remove(directory: str) -> None:
    """Of a swarm that was made in a temporary directory, by its name; anything else stays."""
    if os.path.basename(directory).startswith(TEMPORARY):  # noqa: PTH119 - pathlib isn't imported here
        import shutil

        shutil.rmtree(directory, ignore_errors=True)


def _ended(number: int, frame: object) -> None:
    """The process that started this one has ended, without a word."""
    raise SystemExit(128 + number)


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _ended)
    _die_with_parent()
    directory = sys.argv[2] if sys.argv[1:2] == ["--remove"] else ""
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
    load(LIGHT_MODULES)
    children: set[int] = set()
    waiting: list[dict[str, Any]] = []
    warm = False
    pending = b""
    open_input = True
    try:
        while open_input:
            timeout_s = 0.05 if children or waiting else 0.5
            if select.select([0], [], [], 0 if not warm and waiting else timeout_s)[0]:
                chunk = os.read(0, 1 << 16)
                open_input = bool(chunk)
                *lines, pending = (pending + chunk).split(b"\n")
                for line in lines:
                    request = json.loads(line)
                    if "keep" in request:
                        directory = ""
                        continue
                    if request["entry"] in LIGHT or warm:
                        pid = _fork(request)
                        children.add(pid)
                        _say(id=request["id"], pid=pid)
                    else:
                        waiting.append(request)
            elif waiting and not warm:
                warm_up()
                warm = True
                _say(warm=True)
            for request in waiting if warm else ():
                pid = _fork(request)
                children.add(pid)
                _say(id=request["id"], pid=pid)
            if warm:
                waiting.clear()
            _reap(children)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _end(children)
        if directory:
            _remove(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
