"""``iota policy``: write one, check it, compare it, have a live validator count with it from the next tempo on."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from iota.cli.options import (
    DEFAULT_VALIDATOR,
    DEFAULT_WALLETS,
    AsJson,
    ValidatorHotkey,
    ValidatorUrl,
    WalletHotkey,
    WalletName,
    WalletPath,
    print_json,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from subnet.policy.api import PolicyLine
    from subnet.policy.change import Difference
    from subnet.policy.policy import SubnetPolicy

CALL_S = 30.0
_EITHER = "policy.toml, the URL of a validator (what it has in force), or: default"
PolicyFile = Annotated[Path, typer.Argument(metavar="FILE", help="policy.toml")]


def add_to(app: typer.Typer) -> None:
    policy = typer.Typer(help="The subnet's policy: what work pays, audits, burn, admission.", no_args_is_help=True)
    policy.command("show")(show)
    policy.command("check")(check)
    policy.command("diff")(diff)
    policy.command("apply")(apply)
    app.add_typer(policy, name="policy")


def show(
    default: Annotated[bool, typer.Option("--default", help="The default policy: what to begin a file with.")] = False,
    live: Annotated[
        bool, typer.Option("--live", help="What the validator counts with now, and what is to come.")
    ] = False,
    source: Annotated[
        Path | None, typer.Option("--from", metavar="JSON", help="What iota score list --json printed.")
    ] = None,
    url: ValidatorUrl = DEFAULT_VALIDATOR,
    as_json: AsJson = False,
) -> None:
    """Print a policy as policy.toml, with a comment for each value."""
    from subnet.errors import ConfigError
    from subnet.policy.policy import SubnetPolicy
    from subnet.policy.text import dump_policy

    if default + live + (source is not None) != 1:
        raise ConfigError("which policy?", hint="give one of --default, --live, --from FILE")
    if live:
        _show_live(url, as_json=as_json)
        return
    policy = SubnetPolicy() if source is None else _listed(source.expanduser())
    if as_json:
        print_json(policy)
    else:
        print(dump_policy(policy), end="")


def _show_live(url: str, *, as_json: bool) -> None:
    from iota.remote import Remote
    from subnet.policy.text import dump_policy
    from subnet.timing import Deadline

    view = Remote(url).policy(Deadline.after(CALL_S))
    if as_json:
        print_json(view)
        return
    for line in view.history:
        words = "in force" if line == view.in_force else "to come" if line == view.pending else "before"
        print(f"# {words}: {_line(line)}")
    print(dump_policy(view.in_force.policy), end="")


def _line(line: PolicyLine) -> str:
    from iota.score_tables import policy_words

    block = f" (block {line.since_block})" if line.since_block else ""
    return f"policy {policy_words(line.digest, line.since_s)}{block}, by {line.by}"


def _listed(path: Path) -> SubnetPolicy:
    """Of an answer with one in it."""
    import msgspec

    from subnet.errors import ConfigError
    from subnet.policy.text import policy_from

    hint = "take it from iota score list --json of this version"
    try:
        found = msgspec.json.decode(path.read_bytes())
        table = found["in_force"]["policy"]
    except (OSError, msgspec.MsgspecError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} holds no policy: {error}", hint=hint) from error
    return policy_from(table)


def check(file: PolicyFile, as_json: AsJson = False) -> None:
    """Say whether a file is a policy that is allowed, and what in it isn't the default."""
    from subnet.policy.change import differences
    from subnet.policy.policy import SubnetPolicy, short
    from subnet.policy.text import load_policy

    policy = load_policy(file)
    if as_json:
        changed = _values(differences(SubnetPolicy(), policy))
        print_json({"file": file, "digest": policy.digest, "not_default": changed})
        return
    print(f"{file}: policy {short(policy.digest)}")
    for one in differences(SubnetPolicy(), policy):
        print(f"{one.name} = {one.new!r} (default {one.old!r})")


def diff(
    old: Annotated[str, typer.Argument(metavar="A", help=_EITHER)],
    new: Annotated[str, typer.Argument(metavar="B", help=_EITHER)],
    as_json: AsJson = False,
) -> None:
    """Say what B changes of A, and whether one live change may."""
    from subnet.policy.change import differences

    found = differences(_named(old), _named(new))
    if as_json:
        print_json(_values(found))
        return
    if not found:
        print("the same policy")
    for one in found:
        far = f"   too far for one change ({one.limit}): {one.nearest!r} is allowed" if one.is_too_large else ""
        print(f"{one.name}: {one.old!r} -> {one.new!r}{far}")


def _values(found: Iterable[Difference]) -> list[dict[str, object]]:
    return [
        {
            "name": one.name,
            "old": one.old,
            "new": one.new,
            "too_large": one.is_too_large,
            "nearest": one.nearest if one.is_too_large else one.new,
        }
        for one in found
    ]


def _named(name: str) -> SubnetPolicy:
    from iota.remote import Remote
    from subnet.policy.policy import SubnetPolicy
    from subnet.policy.text import load_policy
    from subnet.timing import Deadline

    if name == "default":
        return SubnetPolicy()
    if "://" in name:
        return Remote(name).policy(Deadline.after(CALL_S)).in_force.policy
    return load_policy(name)


def apply(
    file: PolicyFile,
    url: ValidatorUrl = DEFAULT_VALIDATOR,
    wallet_name: WalletName = "validator",
    wallet_hotkey: WalletHotkey = "default",
    wallet_path: WalletPath = DEFAULT_WALLETS,
    validator_hotkey: ValidatorHotkey = None,
    in_steps: Annotated[
        bool, typer.Option("--in-steps", help="Go as far towards FILE as one change may; run it again the next tempo.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Have a live validator count with FILE from the next tempo on. The wallet is the validator's own, or the subnet owner's."""
    from iota.remote import Remote
    from subnet.policy.api import PolicyRequest
    from subnet.policy.change import check_change, differences, towards
    from subnet.policy.text import load_policy
    from subnet.protocol.signing import load_wallet
    from subnet.timing import Deadline

    wanted, deadline = load_policy(file), Deadline.after(CALL_S)
    signer = load_wallet(wallet_name, wallet_hotkey, wallet_path.expanduser())
    remote = Remote(url, signer, hotkey=validator_hotkey)
    before = remote.policy(deadline).in_force
    policy = towards(before.policy, wanted) if in_steps else wanted
    check_change(before.policy, policy)
    view = remote.change_policy(PolicyRequest(policy, before.digest), deadline)
    line = view.pending or view.in_force
    wait_s, left = line.since_s - view.time_s, differences(line.policy, wanted)
    if as_json:
        changed, to_come = _values(differences(before.policy, line.policy)), _values(left)
        print_json({"changed": changed, "digest": line.digest, "since_s": line.since_s, "left": to_come})
        return
    for one in differences(before.policy, line.policy):
        print(f"{one.name}: {one.old!r} -> {one.new!r}")
    print(
        f"{_line(line)}: " + (f"in force in {wait_s:.0f} s" if wait_s > 0 else "in force already, nothing was changed")
    )
    if left:
        when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(line.since_s))
        print(f"{len(left)} values aren't there yet: run it again after {when}")
