"""Small things that keep a process well for long: kept connections, rations, a store looked at while idle, nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from iota.forkserver import TEMPORARY
from miner.heartbeat import Line
from subnet.errors import Unreachable
from subnet.store import disk
from subnet.timing import ManualClock
from validator.ops.idle_store import IdleStore
from validator.ops.problems import Look, problems
from validator.ration import Ration, Rationed

ROOT = Path(__file__).resolve().parent.parent


class Heard(ThreadingHTTPServer):
    """Counts connections; ``closes``: as a server does that keeps none, ``drops``: closes without a word after each answer."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, port: int = 0, *, closes: bool = False, drops: bool = False) -> None:
        self.connections, self.bodies = 0, list[bytes]()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                outer.connections += 1
                super().setup()

            def do_POST(self) -> None:
                outer.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(200)
                self.send_header("Content-Length", "2")
                if closes:
                    self.send_header("Connection", "close")
                self.end_headers()
                self.wfile.write(b"ok")
                if drops:
                    self.close_connection = True

            def log_message(self, format: str, *args: object) -> None:
                return

        super().__init__(("127.0.0.1", port), Handler)
        self.thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    def end(self) -> None:
        self.shutdown()
        self.thread.join()
        self.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@pytest.fixture
def line() -> Iterator[Line]:
    line = Line()
    yield line
    line.close()


def beats(line: Line, url: str, count: int) -> tuple[list[bool], list[int]]:
    """Answered?, and how many requests each took to make."""
    made: list[int] = []
    answered: list[bool] = []
    for i in range(count):
        tries: list[int] = []

        def request(i: int = i, tries: list[int] = tries) -> tuple[bytes, dict[str, str]]:
            tries.append(1)
            return f"beat {i}.{len(tries)}".encode(), {}

        answered.append(line.post(url, "/v1/heartbeat", request))
        made.append(len(tries))
    return answered, made


@pytest.mark.parametrize(("closes", "drops", "connections"), [(False, False, 1), (True, False, 5), (False, True, 5)])
def test_heartbeats_share_a_connection_where_it_is_kept(
    line: Line, closes: bool, drops: bool, connections: int
) -> None:
    server = Heard(closes=closes, drops=drops)
    try:
        answered, made = beats(line, server.url, 5)
        assert all(answered)
        assert len(server.bodies) == 5
        assert server.connections == connections
        assert max(made) == (2 if drops else 1)  # what is sent again is made again: a signature counts once
    finally:
        line.close()
        server.end()


def test_a_heartbeat_that_nobody_answers_says_so_and_the_next_may_be_answered(line: Line) -> None:
    server = Heard()
    url = server.url
    server.end()
    assert beats(line, url, 2) == ([False, False], [1, 1])
    server = Heard(int(url.rsplit(":", 1)[1]))
    try:
        assert beats(line, url, 2)[0] == [True, True]
    finally:
        line.close()
        server.end()


def test_a_ration_is_shared_and_says_when_there_is_more() -> None:
    clock = ManualClock()
    ration = Ration("steps", 10.0, 100.0, free=5.0, clock=clock)
    ration.take(100.0)
    for _ in range(1000):
        ration.take(5.0)  # what is little is never refused
    with pytest.raises(Rationed) as refused:
        ration.take(50.0)
    assert refused.value.retry_after_s == pytest.approx(5.1, abs=0.1)
    assert (refused.value.code, refused.value.http_status) == ("rate_limited", 429)
    clock.advance(5.2)
    ration.take(50.0)
    clock.advance(1e6)
    ration.take(1e9)  # as much as there can be
    with pytest.raises(Rationed):
        ration.take(6.0)


async def test_the_store_is_looked_at_while_no_run_is_active() -> None:
    away, active, asked = [True], [False], [0]

    async def probe() -> None:
        asked[0] += 1
        if away[0]:
            raise Unreachable("nobody listens")

    idle = IdleStore(probe, lambda: active[0])
    await idle.look()
    assert idle.trouble == "unreachable: nobody listens"
    look = Look(leads=True, hotkey="5Own", started_s_ago=1.0, metagraph_age_s=0.0, store_trouble=idle.trouble)
    assert [(problem.code, problem.blocks) for problem in problems(look)] == [("store", True)]
    away[0] = False
    await idle.look()
    assert idle.trouble == ""
    away[0], active[0] = True, True
    await idle.look()
    assert (idle.trouble, asked[0]) == ("", 2)


def test_a_journal_that_cannot_be_written_is_a_problem_that_blocks() -> None:
    look = Look(
        leads=True, hotkey="5Own", started_s_ago=1.0, metagraph_age_s=0.0, journal_trouble="journal x can't be written"
    )
    assert [(problem.code, problem.blocks) for problem in problems(look)] == [("journal", True)]


STARTS = """
    import sys, time
    from pathlib import Path
    from iota.processes import ForkServer
    directory = Path(sys.argv[1])
    server = ForkServer(directory / "logs", remove=directory)
    if sys.argv[2] == "keep":
        server.keep()
    print("up", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize(("number", "keep"), [(signal.SIGTERM, ""), (signal.SIGKILL, ""), (signal.SIGTERM, "keep")])
def test_a_temporary_swarm_leaves_no_directory_however_its_owner_ends(number: int, keep: str) -> None:
    directory = Path(tempfile.mkdtemp(prefix=TEMPORARY))
    command = [sys.executable, "-c", textwrap.dedent(STARTS), str(directory), keep]
    owner = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        with owner.stdout as out:
            assert out.readline() == "up\n"
            children = [int(pid) for pid in Path(f"/proc/{owner.pid}/task/{owner.pid}/children").read_text().split()]
            assert children
            if keep:
                time.sleep(1.0)  # the line is read
            os.kill(owner.pid, number)
            owner.wait(20)
        deadline_s = time.monotonic() + 30
        while any(Path(f"/proc/{pid}").exists() for pid in children):
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        assert directory.exists() == bool(keep)
    finally:
        owner.kill()
        owner.wait(20)
        if directory.exists():
            for path in sorted(directory.rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()
            directory.rmdir()


def test_files_are_on_the_disk_before_their_directory_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))  # noqa: PTH115, PTH119
        real(descriptor)

    monkeypatch.setattr(disk.os, "fsync", fsync)
    (tmp_path / "made").mkdir()
    for name in ("b", "a"):
        (tmp_path / "made" / name).write_text(name)
    disk.sync_files(tmp_path / "made")
    assert synced == ["a", "b", "made"]
