"""``iota audit``: anyone can run the evidence of a case again and see what comes of it."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from iota.cli.options import (
    DEFAULT_VALIDATOR,
    DEFAULT_WALLETS,
    ValidatorHotkey,
    ValidatorUrl,
    WalletHotkey,
    WalletName,
    WalletPath,
    print_json,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from iota.replay_report import ReplayReport
    from subnet.protocol.audit_api import CaseView

CALL_S = 15.0
TICK_S = 2.0
"""Progress within a phase is said at most so often."""

RunOption = Annotated[str, typer.Option(help="Name or id of the run; without it the active one.")]
CaseArgument = Annotated[int, typer.Argument(metavar="CASE", help="Number of the case, see iota audit cases.")]
JsonOption = Annotated[bool, typer.Option("--json", help="The result as JSON on stdout, all else on stderr.")]


def add_to(app: typer.Typer) -> None:
    audit = typer.Typer(help="Verified work: cases, their evidence, and its replay.", no_args_is_help=True)
    audit.command("cases")(cases)
    audit.command("fetch")(fetch)
    audit.command("replay")(replay)
    audit.command("appeal")(appeal)
    app.add_typer(audit, name="audit")


def cases(
    validator: ValidatorUrl = DEFAULT_VALIDATOR,
    run: RunOption = "",
    as_json: JsonOption = False,
) -> None:
    """List who stands or stood accused, of what, and what came of it."""
    import msgspec

    from iota.audit_fetch import list_cases
    from subnet.timing import Deadline

    found = list_cases(validator, Deadline.after(CALL_S), run=run)
    if as_json:
        print(msgspec.json.encode(found).decode())
        return
    if not found:
        print("nobody is accused")
    for view in found:
        print(_case_line(view))


def _case_line(view: CaseView) -> str:
    words = f", {view.appeal} on appeal" if view.appeal else ""
    bundle = f", bundle {view.bundle}" if view.bundle else ""
    where = f"step {view.step} stage {view.stage}{'' if view.sealed else ' (before its seal)'}"
    return f"case {view.case}: {view.hotkey}, {view.charge}, {where}: {view.state}{words}{bundle}"


def fetch(
    case: CaseArgument,
    out: Annotated[Path, typer.Option("--out", "-o", help="Directory for the bundle, empty or new.")],
    validator: ValidatorUrl = DEFAULT_VALIDATOR,
    run: RunOption = "",
    wait: Annotated[float, typer.Option(help="Seconds for the whole download.")] = 3600.0,
    disk: Annotated[str, typer.Option(help="Refuse a bundle of more bytes than this.")] = "64GiB",
    as_json: JsonOption = False,
) -> None:
    """Download the evidence of a case, for iota audit replay; needs no wallet. What is there already isn't fetched again."""
    from iota.audit_fetch import fetch_case
    from subnet.net.rate import num_bytes
    from subnet.timing import Deadline

    out_stream = sys.stderr if as_json else sys.stdout
    limit_bytes, tick = num_bytes(disk, "--disk"), _ticker(lambda words: print(words, file=out_stream, flush=True))
    done = fetch_case(
        validator, case, out.expanduser(), Deadline.after(wait), run=run, limit_bytes=limit_bytes, tick=tick
    )
    view = done.detail.view
    if as_json:
        print_json({"directory": done.directory, "case": view, "fetched_bytes": done.fetched_bytes})
        return
    print(
        f"{done.directory}: case {case} against {view.hotkey} ({view.charge}, step {view.step} stage {view.stage}): "
        f"{view.state}; {len(done.detail.blobs)} blobs, {done.fetched_bytes:,} bytes fetched"
    )
    print(f"run it again: iota audit replay {done.directory} --expect {view.bundle}")


def replay(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="Directory with case.msgpack and blobs/.")],
    device: Annotated[str, typer.Option(help="cpu, or cuda where the run's hardware class is one of GPUs.")] = "cpu",
    memory: Annotated[str, typer.Option(help="Refuse a case that needs more; without it most of what is free.")] = "",
    expect: Annotated[str, typer.Option(help="Hash of the bundle that the journal names: refuse another.")] = "",
    as_json: JsonOption = False,
) -> int:
    """Do the work of a case again and compare.

    Exit status: 0 all right, 1 something claimed is wrong, 2 the bundle is unusable, 3 nothing follows (another class of
    hardware, too little memory, a state that isn't the agreed one).
    """
    import msgspec

    from iota.replay_report import lines_of

    def say(words: str) -> None:
        print(words, file=sys.stderr if as_json else sys.stdout, flush=True)

    report = _replayed(bundle.expanduser(), device, memory, expect, say)
    if report.code:
        hint = f" ({report.hint})" if report.hint else ""
        print(f"error: {' '.join(report.why.split())}{hint}", file=sys.stderr, flush=True)
    else:
        for line in lines_of(report):
            say(line)
    if as_json:
        print(msgspec.json.encode(report).decode())
    return report.exit_code


def _replayed(directory: Path, device: str, memory: str, expect: str, say: Callable[[str], None]) -> ReplayReport:
    from iota.replay_report import refused, report_of, signed_lines, what_of
    from subnet.audit.bundle import open_bundle
    from subnet.audit.messages import ReplayRequest
    from subnet.audit.redo import MachineFault
    from subnet.audit.signed import check_signed
    from subnet.audit.worker import Replayer
    from subnet.errors import ConfigError, HashMismatch, IotaError, OutOfSpace

    budget_bytes = _budget(memory)
    try:
        bundle = open_bundle(directory)
        if expect and bundle.name != expect.lower():
            raise HashMismatch(
                f"this bundle is {bundle.name}, not {expect[:80]}", hint="fetch it again: iota audit fetch"
            )
        case = bundle.case
        say(f"bundle {bundle.name}")
        say(what_of(case))
        signed = check_signed(case)
        for line in signed_lines(signed):
            say(line)
        request = ReplayRequest(str(directory), budget_bytes=budget_bytes, device=device, tolerant=True)
        findings = Replayer(say, _ticker(say)).replay(request)
    except (MachineFault, OutOfSpace) as error:
        return refused(error, usable=True)
    except ConfigError as error:
        return refused(error, usable="device" in error.reason)
    except IotaError as error:
        return refused(error, usable=False)
    return report_of(case, bundle.name, signed, findings)


def _ticker(say: Callable[[str], None]) -> Callable[[str, int, int], None]:
    """Progress in words, now and then; a phase that is over in a moment says nothing."""
    last_s, last = time.monotonic(), ""

    def tick(what: str, done: int, total: int) -> None:
        nonlocal last_s, last
        now_s = time.monotonic()
        if what != last:
            last_s, last = now_s, what
        elif now_s - last_s >= TICK_S:
            last_s = now_s
            say(f"  {what}: {done} of {total}")

    return tick


def _budget(memory: str) -> int:
    from subnet.net.rate import num_bytes

    return num_bytes(memory, "--memory") if memory else _free_bytes()


def _free_bytes() -> int:
    """Nine tenths of what the system says is to be had; all there is where it doesn't say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 1 << 62
    kib = next((int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), 1 << 52)
    return kib * 1024 * 9 // 10


def appeal(
    case: CaseArgument,
    validator: ValidatorUrl = DEFAULT_VALIDATOR,
    hotkey: ValidatorHotkey = None,
    run: RunOption = "",
    wallet_name: WalletName = "default",
    wallet_hotkey: WalletHotkey = "default",
    wallet_path: WalletPath = DEFAULT_WALLETS,
    as_json: JsonOption = False,
) -> None:
    """Have a closed case's bundle run again in a fresh process; signed by the hotkey that the case is about.

    What comes of it is journaled: see iota audit cases.
    """
    from iota.audit_fetch import appeal_case
    from subnet.protocol.signing import load_wallet
    from subnet.timing import Deadline

    signer = load_wallet(wallet_name, wallet_hotkey, wallet_path.expanduser())
    answer = appeal_case(validator, case, signer, Deadline.after(CALL_S), run=run, hotkey=hotkey)
    if as_json:
        print_json(answer)
        return
    print(answer.said)
