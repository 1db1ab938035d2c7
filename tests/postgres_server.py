"""A PostgreSQL server of the system's package on loopback, for a test session: its own data, its own port, no privileges."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

WITHIN_S = 60
PASSWORD = "not-to-be-seen"


def programs() -> Path | None:
    """Where initdb and pg_ctl are: Debian keeps them out of PATH."""
    found = shutil.which("pg_ctl")
    folders = [Path(found).parent] if found else []
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((folder for folder in folders if (folder / "initdb").exists() and (folder / "postgres").exists()), None)


def unprivileged() -> str | None:
    """PostgreSQL refuses to run as root: another user then, None for ourselves."""
    if os.geteuid() != 0:
        return None
    names = {entry.pw_name for entry in pwd.getpwall()}
    return "postgres" if "postgres" in names else "nobody"


class Server:
    def __init__(self, folder: Path, bin_: Path) -> None:
        self.folder, self._bin, self._user = folder, bin_, unprivileged()
        self.data, self.log = folder / "data", folder / "log"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        if self._user is not None:
            account = pwd.getpwnam(self._user)
            os.chown(folder, account.pw_uid, account.pw_gid)
        password = folder / "password"
        password.write_text(PASSWORD)
        password.chmod(0o644)
        self._run("initdb", "-D", self.data, "-U", "iota", "-A", "scram-sha-256", f"--pwfile={password}", "-E", "UTF8")

    def _run(self, program: str, *arguments: object) -> None:
        command = [str(self._bin / program), *map(str, arguments)]
        done = subprocess.run(
            command,
            user=self._user,
            cwd=self.folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=WITHIN_S,
        )
        assert done.returncode == 0, (command, done.stderr.decode()[-2000:])

    def start(self, *more: str) -> None:
        options = " ".join(
            ("-c listen_addresses=127.0.0.1", f"-c port={self.port}", "-c unix_socket_directories=", *more)
        )
        self._run("pg_ctl", "start", "-w", "-t", WITHIN_S, "-D", self.data, "-l", self.log, "-o", options)

    def stop(self, mode: str = "immediate") -> None:
        """``immediate``: as a crash does."""
        self._run("pg_ctl", "stop", "-w", "-t", WITHIN_S, "-m", mode, "-D", self.data)

    def url(self, database: str = "postgres", password: str = PASSWORD) -> str:
        return f"postgresql://iota:{password}@127.0.0.1:{self.port}/{database}"

    def new_database(self, name: str) -> str:
        import psycopg

        with psycopg.connect(self.url(), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}".encode())
        return self.url(name)


@pytest.fixture(scope="session")
def postgres() -> Iterator[Server]:
    pytest.importorskip("psycopg", reason="the extra postgres isn't installed")
    bin_ = programs()
    if bin_ is None:
        pytest.skip("no PostgreSQL server is installed (Debian: apt-get install postgresql)")
    with tempfile.TemporaryDirectory(
        prefix="iota-postgres-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None
    ) as name:
        folder = Path(name)
        folder.chmod(0o755)
        server = Server(folder, bin_)
        server.start()
        try:
            yield server
        finally:
            server.stop("fast")
