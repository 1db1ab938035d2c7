"""``iota score``: what a miner earned and why, from a validator, or counted anew from the journal without one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from iota.cli.options import DEFAULT_VALIDATOR, ValidatorUrl

if TYPE_CHECKING:
    from subnet.score.timeline import Timeline

CALL_S = 15.0


def add_to(app: typer.Typer) -> None:
    score = typer.Typer(help="Scores: list them, explain one, count them anew.", no_args_is_help=True)
    score.command("list")(score_list)
    score.command("explain")(score_explain)
    score.command("recompute")(score_recompute)
    app.add_typer(score, name="score")


def score_list(
    url: ValidatorUrl = DEFAULT_VALIDATOR,
    as_json: Annotated[bool, typer.Option("--json", help="All terms as JSON.")] = False,
) -> None:
    """List every miner's score with its terms, best first."""
    from iota.remote import Remote
    from iota.score_tables import print_json, print_list
    from subnet.timing import Deadline

    found = Remote(url).scores(Deadline.after(CALL_S))
    if as_json:
        print_json(found)
        return
    print_list(found.scores)


def score_explain(
    hotkey: Annotated[str, typer.Argument(metavar="HOTKEY", help="Whose score.")],
    url: ValidatorUrl = DEFAULT_VALIDATOR,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Every term of a score with its arithmetic, and what keeps the hotkey from work or pay: why, and until when."""
    from iota.remote import Remote
    from iota.score_tables import print_detail, print_json
    from subnet.timing import Deadline

    found = Remote(url).score(hotkey, Deadline.after(CALL_S))
    if as_json:
        print_json(found)
        return
    print_detail(found)


def score_recompute(
    journal: Annotated[
        str,
        typer.Argument(
            metavar="JOURNAL",
            help="URL of a log store (of iota store serve, s3://BUCKET or s3://BUCKET/PREFIX), a directory with a journal "
            "(a run's, or a validator's), a journal.db, or a file that --save wrote.",
        ),
    ],
    run: Annotated[str, typer.Argument(metavar="[RUN]", help="Name or id of the run, where there are several.")] = "",
    hotkey: Annotated[str, typer.Option(metavar="HOTKEY", help="Explain this one's score term by term.")] = "",
    at_s: Annotated[
        float | None, typer.Option("--at", help="Wall time in seconds since 1970; without it that of the last record.")
    ] = None,
    policy: Annotated[
        Path | None,
        typer.Option(
            help="policy.toml to count with, instead of the policies that the journal says its validator had."
        ),
    ] = None,
    save: Annotated[
        Path | None, typer.Option(help="Also write the log store's signed segments to this file, for others to check.")
    ] = None,
    secret: Annotated[Path, typer.Option("--store.secret", help="Shared with an embedded store.")] = Path(
        "~/.iota/store/secret"
    ),
    endpoint: Annotated[str, typer.Option("--store.endpoint", help="Endpoint of an S3 server.")] = "",
    region: Annotated[str, typer.Option("--store.region", help="Region of the bucket.")] = "",
    credentials: Annotated[Path | None, typer.Option("--store.credentials", help="Credentials for S3.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="All terms as JSON.")] = False,
) -> None:
    """Count a run's scores anew from its journal: the hash chain, the signatures and every step are checked."""
    from iota.score_recompute import recompute_journal
    from iota.score_tables import print_json, print_recomputed
    from iota.store_check import StoreAddress

    address = StoreAddress(journal, endpoint, region, credentials, secret)
    found = recompute_journal(
        journal, address, run, _policy(policy), at_s=at_s, save=save.expanduser() if save is not None else None
    )
    if as_json:
        print_json(found)
        return
    print_recomputed(found, hotkey)


def _policy(path: Path | None) -> Timeline | None:
    from subnet.policy.text import load_policy
    from subnet.score.timeline import Timeline

    if path is None:
        return None
    policy = load_policy(path)
    return Timeline.of(policy.score, policy.work)
