"""``iota audit``: anyone can run the evidence of a case again and see what comes of it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from iota.cli.options import DEFAULT_VALIDATOR, ValidatorUrl

if TYPE_CHECKING:
    from subnet.audit.case import Case, Findings
    from subnet.audit.signed import SignedWords

CALL_S = 15.0
RIGHT, WRONG, UNUSABLE = 0, 1, 2


def add_to(app: typer.Typer) -> None:
    audit = typer.Typer(help="Verified work: cases, their evidence, and its replay.", no_args_is_help=True)
    audit.command("cases")(cases)
    audit.command("fetch")(fetch)
    audit.command("replay")(replay)
    app.add_typer(audit, name="audit")


def cases(
    validator: ValidatorUrl = DEFAULT_VALIDATOR,
    run: Annotated[str, typer.Option(help="Name or id of the run; without it the active one.")] = "",
) -> None:
    """List who stands or stood accused, of what, and what came of it."""
    from iota.audit_fetch import list_cases
    from subnet.timing import Deadline

    found = list_cases(validator, Deadline.after(CALL_S), run=run)
    if not found:
        print("nobody is accused")
    for view in found:
        words = f", {view.appeal} on appeal" if view.appeal else ""
        bundle = f", bundle {view.bundle}" if view.bundle else ""
        where = f"step {view.step} stage {view.stage}{'' if view.sealed else ' (before its seal)'}"
        print(f"case {view.case}: {view.hotkey}, {view.charge}, {where}: {view.state}{words}{bundle}")


def fetch(
    case: Annotated[int, typer.Argument(metavar="CASE", help="Number of the case, see iota audit cases.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Directory for the bundle, empty or new.")],
    validator: ValidatorUrl = DEFAULT_VALIDATOR,
    run: Annotated[str, typer.Option(help="Name or id of the run; without it the active one.")] = "",
    wait: Annotated[float, typer.Option(help="Seconds for the whole download.")] = 3600.0,
) -> None:
    """Download the evidence of a case, for iota audit replay; needs no wallet."""
    from iota.audit_fetch import fetch_case
    from subnet.timing import Deadline

    done = fetch_case(validator, case, out.expanduser(), Deadline.after(wait), run=run)
    view = done.detail.view
    print(
        f"{done.directory}: case {case} against {view.hotkey} ({view.charge}, step {view.step} stage {view.stage}): "
        f"{view.state}; {len(done.detail.blobs)} blobs, {done.fetched_bytes:,} bytes fetched"
    )
    print(f"run it again: iota audit replay {done.directory}")


def replay(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="Directory with case.msgpack and blobs/.")],
    device: Annotated[str, typer.Option(help="cpu, or cuda where the run's hardware class is one of GPUs.")] = "cpu",
    as_json: Annotated[
        bool, typer.Option("--json", help="The findings as JSON on stdout, all else on stderr.")
    ] = False,
) -> int:
    """Do the work of a case again and compare: exit 0 all right, 1 something claimed is wrong, 2 the bundle is unusable."""
    from neurons.entry import say_error
    from subnet.errors import IotaError

    try:
        return _replay(bundle.expanduser(), device, as_json)
    except IotaError as error:
        say_error(error)
        return UNUSABLE


def _replay(directory: Path, device: str, as_json: bool) -> int:
    import msgspec

    from subnet.audit.bundle import read_bundle
    from subnet.audit.messages import ReplayRequest
    from subnet.audit.signed import check_signed
    from subnet.audit.worker import Replayer

    def say(words: str) -> None:
        print(words, file=sys.stderr if as_json else sys.stdout, flush=True)

    case = read_bundle(directory).case
    say(_what(case))
    signed = check_signed(case)
    for line in _signed_lines(signed):
        say(line)
    findings = Replayer(say).replay(ReplayRequest(str(directory), budget_bytes=1 << 62, device=device))
    wrong = [*(f"signed words: {why}" for why in signed.wrong), *wrong_lines(case, findings)]
    for line in verdict_lines(case, findings, wrong):
        say(line)
    if as_json:
        print(msgspec.json.encode(findings).decode())
    return WRONG if wrong else RIGHT


def _what(case: Case) -> str:
    items = sum(len(partial.items) for partial in case.partials)
    parts = [f"{len(case.partials)} of the stage's sums over {items} microbatches"]
    if case.merge is not None and case.merge.whole:
        parts.append(f"{len(case.merge.merged)} merged partitions")
    if case.update is not None:
        parts.append("the update")
    branch = f", branch {case.branch}" if case.branch else ""
    return f"run {case.planned.config.run.name}, step {case.step}, stage {case.stage}{branch}: {', '.join(parts)}"


def _signed_lines(signed: SignedWords) -> list[str]:
    lines = [
        f"signed by {hotkey}: {count} claims, proven and as the case has them" for hotkey, count in signed.verified
    ]
    lines += [f"{hotkey}: no commitment under its own signature is here" for hotkey in signed.unsigned]
    if signed.beside:
        lines.append(f"{signed.beside} signed claims are about other work, or were taken back")
    return lines


def wrong_lines(case: Case, findings: Findings) -> list[str]:
    """All that was claimed and isn't so, in words."""
    lines = [f"{partial.member}: {why}" for partial in findings.partials for why in partial.wrong]
    if findings.merge is not None:
        lines += [f"merged partition {index}: {why}" for index, why in findings.merge.wrong]
    return lines + [f"stage {case.stage}: {why}" for _, why in findings.wrong_roots]


def verdict_lines(case: Case, findings: Findings, wrong: list[str]) -> list[str]:
    """The verdict, with what was compared and what it took."""
    from iota.plan import human_bytes
    from subnet.audit.check import untrusted_state

    lines = [
        f"{partial.member}: {len(partial.items)} items and {len(partial.slices)} slices are right"
        for partial in findings.partials
        if not partial.wrong
    ]
    if findings.merge is not None and not findings.merge.wrong:
        lines.append(f"merge: {len(findings.merge.hashes)} partitions are the sums of the true slices")
    lines += [f"wrong: {line}" for line in wrong]
    if untrusted_state(case, findings) is not None:
        lines.append("the state before the work is not the agreed one: nothing follows about who did the work")
    lines.append(
        f"digest {findings.digest}; {findings.compute_s:.2f} s of work, {findings.state_s:.2f} s to bring the stage to its"
        f" state, {human_bytes(findings.read_bytes)} read"
    )
    lines.append(f"verdict: {len(wrong)} claims are wrong" if wrong else "verdict: all that was claimed is right")
    return lines
