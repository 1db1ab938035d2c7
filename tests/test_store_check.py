"""``iota store check`` passes a store that runs can use, and says of another what it lacks and what that means."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from seaweed import BUCKET, KEY, SECRET_KEY, Seaweed
from store_faults import FaultyS3, Handler
from store_worlds import SECRET

from iota.cli.main import main
from iota.store_check import Finding, StoreAddress, check_store
from subnet.store.server import start_store
from subnet.store.signed_urls import load_or_create_secret


@pytest.fixture
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


@pytest.mark.usefixtures("credentials")
def test_a_bucket_that_runs_can_use(seaweed: Seaweed, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["store", "prepare", f"s3://{BUCKET}/checked", "--store.endpoint", seaweed.endpoint]
    assert main(command) == 0
    assert "there already" in capsys.readouterr().out
    command = ["store", "check", f"s3://{BUCKET}/checked", "--store.endpoint", seaweed.endpoint, "--json"]
    assert main(command) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"]
    assert len(answer["checks"]) == 16
    assert [check["name"] for check in answer["checks"] if not check["ok"]] == []


@pytest.mark.usefixtures("credentials")
async def test_what_a_lenient_server_lacks(seaweed: Seaweed) -> None:
    """A proxy that turns refusals into success, as servers that don't check do."""
    proxy = FaultyS3(seaweed.endpoint)

    def lenient() -> Any:
        @web.middleware
        async def border(request: web.Request, handler: Handler) -> web.StreamResponse:
            response = await handler(request)
            return response if response.status not in (400, 403, 412) else web.Response(status=200)

        return border

    proxy._border = lenient  # type: ignore[method-assign]
    await proxy.start()
    try:
        found = by_name(await check_store(StoreAddress(f"s3://{BUCKET}/lenient", proxy.url)))
    finally:
        await proxy.close()
    lacking = {name for name, finding in found.items() if not finding.ok and finding.needed}
    assert {"a late URL is refused", "a key is written once", "a body of another length is refused"} <= lacking
    assert all(finding.means for name, finding in found.items() if name in lacking)
    assert found["ranges are read"].ok


@pytest.mark.usefixtures("credentials")
def test_a_store_that_is_not_there(seaweed: Seaweed, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", "check", "s3://no-such-bucket", "--store.endpoint", seaweed.endpoint]) == 1
    said = capsys.readouterr().out
    assert "LACKS" in said
    assert main(["store", "check", "s3://x"]) == 2
    assert main(["store", "check", "http://127.0.0.1:1", "--store.secret", "/nowhere"]) == 2


async def test_an_embedded_store(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    listener = await start_store(tmp_path / "store", "127.0.0.1", 0, load_or_create_secret(secret), 1 << 20)
    try:
        findings = await check_store(StoreAddress(listener.url, secret=secret))
        assert [finding.name for finding in findings if not finding.ok] == []
        assert len(findings) == 9
    finally:
        await listener.close()
    other = await start_store(tmp_path / "other", "127.0.0.1", 0, SECRET, 1 << 20)
    try:
        findings = await check_store(StoreAddress(other.url, secret=secret))
        assert [finding.ok for finding in findings] == [False], "nothing else is tried with a wrong secret"
    finally:
        await other.close()
