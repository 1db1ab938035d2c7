"""What a code of the boundaries does to the loss: the reference cut into three stages, with each code and without.

The same tokens and initial weights for every code of a seed. ``trim`` is the control: it clears the last four of 23 bits
at each boundary, so what it changes is what any change at all does. Each (code, seed) is a part, saved under
``benchmarks/out/codes`` when it is done; a killed part goes on from its last checkpoint. Also bytes a token and boundary
beside the formula, and the time that coding takes beside that of a microbatch. Ends with one JSON line; exit status 1
when a figure misses its limit.

    python -m benchmarks.codes             # all parts that aren't there yet, table.md and curves.png, then the figures
    python -m benchmarks.codes --part int4-s0
    python -m benchmarks.codes --quick     # tiny, under a minute, limits of its own
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import torch
from blake3 import blake3
from torch import Tensor

from benchmarks.codes_bytes import CodeCost, boundaries_of, cost_of
from benchmarks.codes_report import plot, write_table
from benchmarks.corpus import OUT, Corpus, corpus
from benchmarks.reference import Reference
from benchmarks.rounding import cut_model
from subnet.errors import InputError
from subnet.run.config import (
    NO_AUDITS,
    DataSection,
    EvaluationSection,
    ModelSection,
    OptimizerSection,
    PipelineSection,
    RunConfig,
    RunSection,
    ScheduleSection,
)

VARIANTS = ("raw", "trim", "int8", "int4")
CODES = ("raw", "int8", "int4")
CHECKPOINT_EVERY_S = 60.0


@dataclass(frozen=True)
class Setting:
    """The last tenth of the steps is evaluated after each step."""

    name: str
    hidden: int
    layers: int
    vocab_size: int
    cuts: tuple[int, ...]
    microbatches: int
    rows: int
    steps: int
    seeds: tuple[int, ...]
    evaluation_rows: int
    evaluate_every: int
    sequence_length: int = 64

    @property
    def model(self) -> dict[str, Any]:
        return {
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": 2 * self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": 128,
            "tie_word_embeddings": False,
        }

    def config(self, variant: str, seed: int) -> RunConfig:
        return RunConfig(
            audit=NO_AUDITS,
            run=RunSection(name="codes", seed=seed, steps=self.steps),
            model=ModelSection(config=self.model),
            data=DataSection(sequence_length=self.sequence_length),
            optimizer=OptimizerSection(learning_rate=2e-3),
            schedule=ScheduleSection(warmup_steps=max(1, self.steps // 8)),
            pipeline=PipelineSection(
                stages=len(self.cuts),
                microbatches=self.microbatches,
                microbatch_rows=self.rows,
                boundary_code=variant if variant in CODES else "raw",
            ),
            evaluation=EvaluationSection(rows=self.evaluation_rows),
        )

    @property
    def last_steps(self) -> range:
        return range(self.steps - max(1, self.steps // 10), self.steps)


FULL = Setting(
    "full", 128, 6, 2048, (0, 2, 4), 8, 8, steps=150, seeds=(0, 1, 2), evaluation_rows=128, evaluate_every=15
)
QUICK = Setting("quick", 128, 3, 512, (0, 1, 2), 2, 4, steps=16, seeds=(0,), evaluation_rows=16, evaluate_every=4)


class Progress(msgspec.Struct):
    """What a part has recorded so far; entries at or beyond ``updates`` of the saved state are dropped on resuming."""

    identity: str
    losses: list[tuple[int, float]] = []
    holdout: list[tuple[int, float]] = []
    """(step, hold-out loss after it); step -1 is the initial state."""
    costs: dict[str, CodeCost] = {}
    cpu_s: float = 0.0
    done: bool = False
    root: str = ""


def trim(x: Tensor) -> Tensor:
    """The control: fp32 with 19 bits of fraction."""
    return (x.view(torch.int32) & ~15).view(torch.float32)


def _save(path: Path, progress: Progress) -> None:
    partial = path.with_suffix(".partial")
    partial.write_bytes(msgspec.json.encode(progress))
    partial.replace(path)


def _open(path: Path, identity: str) -> Progress:
    if path.exists():
        progress = msgspec.json.decode(path.read_bytes(), type=Progress)
        if progress.identity == identity:
            return progress
    return Progress(identity)


def start_run(setting: Setting, variant: str, seed: int, text: Corpus) -> Reference:
    config = setting.config(variant, seed)
    run = Reference(config, setting.model, text.training, text.holdout, cuts=setting.cuts)
    if variant == "trim":
        cut_model(run.model, setting.cuts, trim)
    return run


def run_part(setting: Setting, variant: str, seed: int, text: Corpus, out: Path) -> Progress:
    """Runs a part to its end, unless its result is there already."""
    name = f"{setting.name}-{variant}-s{seed}"
    result, state = out / f"{name}.json", out / f"{name}.state"
    digest = blake3(msgspec.json.encode(setting.config(variant, seed)) + variant.encode() + str(setting).encode())
    digest.update(text.training.tobytes()).update(text.holdout.tobytes())
    progress = _open(result, digest.hexdigest())
    if progress.done:
        return progress
    run = start_run(setting, variant, seed, text)
    if progress.losses and state.exists():
        run.load(state)
    else:
        run.calibrate()
    progress.losses = [each for each in progress.losses if each[0] < run.updates]
    progress.holdout = [each for each in progress.holdout if each[0] < run.updates] or [(-1, run.holdout_loss())]
    began, saved_at = time.process_time(), time.monotonic()
    for t in range(run.updates, setting.steps):
        progress.losses.append((t, run.step(t).loss))
        if t in setting.last_steps or (t + 1) % setting.evaluate_every == 0:
            progress.holdout.append((t, run.holdout_loss()))
        if time.monotonic() - saved_at > CHECKPOINT_EVERY_S and t + 1 < setting.steps:
            progress.cpu_s, began = progress.cpu_s + time.process_time() - began, time.process_time()
            _save(result, progress)
            run.save(state)
            saved_at = time.monotonic()
            print(f"{name}: step {t + 1}/{setting.steps}, loss {progress.losses[-1][1]:.4f}", flush=True)
    progress.cpu_s += time.process_time() - began
    progress.root = run.state_root()
    if variant == "raw" and seed == setting.seeds[0]:
        tensors, microbatch_s = boundaries_of(run, setting.cuts)
        progress.costs = {code: cost_of(code, tensors, microbatch_s) for code in CODES}
    progress.done = True
    _save(result, progress)
    state.unlink(missing_ok=True)
    print(f"{name}: done, hold-out {last_mean(progress, setting):.4f}, {progress.cpu_s:.0f} CPU s", flush=True)
    return progress


def last_mean(progress: Progress, setting: Setting) -> float:
    """Mean hold-out loss over the last tenth of the steps."""
    return fmean(loss for t, loss in progress.holdout if t in setting.last_steps)


def training_mean(progress: Progress, setting: Setting) -> float:
    return fmean(loss for t, loss in progress.losses if t in setting.last_steps)


Results = dict[tuple[str, int], Progress]


def figures_of(setting: Setting, results: Results) -> dict[str, float]:
    """``..._difference``: of the mean over the seeds against raw, signed (above 0 is worse)."""
    figures: dict[str, float] = {}
    for variant in VARIANTS:
        for what, mean in (("holdout", last_mean), ("training", training_mean)):
            losses = [mean(results[variant, seed], setting) for seed in setting.seeds]
            raw = [mean(results["raw", seed], setting) for seed in setting.seeds]
            figures[f"{variant}_{what}_loss"] = fmean(losses)
            if variant != "raw":
                each = [a / b - 1 for a, b in zip(losses, raw, strict=True)]
                figures[f"{variant}_{what}_difference"] = fmean(losses) / fmean(raw) - 1
                figures[f"{variant}_{what}_largest_seed_difference"] = max(each, key=abs)
    for code, cost in results["raw", setting.seeds[0]].costs.items():
        figures |= {f"{code}_{name}": value for name, value in msgspec.structs.asdict(cost).items()}
        figures[f"{code}_bytes_off_formula"] = abs(cost.bytes_per_token - cost.formula_bytes_per_token)
    return figures


LIMITS = {
    "int8_holdout_difference": 0.002,
    "int4_holdout_difference": 0.02,
    "int8_bytes_off_formula": 1e-9,
    "int4_bytes_off_formula": 1e-9,
    "int8_share_of_microbatch": 0.05,
    "int4_share_of_microbatch": 0.05,
}
QUICK_LIMITS = {
    "int8_holdout_difference": 0.01,
    "int4_holdout_difference": 0.05,
    "int8_bytes_off_formula": 1e-9,
    "int4_bytes_off_formula": 1e-9,
}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.codes", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny model, under a minute")
    parser.add_argument("--part", help="run only this part (such as int8-s0), print no figures")
    options = parser.parse_args(arguments)
    setting = QUICK if options.quick else FULL
    parts = [(variant, seed) for seed in setting.seeds for variant in VARIANTS]
    if options.part:
        parts = [part for part in parts if f"{part[0]}-s{part[1]}" == options.part]
        if not parts:
            raise InputError(f"no part is named {options.part!r}")
    out = OUT / "codes"
    out.mkdir(parents=True, exist_ok=True)
    if options.quick:
        for old in out.glob("quick-*"):
            old.unlink()
    text = _text(setting.vocab_size)
    results = {part: run_part(setting, *part, text, out) for part in parts}
    if options.part:
        return 0
    figures = figures_of(setting, results)
    write_table(figures, VARIANTS, out / f"{setting.name}-table.md")
    plot({part: (p.losses, p.holdout) for part, p in results.items()}, out / f"{setting.name}-curves.png")
    limits = QUICK_LIMITS if options.quick else LIMITS
    ok = all(figures[name] <= limit for name, limit in limits.items())
    print(json.dumps({"name": "codes", "figures": figures, "limits": limits, "ok": ok}))
    return 0 if ok else 1


def _text(vocab_size: int) -> Corpus:
    """The book that comes with the repository, every twentieth piece held out."""
    book = (Path(__file__).resolve().parent.parent / "iota" / "assets" / "moby_dick.txt").read_text()
    return corpus(vocab_size, documents=[book[i : i + 8192] for i in range(0, len(book), 8192)])


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except InputError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
