"""Whether a store does what runs need of it, found out by doing it: each thing on its own, with what its lack would mean.

Works in a prefix of its own, with a random name, and removes it afterwards; a bucket's lifecycle rules are set and set back.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from subnet.errors import IotaError
from subnet.timing import Deadline

CHECK_S = 60.0
"""All tries of one check."""


class Lacking(Exception):
    """The store did something else than what is needed."""


@dataclass(frozen=True)
class Check:
    name: str
    work: Callable[[Deadline], Awaitable[str]]
    means: str
    """What follows when it is lacking."""
    needed: bool = True


@dataclass(frozen=True)
class Finding:
    name: str
    ok: bool
    needed: bool
    said: str
    means: str = ""
    """Empty where nothing is lacking."""


@dataclass(frozen=True)
class StoreAddress:
    url: str
    endpoint: str = ""
    region: str = ""
    credentials: Path | None = None
    secret: Path = Path("~/.iota/store/secret")


async def expect(work: Awaitable[object], *kinds: type[IotaError], codes: Sequence[str] = ()) -> str:
    """The store must refuse this, as one of ``kinds`` or with one of ``codes``."""
    try:
        await work
    except IotaError as error:
        if isinstance(error, kinds) or error.code in codes:
            return f"refused: {error.code}"
        raise Lacking(f"refused, but as {error.code}: {error.reason}") from error
    raise Lacking("accepted")


def same(found: bytearray | bytes, expected: bytes) -> None:
    if bytes(found) != expected:
        raise Lacking(f"{len(found)} other bytes came back")


async def find_out(checks: Sequence[Check]) -> list[Finding]:
    """One after the other; if the first fails nothing else is tried."""
    found: list[Finding] = []
    for check in checks:
        deadline = Deadline.after(CHECK_S)
        try:
            async with deadline.limit(check.name):
                said = await check.work(deadline)
            found.append(Finding(check.name, True, check.needed, said))
        except (Lacking, IotaError) as error:
            found.append(Finding(check.name, False, check.needed, str(error), check.means))
            if len(found) == 1:
                break
    return found


async def check_store(address: StoreAddress) -> list[Finding]:
    from subnet.store.s3_place import S3Place, S3Signer, find_credentials, is_s3

    trial = f"iota-check-{secrets.token_hex(6)}"
    if is_s3(address.url):
        from iota.store_check_s3 import S3Trial

        place = S3Place.parse(address.url, endpoint=address.endpoint, region=address.region)
        credentials = await asyncio.to_thread(find_credentials, address.credentials)
        async with S3Trial(S3Signer(place, credentials), trial) as s3:
            return await find_out(s3.checks())
    from iota.store_check_embedded import EmbeddedTrial

    async with EmbeddedTrial(address.url, address.secret.expanduser(), trial) as embedded:
        return await find_out(embedded.checks())


def report(findings: Sequence[Finding], *, as_json: bool) -> int:
    """Print them; exit status 1 where something needed is lacking."""
    lacking = [finding for finding in findings if not finding.ok and finding.needed]
    if as_json:
        print(json.dumps({"ok": not lacking, "checks": [asdict(finding) for finding in findings]}))
        return 1 if lacking else 0
    table = Table(box=None)
    for name in ("", "what runs need", "the store", "what that means"):
        table.add_column(name)
    for finding in findings:
        mark = "ok" if finding.ok else "LACKS" if finding.needed else "lacks"
        table.add_row(mark, finding.name, finding.said, finding.means)
    console = Console()
    console.print(table)
    console.print(f"{len(lacking)} things that runs need are lacking" if lacking else "runs can use this store")
    return 1 if lacking else 0


def store_check(address: StoreAddress, *, as_json: bool) -> int:
    """The command ``iota store check``."""
    return report(asyncio.run(check_store(address)), as_json=as_json)
