"""A coordinator of :mod:`audit_fold_cases`' run without journal, network or clock: what it decides about audits, and an auditor
whose results a test makes up."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from audit_fold_cases import PROBATION, Fold

from subnet.audit.case import Findings, RedonePartial
from subnet.run import events as ev
from subnet.run.config import AuditSection
from subnet.words import Member, Want
from validator.decide_audits import decide_audits
from validator.decision import Accused, AuditResult, RunAppeal, RunAudit
from validator.policy import AuditPolicy, Policy
from validator.watch import Watch

AUDITS = AuditPolicy(
    evidence_tries=2,
    again_s=1.0,
    witness_s=10.0,
    witnesses_max=3,
    fault_after_items=100,
    unopened_max=2,
    lost_max=2,
    at_once=2,
    redo_at_once=1,
    follower_s=5.0,
    follower_at_once=1,
    block_margin=2,
)


class Desk(Fold):
    """``settle`` carries out what is decided; audits to be run are in ``runs``."""

    def __init__(self, audit: AuditSection = PROBATION, policy: AuditPolicy = AUDITS, **options: object) -> None:
        self.watch, self.policy, self.now = Watch(), Policy(audit=policy), 0.0
        self.runs: list[int] = []
        self.appeals: list[int] = []
        super().__init__(audit, **options)  # type: ignore[arg-type]

    def emit(self, *events: ev.AnyEvent) -> None:
        for event in events:
            self.watch.audits.ledger.note(self.state, event)
            super().emit(event)

    def settle(self) -> list[tuple[object, str]]:
        """What was decided, with the code of its reason, until there is nothing more to decide."""
        said: list[tuple[object, str]] = []
        for _ in range(100):
            decisions = decide_audits(self.now, self.state, self.watch, self.policy)
            if not decisions:
                return said
            for decision in decisions:
                said.append((decision.what, decision.reason.code))
                if isinstance(decision.what, RunAudit):
                    self.runs.append(decision.what.audit)
                elif isinstance(decision.what, RunAppeal):
                    self.appeals.append(decision.what.case)
                else:
                    self.emit(decision.what)  # type: ignore[arg-type]
        raise AssertionError("decides for ever")

    def kinds(self) -> list[str]:
        return [type(what).__name__ for what, _ in self.settle()]

    def codes(self) -> list[str]:
        return [code for _, code in self.settle()]

    def restart(self) -> None:
        """Another process of the same validator: it has the journal, and nothing else."""
        before, self.watch = self.watch.audits, Watch()
        self.watch.audits.ledger.load(before.ledger.dump())
        self.watch.audits.block, self.watch.audits.block_hashes = before.block, dict(before.block_hashes)
        self.runs.clear()

    # --- the auditor

    def found(
        self,
        audit: int,
        *,
        wrong: Sequence[Member] = (),
        missing: Sequence[Want] = (),
        lacking: Sequence[Member] = (),
        repeated: bool = True,
    ) -> list[tuple[object, str]]:
        """Its result: all right but ``wrong``; of ``lacking`` inputs are missing. Then what is decided."""
        opened = self.state.audits.open[audit]
        redone = tuple(
            RedonePartial(member, (), (), (), ("wrong",) if member in wrong else ())
            for member in opened.members
            if member not in lacking
        )
        findings = Findings("true", redone, None, (), 0.0, 0.0, 0) if redone else None
        accused = tuple(Accused(member, "partial", f"bundle-{member.hotkey}", "true", "claim") for member in wrong)
        self.finish(AuditResult(audit, findings, repeated, accused if repeated else (), tuple(missing)))
        return self.settle()

    def finish(self, result: AuditResult) -> None:
        self.watch.audits.results[result.audit] = result
        self.watch.done(RunAudit(result.audit))

    # --- the chain

    def blocks(self, newest: int) -> None:
        """The chain has come so far; of every block the hash is known."""
        known = self.watch.audits
        known.block = newest
        known.block_hashes |= {number: f"hash-{number}" for number in range(newest + 1)}

    def to_manifests(self) -> int:
        """A step up to where its seals wait for audits alone."""
        step = self.plan()
        self.update()
        self.work(step)
        self.merged(step)
        return step


def with_rate(rate: float, **options: object) -> AuditSection:
    return msgspec.structs.replace(PROBATION, rate=rate, **options)
