"""A store, a worker and a runner that audits the case it is given: what tests of the runner share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from audit_cases import LiveRun

from subnet.audit import build
from subnet.audit.bundle import read_bundle
from subnet.audit.case import Case, Findings
from subnet.errors import IotaError
from subnet.protocol.signing import Signer
from subnet.run.audits import OpenAudit
from subnet.run.state import RunState, new_state
from subnet.store.base import Hold, OwnerStore
from subnet.timing import SYSTEM_CLOCK, Deadline
from validator.audit_runner import AuditRunner, Replayer
from validator.decision import AuditResult
from validator.watch import Watch

SIGNERS = [Signer.from_uri("//Ann"), Signer.from_uri("//Ben")]
STEP, STAGE = 1, 0
EVIDENCE_S = 2.0


class Bench(AuditRunner):
    """Audits the case it is given."""

    case_of: Callable[[], Case | None]

    def _case(self, opened: OpenAudit, state: RunState) -> Case | None:
        return self.case_of()


class World:
    """A store, a worker, and a runner that audits :attr:`case`."""

    def __init__(self, live: LiveRun, store: OwnerStore, directory: Path, replayer: Replayer) -> None:
        self.live, self.store, self.directory, self.replayer = live, store, directory, replayer
        self.watch = Watch()
        self.reports: list[bytes] = []
        self.case: Case | None = live.case(STEP, STAGE)
        self.runner = self.new_runner(replayer)

    def new_runner(self, replayer: Replayer, disk_bytes: int = 1 << 30) -> Bench:
        name = f"audits-{len(list(self.directory.iterdir()))}" if self.directory.exists() else "audits"
        runner = Bench(
            "audited",
            self.store,
            self.directory / name,
            replayer,
            lambda hotkey, first, end: list(self.reports),
            disk_bytes=disk_bytes,
        )
        runner.case_of = lambda: self.case
        runner.bind(self.watch, SYSTEM_CLOCK, EVIDENCE_S)
        return runner

    async def put(self, hashes: Sequence[str] | None = None, retention: str = "evidence") -> None:
        """These blobs of the run, or all."""
        for blob in self.live.blobs if hashes is None else hashes:
            await self.store.put_blob(self.live.blobs[blob], Hold(retention, "audited", 1), deadline=Deadline.after(30))

    async def audit(self, audit: int = 1, runner: AuditRunner | None = None) -> AuditResult | None:
        return await (runner or self.runner).redo(audit, self.opened(), new_state())

    def opened(self) -> OpenAudit:
        return OpenAudit(STEP, STAGE, 0, tuple(self.live.members), "leader")

    def boundaries(self) -> list[str]:
        assert self.case is not None
        return [want.hash for want in build.wants_of(self.case)]


class Scripted:
    """A worker that answers what it is told."""

    def __init__(self, *answers: Findings | IotaError) -> None:
        self.held = dict[int, int]()
        self.answers = list(answers)
        self.fresh: list[bool] = []

    async def run(self, directory: Path, deadline: Deadline, *, fresh: bool = False) -> Findings:
        read_bundle(directory)  # it is whole
        self.fresh.append(fresh)
        answer = self.answers.pop(0)
        if isinstance(answer, IotaError):
            raise answer
        return answer

    async def close(self) -> None: ...
