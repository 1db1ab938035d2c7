"""``owed_evidence``: what a member owes the open audits and cases: boundaries it holds, word of those it has lost, a run of a
bundle. Pure; owed whatever state the member is at, and until the fold shows that the audit is over.
"""

from __future__ import annotations

from miner.local_view import BoundaryKey, LocalView
from miner.owes import Owe, Report, RunWitness, StoreEvidence
from subnet.protocol import messages as msg
from subnet.protocol.claims import LIMIT_WANTS
from subnet.run.audits import open_audits, witness_wanted
from subnet.run.state import RunState
from subnet.words import Member, Want


def owed_evidence(state: RunState, me: Member, local: LocalView, owes: list[Owe]) -> None:
    """Of all open audits, the oldest first; and of the cases that I am asked about."""
    owes.extend(openings(state, local))
    for number, audit in open_audits(state):
        lost = tuple(want for want in audit.wants if _is_lost(key_of(audit.step, want), want, local))
        for first in range(0, len(lost), LIMIT_WANTS):
            owes.append(Report(msg.NotHeldClaim(number, lost[first : first + LIMIT_WANTS])))
    for case, bundle in witness_wanted(state, me):
        if case in local.witnessed:
            owes.append(Report(msg.WitnessClaim(case, local.witnessed[case])))
        elif case in local.unwitnessed:
            owes.append(Report(msg.WitnessClaim(case, "", local.unwitnessed[case])))
        else:
            owes.append(RunWitness(case, bundle))


def openings(state: RunState, local: LocalView) -> list[StoreEvidence]:
    """What is held and wanted, once for each audit; whoever holds it may give it, a member or not."""
    found: list[StoreEvidence] = []
    for number, audit in open_audits(state):
        for want in audit.wants:
            key = key_of(audit.step, want)
            if local.kept.get(key) != want.hash or (number, want.hash) in local.opened:
                continue
            if key in local.in_store and local.boundaries.get(key) == want.hash:
                continue  # it went through the store in the open step, and is there
            own = local.produced.get(key) == want.hash
            found.append(StoreEvidence(number, key, want.hash, own=own, before_seal=audit.number > 0))
    return found


def _is_lost(key: BoundaryKey, want: Want, local: LocalView) -> bool:
    """Whether I have made it in this incarnation, and have it no more."""
    return local.produced.get(key) == want.hash and local.kept.get(key) != want.hash


def key_of(step: int, want: Want) -> BoundaryKey:
    return BoundaryKey(step, want.microbatch, want.stage, want.backward)
