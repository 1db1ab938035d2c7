"""How each command is called: shown below its help and in docs/cli.md; a test parses every line as the shell would."""

from __future__ import annotations

import typer
from typer.models import CommandInfo

EXAMPLES: dict[str, tuple[str, ...]] = {
    "demo": ("iota demo", "iota demo --quick --miners 5"),
    "up": (
        "iota up examples/demo.toml --miners 6",
        "iota up my-run.toml --miners 8 --restart 10 --stay --export my-model",
    ),
    "miner estimate": ("iota miner estimate --validator.url http://203.0.113.7:8091 --json",),
    "miner stop": ("iota miner stop", "iota miner stop miner-1"),
    "miner status": ("iota miner status", "iota miner status --json"),
    "plan": ("iota plan my-run.toml", "iota plan my-run.toml --replicas 2 --json"),
    "eval": ("iota eval my-model --text holdout.txt --json",),
    "chaos": ("iota chaos --mtbf 20s --duration 5m --reference", "iota chaos --attach iota-swarm --faults kill,slow"),
    "simulate": ("iota simulate fleet.toml my-run.toml", "iota simulate fleet.toml my-run.toml --steps 5 --json"),
    "version": ("iota version --json",),
    "chain serve": ("iota chain serve --dir ~/.iota/chain",),
    "chain register": ("iota chain register --wallet.name miner",),
    "chain stake": ("iota chain stake 1000 --wallet.name validator",),
    "chain show": ("iota chain show", "iota chain show --netuid 1 --json"),
    "store serve": ("iota store serve --dir ~/.iota/store --budget-gib 256",),
    "store check": ("iota store check s3://my-bucket/iota --store.endpoint https://s3.example",),
    "store prepare": ("iota store prepare s3://my-bucket/iota --store.endpoint https://s3.example",),
    "wallet new": ("iota wallet new --wallet.name miner",),
    "wallet import": ("iota wallet import miner.identity",),
    "data prepare": ("iota data prepare books/ --out prepared", "iota data prepare rows.jsonl --out prepared --json"),
    "data from-gguf": ("iota data from-gguf model.gguf model-directory",),
    "run submit": ("iota run submit my-run.toml --validator.url http://203.0.113.7:8091 --wallet.name owner",),
    "run list": ("iota run list", "iota run list --json"),
    "run status": ("iota run status", "iota run status my-run --json --steps 20", "iota run status --watch"),
    "run export": ("iota run export my-run my-model --check", "iota run export my-run at-400 --step 400"),
    "run pause": ("iota run pause my-run --wallet.name owner",),
    "run resume": ("iota run resume my-run --wallet.name owner",),
    "run stop": ("iota run stop my-run --wallet.name owner",),
    "run set-lr": ("iota run set-lr my-run --factor 0.5", "iota run set-lr my-run --value 2e-4"),
    "run extend": ("iota run extend my-run --steps 2000",),
    "run rollback": ("iota run rollback my-run --step 400 --resume",),
    "run fork": ("iota run fork my-run half-rate.toml --step 400",),
    "run evaluate": ("iota run evaluate my-run --json",),
    "score list": ("iota score list", "iota score list --json"),
    "score explain": ("iota score explain 5GrwvaEF5zXb26Fz9rcQpDWS57CtERHpNehXCPcNoHGKutQY",),
    "score recompute": (
        "iota score recompute ~/.iota/validator my-run",
        "iota score recompute http://127.0.0.1:9945 --store.secret ~/.iota/store/secret --json",
    ),
    "policy show": ("iota policy show --default", "iota policy show --live --json"),
    "policy check": ("iota policy check policy.toml",),
    "policy diff": (
        "iota policy diff default policy.toml",
        "iota policy diff http://203.0.113.7:8091 policy.toml --json",
    ),
    "policy apply": ("iota policy apply policy.toml --wallet.name validator --in-steps",),
    "incentives simulate": ("iota incentives simulate policy.toml --miners 1000 --report policy.html",),
    "incentives compare": ("iota incentives compare old.toml new.toml",),
    "incentives replay": ("iota incentives replay ~/.iota/validator/runs/my-run --policy policy.toml",),
    "audit cases": ("iota audit cases", "iota audit cases --run my-run --json"),
    "audit fetch": ("iota audit fetch 1 --out case-1",),
    "audit replay": ("iota audit replay case-1", "iota audit replay case-1 --json"),
    "audit appeal": ("iota audit appeal 1 --wallet.name miner",),
}
"""By command; one whose help has an example of its own needs none here."""


def add_to(app: typer.Typer) -> None:
    """Below the help of each command that has lines here."""
    for path, command in commands_of(app):
        lines = EXAMPLES.get(path)
        if lines and not command.epilog:
            # two newlines: the help's renderer makes a line of its own of each paragraph
            command.epilog = "\n\n".join(("Examples:" if len(lines) > 1 else "Example:", *lines))


def commands_of(app: typer.Typer, before: str = "") -> list[tuple[str, CommandInfo]]:
    """Every command by the words that call it."""
    found: list[tuple[str, CommandInfo]] = []
    for command in app.registered_commands:
        callback = command.callback
        name = command.name or (callback.__name__.replace("_", "-") if callback is not None else "")
        found.append((f"{before}{name}", command))
    for group in app.registered_groups:
        if group.typer_instance is not None:
            found += commands_of(group.typer_instance, f"{before}{group.name} ")
    return found
