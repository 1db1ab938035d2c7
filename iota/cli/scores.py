"""``iota score``: what a miner earned and why, from a validator, or recomputed from the journal without one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from iota.cli.options import DEFAULT_VALIDATOR, ValidatorUrl

if TYPE_CHECKING:
    from collections.abc import Sequence

    from subnet.score.api import ScoreDetail
    from subnet.score.policy import ScorePolicy
    from subnet.score.score import Score, Unpaid

CALL_S = 15.0


def add_to(app: typer.Typer) -> None:
    score = typer.Typer(help="Scores: list them, explain one, recompute them.", no_args_is_help=True)
    score.command("list")(score_list)
    score.command("explain")(score_explain)
    score.command("recompute")(score_recompute)
    app.add_typer(score, name="score")


def score_list(
    url: ValidatorUrl = DEFAULT_VALIDATOR,
    as_json: Annotated[bool, typer.Option("--json", help="All terms as JSON.")] = False,
) -> None:
    """List every miner's score with its terms, best first."""
    import msgspec

    from iota.remote import Remote
    from subnet.timing import Deadline

    found = Remote(url).scores(Deadline.after(CALL_S))
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
        return
    _table(found.scores)


def score_explain(
    hotkey: Annotated[str, typer.Argument(metavar="HOTKEY", help="Whose score.")],
    url: ValidatorUrl = DEFAULT_VALIDATOR,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Every term of a score with its arithmetic, and what keeps the hotkey from work: refusals, cases, probation, waits."""
    import msgspec

    from iota.remote import Remote
    from subnet.timing import Deadline

    found = Remote(url).score(hotkey, Deadline.after(CALL_S))
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
        return
    for line in explained(found):
        print(line)


def score_recompute(
    store: Annotated[
        str, typer.Argument(metavar="STORE_URL", help="Of iota store serve, s3://BUCKET or s3://BUCKET/PREFIX.")
    ],
    run: Annotated[str, typer.Argument(metavar="RUN", help="Name or id of a run in its log store.")],
    at_s: Annotated[
        float | None, typer.Option("--at", help="Wall time in seconds since 1970; without it that of the last record.")
    ] = None,
    policy: Annotated[
        Path | None,
        typer.Option(help="JSON file with the validator's policy (see iota score list --json), if not the default."),
    ] = None,
    secret: Annotated[Path, typer.Option("--store.secret", help="Shared with an embedded store.")] = Path(
        "~/.iota/store/secret"
    ),
    endpoint: Annotated[str, typer.Option("--store.endpoint", help="Endpoint of an S3 server.")] = "",
    region: Annotated[str, typer.Option("--store.region", help="Region of the bucket.")] = "",
    credentials: Annotated[Path | None, typer.Option("--store.credentials", help="Credentials for S3.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="All terms as JSON.")] = False,
) -> None:
    """Recompute a run's scores from its journal in the log store: the hash chain, the signatures and every step are checked."""
    import msgspec

    from iota.score_recompute import recompute_from_store
    from iota.store_check import StoreAddress

    address = StoreAddress(store, endpoint, region, credentials, secret)
    found = recompute_from_store(address, run, _policy(policy), at_s=at_s)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
        return
    print(f"run {found.run_id}: {found.num_records} records checked, as of {found.time_s:.3f}")
    _table(found.scores)


def _policy(path: Path | None) -> ScorePolicy:
    import msgspec

    from subnet.errors import ConfigError
    from subnet.score.policy import ScorePolicy

    if path is None:
        return ScorePolicy()
    try:
        return msgspec.json.decode(path.expanduser().read_bytes(), type=ScorePolicy)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path} is no score policy: {error}", hint="take it from iota score list --json") from error


def explained(found: ScoreDetail) -> list[str]:
    """The answer for a person, a line each."""
    import time

    place = f"place {found.place} of {found.num_scores}" if found.place else "no score"
    lines = [f"{found.hotkey}: {place}", "", "Score", *(f"  {line}" for line in found.arithmetic)]
    lines += ["", "Standing", *(f"  {line}" for line in found.said)]
    if found.unpaid:
        lines += ["", "Not paid", *(f"  {_unpaid(one)}" for one in found.unpaid)]
    if found.refusals:
        lines += ["", "Refused joins"]
        for refusal in found.refusals:
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(refusal.time_s))
            again = "" if refusal.retry_after_s is None else f", again in {refusal.retry_after_s:.0f} s"
            hint = f" ({refusal.hint})" if refusal.hint else ""
            times = f", {refusal.times} times" if refusal.times > 1 else ""
            lines.append(f"  {when} UTC {refusal.code}: {refusal.reason}{hint}{times}{again}")
    return lines


def _unpaid(one: Unpaid) -> str:
    where = f"step {one.step}, stage {one.stage}"
    amount = f"{one.items} items, {one.work:.6g} FLOPs" if one.work else "void before its seal"
    return f"{where}: {amount}: {one.why} (audit {one.audit}, run {one.run})"


def _table(scores: Sequence[Score]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None)
    for name in ("hotkey", "block", "score", "GFLOP/s", "uptime", "deadlines", "audits", "items", ""):
        table.add_column(name, no_wrap=name == "hotkey")
    for score in scores:
        table.add_row(
            score.hotkey,
            "?" if score.registered_at_block is None else str(score.registered_at_block),
            f"{score.total:.4f}",
            f"{score.rate / 1e9:.4g}",
            f"{score.uptime:.4f}",
            f"{score.deadlines:.4f}",
            f"{score.audits:.4f}",
            str(score.sealed_items),
            score.convicted,
        )
    Console(soft_wrap=True).print(table)
