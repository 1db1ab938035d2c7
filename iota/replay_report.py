"""What a replay of a bundle comes to, as one object that prints as lines or as JSON: the same words for people and programs."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from subnet.audit.case import Case, Distance, Findings, OtherClass, false_roots
from subnet.audit.check import untrusted_state
from subnet.audit.signed import SignedWords
from subnet.errors import IotaError
from subnet.words import short

RIGHT, WRONG, UNUSABLE, NOTHING = "right", "wrong", "unusable", "nothing"
EXIT_CODES = {RIGHT: 0, WRONG: 1, UNUSABLE: 2, NOTHING: 3}
WITHIN, OUTSIDE, NOT_COMPARED = "within", "outside", "not compared"
SHOWN = 12
"""Distances that are printed, the largest first; JSON has all of them."""


class PartialReport(msgspec.Struct, frozen=True):
    """One member's sum: what was redone of it, and what it claimed that isn't so."""

    member: str
    items: int
    slices: int
    wrong: tuple[str, ...]


class ForeignReport(msgspec.Struct, frozen=True):
    """A replay on another class of hardware. ``verdict``: within, outside, or not compared (claimed bytes are lacking)."""

    verdict: str
    ours: str
    theirs: str
    compared: int
    not_compared: int
    distances: tuple[Distance, ...]
    """The largest share of its limit first. A distance of null: nothing to compare with."""


class ReplayReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """``verdict``: ``right`` or ``wrong`` (exit status 0, 1); ``unusable``: the bundle (2); ``nothing`` follows for ``why`` (3)."""

    verdict: str
    why: str = ""
    code: str = ""
    """Of the error, where there was one."""
    hint: str = ""
    bundle: str = ""
    """Hash of ``case.msgpack``: what the journal names."""
    run_id: str = ""
    run: str = ""
    branch: int = 0
    step: int | None = None
    stage: int | None = None
    digest: str = ""
    partials: tuple[PartialReport, ...] = ()
    wrong: tuple[str, ...] = ()
    """All of it, in words."""
    signed: tuple[tuple[str, int], ...] = ()
    """(hotkey, its claims in the bundle that its own signature proves)."""
    unsigned: tuple[str, ...] = ()
    """Hotkeys whose commitment is here without a signature of theirs."""
    merged_partitions: int = 0
    other_class: ForeignReport | None = None
    compute_s: float = 0.0
    state_s: float = 0.0
    read_bytes: int = 0

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.verdict]


def what_of(case: Case) -> str:
    """What a case is about, in a line."""
    items = sum(len(partial.items) for partial in case.partials)
    if case.roots:
        names = ", ".join(str(member) for member, _ in case.roots)
        run = f"{case.planned.config.run.name} ({case.planned.run_id})"
        return (
            f"run {run}, the state of stage {case.stage} after {case.step + 1} updates: the root that {names} reported"
        )
    parts = [f"{len(case.partials)} of the stage's sums over {items} microbatches"]
    if case.merge is not None and case.merge.whole:
        parts.append(f"{len(case.merge.merged)} merged partitions")
    if case.update is not None:
        parts.append("the update")
    branch = f", branch {case.branch}" if case.branch else ""
    run = f"{case.planned.config.run.name} ({case.planned.run_id})"
    return f"run {run}, step {case.step}, stage {case.stage}{branch}: {', '.join(parts)}"


def signed_lines(signed: SignedWords) -> list[str]:
    lines = [
        f"signed by {hotkey}: {count} claims, proven and as the case has them" for hotkey, count in signed.verified
    ]
    lines += [f"{hotkey}: no commitment under its own signature is here" for hotkey in signed.unsigned]
    if signed.beside:
        lines.append(f"{signed.beside} signed claims are about other work, or were taken back")
    return lines


def report_of(case: Case, bundle: str, signed: SignedWords, findings: Findings) -> ReplayReport:
    """The verdict over all of it."""
    wrong = (*(f"signed words: {why}" for why in signed.wrong), *_wrong_lines(case, findings))
    foreign = None if findings.other_class is None else _foreign(findings.other_class)
    untrusted = untrusted_state(case, findings)
    verdict, why = (WRONG, "") if wrong else (RIGHT, "")
    if untrusted is not None:
        verdict, why = NOTHING, f"the state that the work begins from isn't the agreed one: {untrusted}"
    elif foreign is not None and not signed.wrong:
        verdict, why = NOTHING, "this machine is of another hardware class than the run"
    return ReplayReport(
        verdict=verdict,
        why=why,
        bundle=bundle,
        run_id=case.planned.run_id,
        run=case.planned.config.run.name,
        branch=case.branch,
        step=case.step,
        stage=case.stage,
        digest=findings.digest,
        partials=tuple(PartialReport(str(p.member), len(p.items), len(p.slices), p.wrong) for p in findings.partials),
        wrong=wrong,
        signed=signed.verified,
        unsigned=signed.unsigned,
        merged_partitions=len(findings.merge.hashes) if findings.merge is not None else 0,
        other_class=foreign,
        compute_s=findings.compute_s,
        state_s=findings.state_s,
        read_bytes=findings.read_bytes,
    )


def refused(error: IotaError, *, usable: bool) -> ReplayReport:
    """A replay that came to no findings: because of the bundle, or (``usable``) of this machine."""
    return ReplayReport(NOTHING if usable else UNUSABLE, why=error.reason, code=error.code, hint=error.hint)


def _wrong_lines(case: Case, findings: Findings) -> list[str]:
    lines = [f"{partial.member}: {why}" for partial in findings.partials for why in partial.wrong]
    if findings.merge is not None:
        lines += [f"merged partition {index}: {why}" for index, why in findings.merge.wrong]
    false = set(false_roots(case, findings))
    lines += [
        f"{member}: reported the root {short(root)}, snapshot and log lead to {short(findings.root)}"
        for member, root in case.roots
        if member in false
    ]
    return lines + [f"stage {case.stage}: {why}" for _, why in findings.wrong_roots]


def _foreign(other: OtherClass) -> ForeignReport:
    ranked = sorted(other.distances, key=lambda one: one.distance / one.limit, reverse=True)
    verdict = WITHIN if other.within else OUTSIDE
    return ForeignReport(
        verdict if other.distances and (not other.not_compared or not other.within) else NOT_COMPARED,
        other.ours,
        other.theirs,
        len(other.distances),
        other.not_compared,
        tuple(ranked),
    )


# --- for a person --------------------------------------------------------------------------------------------------


def lines_of(report: ReplayReport) -> list[str]:
    """The findings, what it took, and last the verdict."""
    from iota.plan import human_bytes

    foreign = report.other_class
    lines = _foreign_lines(foreign) if foreign is not None else _exact_lines(report)
    took = (
        f"{report.compute_s:.2f} s of work, {report.state_s:.2f} s to bring the stage to its state,"
        f" {human_bytes(report.read_bytes)} read"
    )
    lines.append(f"digest {report.digest}; {took}" if report.digest else took)
    return [*lines, f"verdict: {verdict_of(report)}"]


def verdict_of(report: ReplayReport) -> str:
    """One line."""
    if report.verdict == WRONG:
        return f"{len(report.wrong)} claims are wrong"
    if report.verdict == RIGHT:
        return "all that was claimed is right"
    if report.other_class is not None and report.why.startswith("this machine"):
        verdict = report.other_class.verdict
        words = {
            WITHIN: "within the tolerance",
            OUTSIDE: "outside the tolerance: have a machine of the run's class replay it",
            NOT_COMPARED: "not all could be compared: have a machine of the run's class replay it",
        }[verdict]
        return f"other class: {words}"
    return f"nothing follows: {report.why}"


def _exact_lines(report: ReplayReport) -> list[str]:
    right = [partial for partial in report.partials if not partial.wrong]
    lines = [f"{one.member}: {one.items} items and {one.slices} slices are right" for one in right]
    if report.merged_partitions and not any(line.startswith("merged partition") for line in report.wrong):
        lines.append(f"merge: {report.merged_partitions} partitions are the sums of the true slices")
    return lines + [f"wrong: {line}" for line in report.wrong]


def _foreign_lines(foreign: ForeignReport) -> list[str]:
    lines = [f"this machine's class is {foreign.ours[:16]}, the run's is {foreign.theirs[:16]}: bits can't be compared"]
    for one in foreign.distances[:SHOWN]:
        who = f"{one.member}: " if one.member is not None else ""
        apart = f"{one.distance:.3g}" if one.distance < float("inf") else "not comparable"
        lines.append(f"{'within' if one.within else 'outside'}: {who}{one.what}: {apart} (limit {one.limit:.3g})")
    left: Sequence[Distance] = foreign.distances[SHOWN:]
    if left:
        lines.append(f"{len(left)} more, all nearer to what this machine computes")
    if foreign.not_compared:
        lines.append(f"{foreign.not_compared} claims differ in bits and their bytes aren't in the bundle: not compared")
    return lines
