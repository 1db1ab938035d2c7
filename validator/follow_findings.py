"""What this validator found wrong, as files: each accusation signed, beside the bundle that anyone can replay.

Implements the shelf of :class:`validator.audit_runner.AuditRunner` in a directory of its own instead of the store: a follower
needs no right to write there. ``DIR/findings/HASH`` is a bundle (``iota audit replay DIR/findings/HASH``).
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec

from subnet.audit.bundle import BLOBS_NAME, CASE_NAME
from subnet.audit.case import LIMIT_CASE_BYTES, Case
from subnet.protocol import wire
from subnet.protocol.signing import Signer, sign_statement, verify_statement
from subnet.store.base import OwnerStore, check_blob
from subnet.store.disk import atomic_write
from subnet.timing import Deadline
from subnet.words import Member
from validator.audit_cases import CaseShelf
from validator.audit_evidence import Bundle

SignedHead = tuple[int, str, str, bytes]
"""(records, head, leader's hotkey, its signature)."""
PURPOSE = "accusation/1"
NAME = "accusation.msgpack"


class Accusation(msgspec.Struct, frozen=True):
    """``hotkey`` says that its replay of the bundle gave ``digest`` and not what ``member`` had claimed."""

    run_id: str
    step: int
    stage: int
    member: Member
    charge: str
    bundle: str
    digest: str
    hotkey: str
    journal: SignedHead | None = None
    """The head of the journal that the bundle's claims are from: its leader can't say that it told something else."""
    signature: bytes = b""

    def signed(self, signer: Signer) -> Accusation:
        bare = msgspec.structs.replace(self, signature=b"")
        return msgspec.structs.replace(self, signature=sign_statement(signer, PURPOSE, wire.encode(bare)))

    @property
    def is_signed(self) -> bool:
        bare = msgspec.structs.replace(self, signature=b"")
        return verify_statement(self.hotkey, PURPOSE, wire.encode(bare), self.signature)


class FindingsShelf(CaseShelf):
    """Own cases are kept here; those of others are read from the store."""

    def __init__(
        self, store: OwnerStore, run_id: str, directory: Path, journal: Callable[[], SignedHead | None]
    ) -> None:
        super().__init__(store, run_id)
        self.directory, self._journal = directory / "findings", journal

    async def keep(self, case: Case, bundle: Bundle, deadline: Deadline) -> str:
        """A copy of the bundle; returns its name in :attr:`directory`."""
        data = wire.encode(case)
        name = wire.blob_hash(data)
        async with deadline.limit("keeping the bundle of a finding"):
            await asyncio.to_thread(_copy, bundle, data, self.directory / name)
        return name

    async def case(self, bundle: str, deadline: Deadline) -> Case:
        own = self.directory / check_blob(bundle) / CASE_NAME
        if own.exists():
            return wire.decode(own.read_bytes(), Case, limit_bytes=LIMIT_CASE_BYTES, what=str(own))
        return await super().case(bundle, deadline)

    def accuse(self, accusation: Accusation, signer: Signer) -> Path:
        """Signed, with the head of the journal, beside the bundle."""
        path = self.directory / check_blob(accusation.bundle) / NAME
        accusation = msgspec.structs.replace(accusation, journal=self._journal())
        atomic_write(path, wire.encode(accusation.signed(signer)))
        return path


def _copy(bundle: Bundle, case: bytes, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    (target / BLOBS_NAME).mkdir(parents=True)
    for blob in bundle.sizes:
        atomic_write(target / BLOBS_NAME / blob, bundle.read(blob))
    atomic_write(target / CASE_NAME, case)
