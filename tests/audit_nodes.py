"""A coordinator and members of the audit schedules: the production's rules and ledger, a toy auditor, and liars that nobody but
an audit finds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import audit_toy
import msgspec
import schedule_nodes
import schedule_toy as toy
from schedule_miner import Miner
from schedule_nodes import Coordinator

from miner.local_view import BoundaryKey
from miner.owes import Commit, Compute, Fingerprint, MakeSnapshot, Reduce, RunWitness, StoreEvidence, StoreUnusable
from miner.ways import receipted_hash
from subnet.audit import build
from subnet.audit.case import root_digest
from subnet.errors import NotFound
from subnet.protocol import messages as msg
from subnet.run import apply as folding
from subnet.run import events as ev
from subnet.run import state as st
from subnet.words import CALIBRATION_STEP, Member
from validator import decide as deciding
from validator.decision import FinishRun, JudgeBoundary, RootResult, RunAppeal, RunAudit, RunRoots
from validator.policy import AuditPolicy

if TYPE_CHECKING:
    from audit_sim import AuditSim

AUDIT_LIES = [
    "sum",
    "zero",
    "fwd",
    "bwd",
    "loss",
    "collude",
    "stale",
    "refuse",
    "sender",
    "false",
    "claims",
    "witness",
    "owner",
    "fp",
    "fickle",
    "forgets",
    "nan",
    "alarm",
    "deaf",
    "root",
]
"""Wrong sums, outputs and losses with consistent fingerprints; an owner that covers its lie with its own fingerprint; a
state that isn't updated; evidence refused; something else sent than receipted; a receipt of what was never made; false
claims of that; false witness; two that a trace finds; another output each time; evidence that is said to be lost; outputs
that are no numbers; boundaries called unusable, or missing, that aren't; another state root than its state has."""

AUDIT_POLICY = AuditPolicy(
    evidence_s=3,
    evidence_tries=2,
    again_s=0.5,
    witness_s=3,
    fault_after_items=30,
    follower_s=2,
    quarantine_retry_s=1,
    block_margin=1,
)
LOSING = msgspec.structs.replace(schedule_nodes.POLICY, audit=msgspec.structs.replace(AUDIT_POLICY, lost_max=1000))
"""Where honest members lose evidence."""
POLICY = msgspec.structs.replace(schedule_nodes.POLICY, audit=AUDIT_POLICY)


class AuditCoordinator(Coordinator):
    """With a ledger, a chain, and an auditor that takes its time."""

    sim: AuditSim

    def __init__(
        self, sim: AuditSim, journal: list[ev.Record], term: int, acknowledged: int, num_segments: int
    ) -> None:
        super().__init__(sim, journal, term, acknowledged, num_segments)
        self.policy = LOSING if sim.losses else POLICY
        state = st.new_state()
        for record in journal:
            self.watch.audits.ledger.note(state, record.event)
            folding.apply(state, record.event)
        self.auditing: list[tuple[RunAudit, Any, float]] = []
        self.looks: dict[RunAudit, int] = {}

    def emit(self, event: ev.AnyEvent) -> None:
        self.watch.audits.ledger.note(self.state, event)
        super().emit(event)

    def tick(self, late: bool = False) -> None:
        known = self.watch.audits
        known.proves = self._proves
        known.block = int(self.now)
        for closed in self.state.audits.windows.values():
            if closed.block <= known.block:
                known.block_hashes[closed.block] = toy.name(("block", self.sim.seed, closed.block))
        if self.core.may_speak:
            for entry in list(self.auditing):
                self._redo(*entry)
        super().tick(late)

    def _proves(self, state: st.RunState, made: st.Item, maker_stage: int, claim: msg.MismatchClaim) -> bool:
        key = BoundaryKey(claim.step, claim.microbatch, maker_stage, claim.backward)
        signed = (made.member, key, claim.generation, claim.used) in self.sim.signed
        return bool(claim.signature) and claim.generation == made.generation and signed

    def _carry_out(self, what: ev.AnyEvent | deciding.Action) -> None:
        if isinstance(what, RunAudit):
            self._begin(what)
        elif isinstance(what, RunAppeal):
            self.watch.done(what)
        elif isinstance(what, RunRoots):
            self._look_at_roots(what)
        elif isinstance(what, JudgeBoundary):
            self.watch.audits.judged[what.hash] = self.sim.store.get(what.hash) is audit_toy.NO_NUMBERS
            self.watch.done(what)
        elif isinstance(what, FinishRun) and what.step != self.state.next_step:
            self.watch.failed(what)
        else:
            super()._carry_out(what)

    def _begin(self, action: RunAudit) -> None:
        """The case is made now; what it wants may still be on its way."""
        try:
            case = audit_toy.case_of(self.state, self.watch.audits.ledger, action.audit)
        except NotFound:
            self._found(action, audit_toy.AuditResult(action.audit, None, trouble="the evidence is gone"))
            return
        if case is None:
            self.postponed.append(action)
        else:
            self.auditing.append((action, case, self.now))

    def _look_at_roots(self, action: RunRoots) -> None:
        if not self.sim.answers(self):
            self.postponed.append(action)
            return
        case = build.root_case(self.state, self.watch.audits.ledger, action.stage)
        try:
            root, accused = audit_toy.roots_of(case, self.sim.store)
        except audit_toy.Distrusted:
            root, accused = "", ()
        self.watch.audits.roots[action.version, action.stage] = RootResult(action.version, action.stage, root, accused)
        self.watch.done(action)

    def _redo(self, action: RunAudit, case: Any, since: float) -> None:
        sim, known = self.sim, self.watch.audits
        if action.audit not in self.state.audits.open:
            self.auditing.remove((action, case, since))
            self.watch.done(action)
            return
        if not sim.answers(self) or (sim.chaos and sim.rng.random() < 0.5):
            return
        self.looks[action] = self.looks.get(action, 0) + 1
        if self.looks[action] <= sim.audit_ticks:
            sim.progress = True
            return
        del self.looks[action]
        lacking = audit_toy.missing_of(case, sim.store)
        lost = all((action.audit, want) in known.not_held for want in lacking)
        if lacking and not lost and self.now - since < AUDIT_POLICY.evidence_s:
            return
        self.auditing.remove((action, case, since))
        sim.progress = True
        try:
            result = audit_toy.result_of(action.audit, case, sim.store)
        except audit_toy.Distrusted:
            self.watch.failed(action)
            return
        self._found(action, result)

    def _found(self, action: RunAudit, result: Any) -> None:
        self.watch.audits.results[action.audit] = result
        self.watch.done(action)


class AuditMiner(Miner):
    """A liar lies in its share of the steps, from some step on."""

    sim: AuditSim

    def __init__(self, sim: AuditSim, hotkey: str) -> None:
        super().__init__(sim, hotkey)
        self.no_numbers: set[BoundaryKey] = set()

    def receive(self, source: Any, kind: str, *args: Any) -> None:
        """As the real one: what is no numbers isn't taken, and kept to be shown."""
        if kind == "boundary" and audit_toy.is_no_numbers(args[1]):
            frame = args[0]
            key = BoundaryKey(frame.step, frame.microbatch, frame.stage, frame.backward)
            if self.me is not None and key not in self.local.boundaries:
                self.no_numbers.add(key)
                self.local.unusable[key] = frame.hash
            return
        super().receive(source, kind, *args)

    def lies(self, step: int, *kinds: str) -> bool:
        return self.lie in kinds and self.sim.lies_at(self.hotkey, step)

    def do(self, me: Member, owe: Any) -> None:
        match owe:
            case StoreEvidence() if self.lie == "refuse":
                return
            case StoreEvidence() if self.lie == "forgets":
                self.local.kept.pop(owe.key, None)
            case RunWitness() if owe.bundle in self.sim.store and self.reads:
                self.local.witnessed[owe.case] = self._witness(owe.bundle)
            case MakeSnapshot() if self.lie == "stale":
                return
            case StoreUnusable():
                if self.writes and owe.key in self.no_numbers:
                    self.sim.store[owe.hash] = audit_toy.NO_NUMBERS
                    self.local.denounced.add(owe.hash)
            case _:
                super().do(me, owe)

    def _witness(self, bundle: str) -> str:
        """False witness says that its friend's work is right, or anything, or nothing."""
        case = self.sim.store[bundle]
        if self.lie is None or not (self.lie == "witness" or self.sim.ring):
            lost = [
                value for entry in case.partials for item in entry.items for value in (item.x, item.gradient) if value
            ]
            return audit_toy.redo(case, self.sim.store).digest if all(v in self.sim.store for v in lost) else ""
        claimed = root_digest(case.roots[0][1]) if case.roots else ""
        claimed = claimed or build.claimed_digest(case, case.partials[0].member) or ""
        kind = toy.h("kind", bundle, self.hotkey) % 4
        return toy.name(("garbage", bundle)) if kind == 0 else "" if kind == 1 else claimed

    def report(self, me: Member, claim: msg.AnyClaim) -> None:
        if isinstance(claim, msg.NotHeldClaim) and self.lie == "refuse":
            return
        if isinstance(claim, msg.BackwardReceipt) and self.lies(claim.step, "claims"):
            for stage, backward in ((claim.stage - 1, False), (claim.stage + 1, True)):
                if 0 <= stage < st.num_stages(self.state):
                    said = msg.MismatchClaim(claim.step, claim.microbatch, claim.stage, backward, toy.name("other"))
                    super().report(me, said)
        if isinstance(claim, msg.BackwardReceipt) and self.lies(claim.step, "alarm", "deaf"):
            self._accuse_neighbours(me, claim)
            if self.lie == "deaf" and st.num_stages(self.state) > 1:
                return  # what it says that it lacks it can't have computed with
        if isinstance(claim, msg.UpdatedClaim) and claim.root and self.lies(claim.step, "root"):
            claim = msgspec.structs.replace(claim, root=toy.name(("root", self.hotkey, claim.step)))
        if isinstance(claim, msg.BackwardReceipt) and claim.loss_bits is not None and self.lies(claim.step, "loss"):
            claim = msgspec.structs.replace(claim, loss_bits=claim.loss_bits ^ 1)
        super().report(me, claim)

    def _accuse_neighbours(self, me: Member, claim: msg.BackwardReceipt) -> None:
        """Falsely: it has their boundaries."""
        for stage, backward in ((claim.stage - 1, False), (claim.stage + 1, True)):
            work = st.work_at(self.state, claim.step)
            key = BoundaryKey(claim.step, claim.microbatch, stage, backward)
            if work is None or not 0 <= stage < st.num_stages(self.state):
                continue
            if self.lie == "deaf":
                super().report(me, msg.MissingClaim(claim.step, claim.microbatch, claim.stage, backward))
            elif (said := receipted_hash(work, key)) and self.writes and said == self.local.boundaries.get(key):
                self.sim.put(self.values[key])
                super().report(me, msg.UnusableClaim(claim.step, claim.microbatch, claim.stage, backward, said))

    def compute(self, me: Member, owe: Compute, w: int) -> None:
        super().compute(me, owe, w)
        key = BoundaryKey(owe.step, owe.microbatch, owe.stage, owe.backward)
        if self.lies(owe.step, "false") and key in self.values and owe.generation is not None:
            self.local.boundaries[key] = self.local.kept[key] = toy.name(("nothing", key))
        training = owe.microbatch < st.num_microbatches(self.state)
        if training and self.lies(owe.step, "nan") and key in self.values and key in self.local.made_from:
            self.values[key] = value = audit_toy.no_numbers(key)
            self.local.boundaries[key] = self.local.kept[key] = toy.name(value)
        lie = "bwd" if owe.backward else "fwd"
        if training and self.lies(owe.step, lie, "fickle") and key in self.values and key in self.local.made_from:
            turn = owe.generation if self.lie == "fickle" else 0
            self.values[key] = value = toy.h("lie", owe.step, owe.microbatch, owe.stage, turn)
            self.local.boundaries[key] = self.local.kept[key] = toy.name(value)

    def give_boundary(self, to: Miner, key: BoundaryKey) -> None:
        work = st.work_at(self.state, key.step)
        early = work is not None and not receipted_hash(work, key)
        if not early or not self.lies(key.step, "sender"):
            super().give_boundary(to, key)
            return
        right = self.values[key]
        self.values[key] = right + 1
        super().give_boundary(to, key)
        self.values[key] = right

    def do_Commit(self, me: Member, owe: Commit) -> None:
        sums = self.sums.get((owe.step, owe.epoch))
        if sums is not None and self.lies(owe.step, "sum", "zero"):
            for p, values in sums.items():
                sums[p] = (values[0] + 1, *values[1:]) if self.lie == "sum" else (0,) * len(values)
        super().do_Commit(me, owe)

    def do_Reduce(self, me: Member, owe: Reduce) -> None:
        if not self.lies(owe.step, "collude") or not self.writes:
            super().do_Reduce(me, owe)
            return
        super().do_Reduce(me, owe)
        key = ((owe.step, owe.group, owe.version), owe.partition)
        merged = self.local.merged.get(key)
        if merged is None:
            return
        total = self.sim.store[merged.hash]
        total = (total[0] + 1, *total[1:])
        value = self.sim.put(total)
        squares = toy.squares(owe.step, total)
        self.local.merged[key] = msgspec.structs.replace(merged, hash=value, blob=value, squares=squares)

    def do_Fingerprint(self, me: Member, owe: Fingerprint) -> None:
        """What it added as an owner it adds to its own fingerprint, so that the sums agree."""
        super().do_Fingerprint(me, owe)
        key = ((owe.step, owe.group, owe.version), owe.seed)
        merge = st.merge_of(self.state, owe.step, owe.group)
        if not self.lies(owe.step, "collude") or merge is None or key not in self.local.fingerprints:
            return
        said = [
            (p, ((values[0] + toy.h("r", owe.seed, p, 0) * (merge.owners[p] == me)) % toy.PRIME,))
            for p, values in self.local.fingerprints[key]
        ]
        self.local.fingerprints[key] = tuple(said)

    def judge(self, merge: st.Merge, owe: Any) -> bool | None:
        return True if self.lie in ("collude", "sum", "stale") else super().judge(merge, owe)

    def apply_seal(self, me: Member, step: int) -> None:
        """A lazy one keeps its weights, and says of its state what the others say."""
        w, version = self.w, self.local.version
        super().apply_seal(me, step)
        if self.local.version != version and step > CALIBRATION_STEP and self.lies(step, "stale"):
            self.w = w

    def _lose_something(self) -> None:
        """Of a step that is over: evidence, and nothing else."""
        rng, past = self.sim.rng, [key for key in self.local.kept if key.step < self.state.next_step]
        if past and rng.random() < self.sim.losses:
            lost = rng.choice(sorted(past))
            for held in (self.local.kept, self.local.boundaries, self.values):
                held.pop(lost, None)

    def tick(self, late: bool = False) -> None:
        if self.sim.losses:
            self._lose_something()
        if self.lie == "stale" and self.me in self.state.members and self.local.restored_stage is not None:
            root = st.agreed_root(self.state, self.local.restored_stage)
            if root is not None and self.local.version == self.state.next_step:
                self.local.root = root
        super().tick(late)
