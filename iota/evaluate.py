"""How good an exported model is on texts and tasks of this machine's files: loss and perplexity, and ``lm-eval`` where installed.

Everything is computed here by plain ``transformers``, in fp32, without a swarm and without the network.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from subnet.errors import ConfigError

DEFAULT_LENGTH = 1024
_BATCH_TOKENS = 4096
_OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")


@dataclass(frozen=True)
class TextScore:
    """The model on one text: mean loss in nats a token, over windows that don't overlap."""

    name: str
    tokens: int
    loss: float
    bits_per_byte: float | None
    """None where only a part of the text was looked at."""

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        return math.exp(min(self.loss, 700.0))


def texts_of(paths: Sequence[Path]) -> list[tuple[str, str]]:
    """(name, text) of text files, JSONL files (field ``text``) and directories of them. ConfigError for what isn't one."""
    found: list[tuple[str, str]] = []
    for path in paths:
        if not path.exists():
            raise ConfigError(f"{path} does not exist", hint="name text files, JSONL files or directories of them")
        files = sorted(p for p in path.rglob("*") if p.suffix in (".txt", ".md", ".jsonl")) if path.is_dir() else [path]
        if not files:
            raise ConfigError(f"{path} has no .txt, .md or .jsonl files", hint="name the files themselves")
        found += [(str(file), _text_of(file)) for file in files]
    return found


def _text_of(file: Path) -> str:
    try:
        text = file.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not UTF-8 at byte {error.start}", hint="save it as UTF-8") from error
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}", hint="check the path and its rights") from error
    if file.suffix != ".jsonl":
        return text
    return "\n\n".join(_documents(file, text))


def _documents(file: Path, text: str) -> Iterator[str]:
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                yield str(json.loads(line)["text"])
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(
                    f"{file}, line {number}: no JSON with a field text", hint='{"text": "..."}'
                ) from error


class Scorer:
    """A Hugging Face directory, loaded once. Raises ConfigError where there is none that ``transformers`` can load."""

    def __init__(self, directory: Path, *, sequence_length: int | None = None) -> None:
        if not (directory / "config.json").is_file():
            raise ConfigError(f"{directory} has no config.json", hint="name a directory of iota run export")
        from iota.sdk.sampling import load

        try:
            self._model, self._tokenizer = load(directory)
        except (OSError, ValueError) as error:
            hint = "an adapter is evaluated merged: iota run export --merged"
            raise ConfigError(f"{directory} can't be loaded: {str(error).splitlines()[0]}", hint=hint) from error
        limit = int(getattr(self._model.config, "max_position_embeddings", None) or DEFAULT_LENGTH)
        self.sequence_length = min(limit, DEFAULT_LENGTH) if sequence_length is None else sequence_length
        if not 2 <= self.sequence_length <= limit:
            raise ConfigError(
                f"a window of {self.sequence_length} tokens is not allowed", hint=f"allowed: 2 to {limit}"
            )

    def score(self, name: str, text: str, *, max_tokens: int | None = None) -> TextScore:
        """Windows of ``sequence_length`` predictions each, the last one shorter; ConfigError for a text of one token."""
        ids = [int(token) for token in self._tokenizer(text, add_special_tokens=False).input_ids]
        whole = max_tokens is None or len(ids) <= max_tokens + 1
        ids = ids if whole else ids[: (max_tokens or 0) + 1]
        if len(ids) < 2:
            raise ConfigError(f"{name} has {len(ids)} tokens", hint="a text to predict has two at least")
        total = sum(self._windows(ids))
        count = len(ids) - 1
        loss = total / count
        bits = total / math.log(2) / max(1, len(text.encode())) if whole else None
        return TextScore(name, count, loss, bits)

    def _windows(self, ids: list[int]) -> Iterator[float]:
        """Summed losses, a batch of windows of one length at a time."""
        import torch

        length = self.sequence_length
        starts = range(0, len(ids) - 1, length)
        rows = [ids[start : start + length + 1] for start in starts]
        full = [row for row in rows if len(row) == length + 1]
        batch = max(1, _BATCH_TOKENS // length)
        batches = [full[i : i + batch] for i in range(0, len(full), batch)] + [[r] for r in rows[len(full) :]]
        for part in batches:
            tokens_BL = torch.tensor(part)
            with torch.inference_mode():
                logits = self._model(tokens_BL[:, :-1]).logits.float()
                losses = torch.nn.functional.cross_entropy(
                    logits.flatten(0, 1), tokens_BL[:, 1:].flatten(), reduction="none"
                )
            yield float(losses.double().sum())


def run_tasks(
    directory: Path, tasks: Sequence[str], *, task_dir: Path | None, limit: int | None, batch_size: int = 8
) -> dict[str, dict[str, float]]:
    """By task and metric: ``lm-eval`` on its own or local task files (``task_dir``: YAML files with their data beside).

    Raises ConfigError where ``lm-eval`` isn't installed, a task isn't known, or its data aren't on this machine.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError("lm-eval isn't installed", hint='pip install "iota-open[eval]"; --text needs nothing more')
    if task_dir is not None and not task_dir.is_dir():
        raise ConfigError(f"{task_dir} is no directory", hint="name a directory with the tasks' YAML files")
    import os

    for name in _OFFLINE:
        os.environ.setdefault(name, "1")
    lm_eval: Any = importlib.import_module("lm_eval")
    manager_type: Any = importlib.import_module("lm_eval.tasks").TaskManager
    manager = manager_type(include_path=None if task_dir is None else str(task_dir.absolute()))
    unknown = [task for task in tasks if task not in manager.all_tasks]
    if unknown:
        raise ConfigError(f"lm-eval knows no task {unknown[0]!r}", hint="its YAML file lies where --task-dir says?")
    try:
        done = lm_eval.simple_evaluate(
            model="hf",
            model_args={"pretrained": str(directory.absolute()), "dtype": "float32"},
            tasks=list(tasks),
            task_manager=manager,
            limit=limit,
            batch_size=batch_size,
            device="cpu",
            bootstrap_iters=0,
        )
    except (ConnectionError, FileNotFoundError, OSError, ValueError) as error:
        why = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        hint = "the data of a task must be local files: dataset_path: json, dataset_kwargs: data_files: ..."
        raise ConfigError(f"lm-eval can't run {', '.join(tasks)}: {why}", hint=hint) from error
    return {
        task: {key: float(value) for key, value in found.items() if isinstance(value, int | float)}
        for task, found in done["results"].items()
    }
