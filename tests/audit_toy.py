"""An auditor of toy cases: redoes exactly what a case names, from the toy store, and compares; a leader's and a witness's run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import schedule_toy as toy

from subnet.audit import build
from subnet.audit.case import Case, Findings, ItemCase, RedoneItem, RedoneMerge, RedonePartial, digest, root_digest
from subnet.audit.ledger import WorkLedger
from subnet.run.events import RunPlanned
from subnet.run.state import RunState
from subnet.words import CALIBRATION_STEP, Member, Want
from validator.decision import Accused, AuditResult

NO_NUMBERS = "no numbers"
"""In place of the bytes of a boundary that can't be computed with."""


def no_numbers(key: object) -> Any:
    """Such a boundary."""
    return (NO_NUMBERS, str(key))


def is_no_numbers(value: Any) -> bool:
    return isinstance(value, tuple) and value[0] == NO_NUMBERS


class Distrusted(Exception):
    """The state that the case names isn't what was agreed on."""


def state_of(case: Case, store: Mapping[str, Any]) -> int:
    """The stage's state that the gradients are of."""
    found = case.state
    w = toy.first_state(case.stage) if found.whole else store[found.manifest][2]
    if found.root and toy.name(w) != found.root:
        raise Distrusted(found.manifest)
    for step in found.log:
        w = toy.updated(w, [store[blob] for _, _, blob, _ in step.partitions], step.coefficient_bits)
    return w


def redo(case: Case, store: Mapping[str, Any]) -> Findings:
    """Raises KeyError where something isn't in the store."""
    if case.roots:
        root = roots_of(case, dict(store))[0]
        return Findings(root_digest(root), (), None, (), 0.0, 0.0, 0, root=root)
    w, parts = state_of(case, store), partitions_of(case.planned, case.stage)
    partials, slices = [], dict[Member, dict[int, toy.Vector]]()
    for partial in case.partials:
        sums: dict[int, toy.Vector] = {}
        items = [_redo_item(case, item, w, parts, sums, store) for item in partial.items]
        slices[partial.member] = sums
        hashes = tuple((p, toy.name(sums[p])) for p in parts)
        wrong = [f"item {a.microbatch}" for a, b in zip(items, partial.items, strict=True) if not _same(case, a, b)]
        if hashes != partial.commitment.hashes:
            wrong.append("slices")
        prints: tuple[tuple[int, tuple[int, ...]], ...] = ()
        if partial.fingerprints and case.merge is not None:
            seed = case.merge.seed
            prints = tuple((p, toy.fingerprint(sums[p], seed, p)) for p in parts)
            if prints != partial.fingerprints:
                wrong.append("fingerprints")
        partials.append(RedonePartial(partial.member, tuple(items), hashes, prints, tuple(wrong)))
    found = tuple(partials)
    return Findings(digest(found), found, _redo_merge(case, slices), (), 0.0, 0.0, 0)


def partitions_of(planned: RunPlanned, stage: int) -> list[int]:
    group = next(group for group in planned.groups if stage in group.stages)
    return [p for p, stages in enumerate(group.partitions) if stage in stages]


def _redo_item(
    case: Case, item: ItemCase, w: int, parts: list[int], sums: dict[int, toy.Vector], store: Mapping[str, Any]
) -> RedoneItem:
    stage, m, last = case.stage, item.microbatch, len(case.planned.cuts) - 1
    x = store[item.x] if stage else toy.token(case.step, m, case.planned.config.pipeline.microbatches)
    g = toy.loss_gradient(w, x) if stage == last else store[item.gradient]
    for p in parts:
        sums[p] = toy.accumulate(case.step, sums.get(p), toy.gradient(w, x, g, stage, p))
    forward = "" if stage == last else toy.name(toy.forward(w, x, stage))
    loss = toy.loss_bits(w, x) if stage == last else None
    return RedoneItem(m, forward, toy.name(toy.backward(w, x, g, stage)), loss)


def _same(case: Case, redone: RedoneItem, said: ItemCase) -> bool:
    return (redone.forward, redone.backward, redone.loss_bits) == (said.forward, said.backward, said.loss_bits)


def _redo_merge(case: Case, slices: dict[Member, dict[int, toy.Vector]]) -> RedoneMerge | None:
    """Of the partitions that are this stage's alone."""
    if case.merge is None or not case.merge.whole or not case.merge.merged:
        return None
    group = case.planned.groups[case.merge.group]
    hashes, wrong = [], []
    for part in case.merge.merged:
        if group.partitions[part.partition] != (case.stage,):
            continue
        total = toy.merge(case.step, [sums[part.partition] for sums in slices.values()])
        hashes.append((part.partition, toy.name(total)))
        if (toy.name(total), toy.squares(case.step, total)) != (part.hash, part.squares):
            wrong.append((part.partition, "isn't the sum"))
    return RedoneMerge(tuple(hashes), tuple(wrong))


def roots_of(case: Case, store: dict[str, Any]) -> tuple[str, tuple[Accused, ...]]:
    """To which root snapshot and log lead, and who has reported another one."""
    root = "" if case.step < CALIBRATION_STEP else toy.name(state_of(case, store))
    accused = [
        Accused(
            member,
            "root",
            keep(msgspec.structs.replace(case, roots=((member, said),)), store),
            root_digest(root),
            root_digest(said),
        )
        for member, said in case.roots
        if said != root
    ]
    return root, tuple(accused)


# --- as the shell does it -------------------------------------------------------------------------------------------


def case_of(state: RunState, ledger: WorkLedger, audit: int) -> Case | None:
    opened = state.audits.open[audit]
    make = build.case_before_seal if opened.number else build.case_after_seal
    return make(state, ledger, opened.step, opened.stage, opened.members)


def missing_of(case: Case, store: Mapping[str, Any]) -> tuple[Want, ...]:
    return tuple(want for want in build.wants_of(case) if want.hash not in store)


def result_of(audit: int, case: Case, store: dict[str, Any]) -> AuditResult:
    """Of what is there; two runs of toy arithmetic never differ. Bundles go into the store."""
    missing = missing_of(case, store)
    lost = {want.hash for want in missing}
    whole = [p.member for p in case.partials if not any(i.x in lost or i.gradient in lost for i in p.items)]
    if not whole:
        return AuditResult(audit, None, missing=missing)
    case = build.narrow(case, whole)
    findings = redo(case, store)
    accused: list[Accused] = []
    for partial in findings.partials:
        if partial.wrong:
            narrow = build.accusation(case, partial.member)
            claimed = build.claimed_digest(case, partial.member) or ""
            accused.append(Accused(partial.member, "partial", keep(narrow, store), digest((partial,)), claimed))
    if not accused and findings.merge is not None and findings.merge.wrong and case.merge is not None:
        lied = {p for p, _ in findings.merge.wrong}
        owners = {part.owner for part in case.merge.merged if part.partition in lied and part.owner is not None}
        accused = [Accused(owner, "merge", keep(case, store), findings.digest) for owner in sorted(owners)]
    return AuditResult(audit, findings, accused=tuple(accused), missing=missing)


def keep(case: Case, store: dict[str, Any]) -> str:
    name = toy.name(msgspec.msgpack.encode(case))
    store[name] = case
    return name


def honest(hotkeys: Sequence[str], liars: Mapping[str, str]) -> list[str]:
    return [hotkey for hotkey in hotkeys if hotkey not in liars]
