"""``iota data``, ``iota plan``, ``iota run``: what a model builder does with a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from iota.cli import evaluate, run_words
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
    to_stderr,
)

if TYPE_CHECKING:
    from subnet.protocol.api import RunSummary

CALL_S = 15.0
RunFile = Annotated[Path, typer.Argument(metavar="RUN.toml", help="The run file.")]


def add_to(app: typer.Typer) -> None:
    data = typer.Typer(help="Text to token shards.", no_args_is_help=True)
    data.command("prepare")(data_prepare)
    data.command("from-gguf")(from_gguf)
    run = typer.Typer(help="Submit, watch and export runs.", no_args_is_help=True)
    run.command("submit")(run_submit)
    run.command("list")(run_list)
    run.command("status")(run_status)
    run.command("export")(run_export)
    run_words.add_to(run)
    evaluate.add_run_to(run)
    app.add_typer(data, name="data")
    app.command("plan")(plan)
    evaluate.add_to(app)
    app.add_typer(run, name="run")


def from_gguf(
    file: Annotated[Path, typer.Argument(metavar="FILE.gguf", help="The file.")],
    out_dir: Annotated[Path, typer.Argument(metavar="DIR", help="A new directory.")],
    as_json: AsJson = False,
) -> None:
    """Write the weights of a GGUF file as a Hugging Face directory, for model.pretrained."""
    from iota.gguf import convert_gguf

    num_parameters = convert_gguf(file.expanduser(), out_dir.expanduser())
    if as_json:
        print_json({"directory": out_dir, "num_parameters": num_parameters})
        return
    print(f"{out_dir}: {num_parameters:,} parameters as fp32 safetensors")


def data_prepare(
    sources: Annotated[list[str], typer.Argument(help="Text files, directories of them, or JSONL (field text).")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Directory for the prepared data.")],
    tokenizer: Annotated[Path | None, typer.Option(help="A tokenizer.json; without it one is trained.")] = None,
    vocab_size: Annotated[int | None, typer.Option(help="Tokens to train, or the most a given tokenizer has.")] = None,
    holdout_fraction: Annotated[float, typer.Option(help="Part of the text kept for evaluation.")] = 0.05,
    dialogues: Annotated[
        int | None, typer.Option(metavar="TOKENS", help="Sources are JSONL of dialogues: rows of so many tokens.")
    ] = None,
    packing: Annotated[bool, typer.Option(help="With --dialogues: several share a row where they fit.")] = True,
    as_json: AsJson = False,
) -> None:
    """Make token shards, a tokenizer and a hold-out split; the same inputs again do nothing."""
    from iota.prepare import DialogueSettings, prepare_data

    prepared = prepare_data(
        sources,
        out.expanduser(),
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        holdout_fraction=holdout_fraction,
        dialogues=None if dialogues is None else DialogueSettings(dialogues, packing),
    )
    manifest = prepared.manifest
    if as_json:
        tokens = {"train_tokens": manifest.train.num_tokens, "holdout_tokens": manifest.holdout.num_tokens}
        size = {"vocab_size": manifest.vocab_size, "reused": prepared.reused}
        print_json({"directory": prepared.directory, **tokens, **size})
        return
    print(
        f"{prepared.directory}: {manifest.train.num_tokens:,} training and {manifest.holdout.num_tokens:,} hold-out"
        f" tokens, vocabulary {manifest.vocab_size:,}{' (already there)' if prepared.reused else ''}"
    )
    if prepared.words:
        print(prepared.words)


def plan(
    run_file: RunFile,
    replicas: Annotated[int, typer.Option(help="Miners per stage.")] = 1,
    measure: Annotated[bool, typer.Option("--measure", help="Cut by times measured here instead of FLOPs.")] = False,
    fleet: Annotated[Path | None, typer.Option(help="A fleet file: propose stages, codes, who serves what.")] = None,
    stages: Annotated[int | None, typer.Option(help="With --fleet: this number of stages.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Print stages, parameters, memory per miner and bytes on the wire per step, before anything starts."""
    if fleet is not None:
        from iota.cli.simulate import plan_on_fleet

        return plan_on_fleet(run_file, fleet, stages, json=json)
    from rich.console import Console

    from subnet.run.runfile import load_run_file

    config = load_run_file(run_file)
    from iota.plan import make_plan, measure_unit_costs, render
    from iota.submission import load_model

    model_config = load_model(config)[0].model_config
    costs = measure_unit_costs(config, model_config) if measure else None
    made = make_plan(config, model_config, unit_costs=costs, replicas=replicas)
    if json:
        print_json(made)
        return
    Console().print(render(made))


def run_submit(
    run_file: RunFile,
    url: ValidatorUrl = DEFAULT_VALIDATOR,
    hotkey: ValidatorHotkey = None,
    wallet_name: WalletName = "default",
    wallet_hotkey: WalletHotkey = "default",
    wallet_path: WalletPath = DEFAULT_WALLETS,
    work_dir: Annotated[Path, typer.Option(help="Prepared data is kept here.")] = Path("~/.iota/submissions"),
    same_class: Annotated[
        bool, typer.Option("--same-class", help="The miners run on machines like this one: report its class.")
    ] = False,
    device: Annotated[str, typer.Option(help="Where the class is measured: auto, cpu, cuda.")] = "auto",
    as_json: AsJson = False,
) -> int:
    """Prepare the data, draw the initial weights, upload both and start (or queue) the run."""
    from iota.submit import run_submit as submit
    from iota.submit_settings import SubmitSettings

    settings = SubmitSettings(
        run_file=run_file,
        work_dir=work_dir,
        validator_url=url,
        validator_hotkey=hotkey,
        wallet_name=wallet_name,
        wallet_hotkey=wallet_hotkey,
        wallet_path=wallet_path,
        hardware_class=same_class,
        device=device,
    )
    return run_words.submit_as_json(settings) if as_json else submit(settings)


def run_list(url: ValidatorUrl = DEFAULT_VALIDATOR, as_json: AsJson = False) -> None:
    """List the validator's runs."""
    from rich.console import Console
    from rich.table import Table

    from iota.remote import Remote
    from subnet.timing import Deadline

    found = Remote(url).runs(Deadline.after(CALL_S))
    if as_json:
        print_json(found)
        return
    table = Table(box=None)
    for name in ("run", "state", "step", "loss", "root"):
        table.add_column(name)
    for summary in found:
        state = f"{summary.state} ({summary.place} before it)" if summary.place else summary.state
        table.add_row(
            summary.name,
            f"{state}, {_waits(summary)}" if _waits(summary) else state,
            f"{max(0, summary.step)}/{summary.steps}",
            "" if summary.loss is None else f"{summary.loss:.4f}",
            (summary.root or "")[:16],
        )
    Console().print(table)


def _waits(summary: RunSummary) -> str:
    """What a run stands still for, or waits for at the moment."""
    from iota.live import stalled

    if summary.stall is not None:
        return stalled(summary.stall).removeprefix("stalled, ")
    return f"waits for {summary.waiting_for}" if summary.waiting_for else ""


def run_status(
    name: Annotated[str | None, typer.Argument(help="The run; without it the active one.")] = None,
    url: ValidatorUrl = DEFAULT_VALIDATOR,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Stay and follow the run.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The whole status as JSON.")] = False,
    steps: Annotated[int, typer.Option(help="How many of the last steps.")] = 200,
) -> None:
    """Show a run: step, loss, members, merges, events."""
    import time

    import msgspec
    from rich.console import Console

    from iota import live
    from iota.remote import Remote
    from subnet.timing import Deadline

    remote = Remote(url)

    def fetch() -> live.RunStatus:
        return remote.status(Deadline.after(CALL_S), run=name, steps=steps)

    if as_json:
        print(msgspec.json.format(msgspec.json.encode(fetch()), indent=2).decode())
    elif watch:
        with live.LiveView() as view:
            live.watch(fetch, view, lambda: time.sleep(0.5))
    else:
        Console().print(live.render(fetch()))


def run_export(
    name: Annotated[str, typer.Argument(help="The run.")],
    out_dir: Annotated[Path, typer.Argument(metavar="DIR", help="A new directory.")],
    step: Annotated[int | None, typer.Option(help="After how many updates; without it the newest snapshot.")] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Compare its logits in plain transformers with the swarm's stages.")
    ] = False,
    merged: Annotated[
        bool, typer.Option("--merged", help="Of a LoRA run: the model with the adapters added in, not the adapters.")
    ] = False,
    url: ValidatorUrl = DEFAULT_VALIDATOR,
    hotkey: ValidatorHotkey = None,
    wallet_name: WalletName = "default",
    wallet_hotkey: WalletHotkey = "default",
    wallet_path: WalletPath = DEFAULT_WALLETS,
    timeout_s: Annotated[float, typer.Option(help="Give up after so many seconds.")] = 3600.0,
    as_json: AsJson = False,
) -> None:
    """Write a run's model as a Hugging Face directory that plain transformers loads."""
    from iota.export import export_run
    from iota.remote import Remote
    from subnet.protocol.signing import load_wallet
    from subnet.timing import Deadline

    signer = load_wallet(wallet_name, wallet_hotkey, wallet_path.expanduser())
    remote = Remote(url, signer, hotkey=hotkey)
    deadline = Deadline.after(timeout_s)
    say = to_stderr if as_json else print
    done = export_run(remote, name, out_dir, step=step, check=check, merged=merged, deadline=deadline, say=say)
    if as_json:
        print_json(done)
        return
    print(f"{done.directory}: {done.num_parameters:,} parameters after {done.step} updates, run root {done.root}")
    if done.checked is not None:
        print(f"{done.checked.num_logits:,} logits are the swarm's to the bit (hash {done.checked.hash})")
