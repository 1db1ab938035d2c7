"""``iota eval``: an exported model on texts and tasks of this machine's files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from iota.cli.options import (
    DEFAULT_VALIDATOR,
    DEFAULT_WALLETS,
    ValidatorHotkey,
    ValidatorUrl,
    WalletHotkey,
    WalletName,
    WalletPath,
)

CALL_S = 60.0


def add_to(app: typer.Typer) -> None:
    app.command("eval")(evaluate)


def evaluate(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="A Hugging Face directory, as iota run export writes it.")
    ],
    text: Annotated[
        list[Path] | None, typer.Option(help="A text or JSONL file, or a directory; may be repeated.")
    ] = None,
    sequence_length: Annotated[int | None, typer.Option(help="Tokens of a window; else up to 1024.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="At most so many of each text.")] = None,
    tasks: Annotated[str | None, typer.Option(help="lm-eval tasks, with commas (needs iota-open[eval]).")] = None,
    task_dir: Annotated[Path | None, typer.Option(help="Where YAML files of more tasks lie.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="At most so many examples of each task.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Loss and perplexity of a model on your texts, and lm-eval tasks from local files.

    iota eval export/ --text holdout/law.txt --text holdout/code/
    iota eval export/ --tasks my_task --task-dir tasks/ --limit 200
    """
    from subnet.errors import ConfigError

    if not text and not tasks:
        raise ConfigError("nothing to evaluate on", hint="give --text FILE or --tasks NAME")
    from iota.evaluate import Scorer, TextScore, run_tasks, texts_of

    directory = directory.expanduser()
    scores: list[TextScore] = []
    if text:
        found = texts_of([path.expanduser() for path in text])
        scorer = Scorer(directory, sequence_length=sequence_length)
        for name, words in found:
            score = scorer.score(name, words, max_tokens=max_tokens)
            scores.append(score)
            if not json:
                _say(score)
        if len(scores) > 1 and not json:
            tokens = sum(score.tokens for score in scores)
            mean = sum(score.loss * score.tokens for score in scores) / tokens
            _say(TextScore("all of them", tokens, mean, None))
    names = [name for name in (tasks or "").split(",") if name]
    done = run_tasks(directory, names, task_dir=task_dir, limit=limit) if names else {}
    if json:
        _as_json(scores, done)
        return
    for task, metrics in done.items():
        print(f"{task}: " + " · ".join(f"{name} {value:.4g}" for name, value in metrics.items()))


def _say(score: object) -> None:
    from iota.evaluate import TextScore

    assert isinstance(score, TextScore)
    bits = "" if score.bits_per_byte is None else f" · {score.bits_per_byte:.3f} bits a byte"
    print(f"{score.name}: loss {score.loss:.4f} · perplexity {score.perplexity:.2f} · {score.tokens:,} tokens{bits}")


def _as_json(scores: object, done: dict[str, dict[str, float]]) -> None:
    import msgspec

    from iota.evaluate import TextScore

    texts = [
        {
            "name": score.name,
            "tokens": score.tokens,
            "loss": score.loss,
            "perplexity": score.perplexity,
            "bits_per_byte": score.bits_per_byte,
        }
        for score in msgspec.convert(scores, list[TextScore], from_attributes=True)
    ]
    print(msgspec.json.encode({"texts": texts, "tasks": done}).decode())


def add_run_to(run: typer.Typer) -> None:
    run.command("evaluate")(run_evaluate)
    run.command("sample")(run_sample)


def run_evaluate(
    name: Annotated[str, typer.Argument(help="The run.")],
    url: ValidatorUrl = DEFAULT_VALIDATOR,
    hotkey: ValidatorHotkey = None,
    wallet_name: WalletName = "default",
    wallet_hotkey: WalletHotkey = "default",
    wallet_path: WalletPath = DEFAULT_WALLETS,
    json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """The newest hold-out loss that a run has sealed, by source where its data have several.

    evaluation.every_steps in the run file says how often there is one.
    """
    from iota.holdout import newest_holdout
    from iota.remote import Remote
    from subnet.protocol.signing import load_wallet
    from subnet.timing import Deadline

    signer = load_wallet(wallet_name, wallet_hotkey, wallet_path.expanduser())
    found = newest_holdout(Remote(url, signer, hotkey=hotkey), name, Deadline.after(CALL_S))
    if json:
        import msgspec

        print(msgspec.json.encode({**msgspec.to_builtins(found), "perplexity": found.perplexity}).decode())
        return
    print(f"{name} after {found.step} updates: loss {found.loss:.4f} · perplexity {found.perplexity:.2f}")
    for source, loss in found.sources.items():
        print(f"  {source}: loss {loss:.4f}")


def run_sample(
    name: Annotated[str, typer.Argument(help="The run.")],
    prompt: Annotated[str, typer.Option(help="What to go on from.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to write.")] = 60,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token each time.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=1, help="Of so many likeliest tokens.")] = 40,
    seed: Annotated[int, typer.Option(help="Of the chance.")] = 0,
    step: Annotated[int | None, typer.Option(help="Weights after so many updates; else the newest stored.")] = None,
    url: ValidatorUrl = DEFAULT_VALIDATOR,
    hotkey: ValidatorHotkey = None,
    wallet_name: WalletName = "default",
    wallet_hotkey: WalletHotkey = "default",
    wallet_path: WalletPath = DEFAULT_WALLETS,
    json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Continue a prompt with a run's newest stored weights, fetched, checked and used on this machine, while it trains.

    iota run sample my-run --prompt "Call me"
    """
    import iota

    wallet = f"{wallet_name}/{wallet_hotkey}"
    with iota.connect(url, wallet, wallet_path=wallet_path.expanduser(), hotkey=hotkey, warn=False) as swarm:
        text = swarm.run(name).sample(
            prompt, max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, seed=seed, step=step
        )
    if json:
        import msgspec

        print(msgspec.json.encode({"run": name, "prompt": prompt, "text": text}).decode())
    else:
        print(text)
