"""What lanes (local steps) cost in loss, against what they spare of the merge: the same text and tokens for every setting.

Synchronous: a merge each step of L microbatches. Lanes: L lanes of H steps of one microbatch each between two merges, so
the same tokens in the same order. Each (variant, seed) is a part, saved under ``benchmarks/out/lanes`` when it is done; a
killed part goes on from its last checkpoint. Merge bytes a token: what one of L members sends of its own sum and gets of
the whole one, packed, by the tokens that it worked on. Ends with one JSON line; exit status 1 when a figure misses its
limit. Variants of which a seed is missing are left out of the table with ``--done``.

    python -m benchmarks.lanes             # all parts that aren't there yet, table.md and losses.png, then the figures
    python -m benchmarks.lanes --part h30-s0
    python -m benchmarks.lanes --done      # only what is there
    python -m benchmarks.lanes --quick     # tiny, under a minute, limits of its own
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
from blake3 import blake3

from benchmarks.corpus import OUT, Corpus, corpus
from benchmarks.lane_run import LaneRun, Variant
from benchmarks.lanes_report import plot, write_table
from benchmarks.parity import FIVE_MILLION
from subnet.errors import InputError
from subnet.run.config import (
    NO_AUDITS,
    DataSection,
    EvaluationSection,
    LanesSection,
    MergeSection,
    ModelSection,
    OptimizerSection,
    PipelineSection,
    RunConfig,
    RunSection,
    ScheduleSection,
)

LANES = 4
CHECKPOINT_EVERY_S = 60.0
AVERAGE = (1.0, 0.0)
"""The outer step that is the plain mean of the lanes' weights."""


@dataclass(frozen=True)
class Setting:
    """``steps`` counts inner steps: a multiple of every variant's ``inner_steps``."""

    name: str
    model: dict[str, Any]
    rows: int
    steps: int
    seeds: tuple[int, ...]
    evaluation_rows: int
    evaluate_every: int
    variants: tuple[Variant, ...]
    learning_rate: float = 2e-3
    sequence_length: int = 64

    def config(self, variant: Variant, seed: int) -> RunConfig:
        lanes = LanesSection()
        if not variant.is_sync:
            rate, momentum = variant.outer
            lanes = LanesSection(LANES, variant.inner_steps, outer_learning_rate=rate, outer_momentum=momentum)
        return RunConfig(
            audit=NO_AUDITS,
            run=RunSection(name="lanes", seed=seed, steps=self.steps // variant.inner_steps),
            model=ModelSection(config=self.model),
            data=DataSection(sequence_length=self.sequence_length),
            optimizer=OptimizerSection(learning_rate=self.learning_rate),
            schedule=ScheduleSection(warmup_steps=max(1, self.steps // 8)),
            pipeline=PipelineSection(microbatches=LANES if variant.is_sync else 1, microbatch_rows=self.rows),
            lanes=lanes,
            merge=MergeSection(qmax=variant.qmax),
            evaluation=EvaluationSection(rows=self.evaluation_rows),
        )


SYNC = Variant("sync", 1)
VARIANTS = (
    SYNC,
    Variant("h30", 30),
    Variant("h30-mean", 30, outer=AVERAGE),
    Variant("h30-4bit-feedback-mean", 30, qmax=7, feedback=True, outer=AVERAGE),
    Variant("h5-mean", 5, outer=AVERAGE),
    Variant("h30-keep-mean", 30, keep=True, outer=AVERAGE),
    Variant("h15-mean", 15, outer=AVERAGE),
    Variant("h30-top10-feedback-mean", 30, share=0.1, feedback=True, outer=AVERAGE),
    Variant("h30-4bit-mean", 30, qmax=7, outer=AVERAGE),
)
QUICK_VARIANTS = (
    SYNC,
    Variant("h5", 5),
    Variant("h10-keep", 10, keep=True),
    Variant("h10-4bit-feedback", 10, qmax=7, feedback=True),
    Variant("h10-top10-feedback", 10, share=0.1, feedback=True),
)
TINY: dict[str, Any] = {**FIVE_MILLION, "hidden_size": 48, "intermediate_size": 48, "vocab_size": 512}

FULL = Setting("full", FIVE_MILLION, 2, 240, (0, 1, 2), 128, 120, VARIANTS, sequence_length=32)
QUICK = Setting("quick", TINY, 2, 60, (0,), 32, 10, QUICK_VARIANTS, sequence_length=32)


class Progress(msgspec.Struct):
    """What a part has recorded so far; entries beyond the saved state are dropped on resuming."""

    identity: str
    losses: list[tuple[int, float]] = []
    """(inner steps done, training loss of the step or round that ended there)."""
    holdout: list[tuple[int, float]] = []
    """(inner steps done, hold-out loss)."""
    bytes_per_token: list[float] = []
    """Of the merge, by step or round."""
    cpu_s: float = 0.0
    done: bool = False


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


def _identity(setting: Setting, variant: Variant, seed: int, text: Corpus) -> str:
    """Of what the part computes; not of sections of a run file that it leaves alone."""
    same = (setting.model, setting.rows, setting.steps, setting.learning_rate, setting.sequence_length, variant, seed)
    digest = blake3(repr(same).encode())
    digest.update(text.training.tobytes()).update(text.holdout.tobytes())
    return digest.hexdigest()


def saved(setting: Setting, variant: Variant, seed: int, text: Corpus, out: Path) -> Progress:
    """What there is of a part."""
    return _open(out / f"{setting.name}-{variant.name}-s{seed}.json", _identity(setting, variant, seed, text))


def run_part(setting: Setting, variant: Variant, seed: int, text: Corpus, out: Path) -> Progress:
    """Runs a part to its end, unless its result is there already."""
    name = f"{setting.name}-{variant.name}-s{seed}"
    result, state = out / f"{name}.json", out / f"{name}.state"
    progress = saved(setting, variant, seed, text, out)
    if progress.done:
        return progress
    run = LaneRun(setting.config(variant, seed), variant, text.training, text.holdout)
    each, tokens = variant.inner_steps, setting.rows * setting.sequence_length
    if progress.losses and state.exists():
        run.load(state)
    else:
        run.calibrate()
    at = run.updates * each
    progress.losses = [entry for entry in progress.losses if entry[0] <= at]
    progress.holdout = [entry for entry in progress.holdout if entry[0] <= at] or [(0, run.holdout_loss())]
    progress.bytes_per_token = progress.bytes_per_token[: run.updates]
    began, saved_at = time.process_time(), time.monotonic()
    while run.updates * each < setting.steps:
        done = run.step(run.updates)
        at = run.updates * each
        progress.losses.append((at, done.loss))
        progress.bytes_per_token.append((done.lane_bytes + done.merged_bytes) / (each * tokens))
        if at % setting.evaluate_every < each or at == setting.steps:
            progress.holdout.append((at, run.holdout_loss()))
        if time.monotonic() - saved_at > CHECKPOINT_EVERY_S and at < setting.steps:
            progress.cpu_s, began = progress.cpu_s + time.process_time() - began, time.process_time()
            run.save(state)
            _save(result, progress)
            saved_at = time.monotonic()
            print(f"{name}: inner step {at}/{setting.steps}, loss {done.loss:.4f}", flush=True)
    progress.cpu_s += time.process_time() - began
    progress.done = True
    _save(result, progress)
    state.unlink(missing_ok=True)
    print(f"{name}: done, hold-out {progress.holdout[-1][1]:.4f}, {progress.cpu_s:.0f} CPU s", flush=True)
    return progress


Results = dict[tuple[str, int], Progress]


def figures_of(setting: Setting, results: Results) -> dict[str, float]:
    """``..._difference``: of the last hold-out loss against synchronous, means over the seeds that both have, signed.

    ``best_spared``: how many times fewer merge bytes the best variant within 1 % of synchronous has (0: none is within).
    ``least_difference_100x``: the smallest difference of those with at least 100 times fewer.
    """
    figures: dict[str, float] = {"best_spared": 0.0}
    for variant in setting.variants:
        seeds = [seed for seed in setting.seeds if {(variant.name, seed), ("sync", seed)} <= results.keys()]
        if not seeds:
            continue
        ours = [results[variant.name, seed].holdout[-1][1] for seed in seeds]
        sync = [results["sync", seed].holdout[-1][1] for seed in seeds]
        size = fmean(fmean(results[variant.name, seed].bytes_per_token) for seed in seeds)
        whole = fmean(fmean(results["sync", seed].bytes_per_token) for seed in seeds)
        name, difference, spared = variant.name, fmean(ours) / fmean(sync) - 1, whole / size
        figures |= {f"{name}_holdout_loss": fmean(ours), f"{name}_bytes_per_token": size, f"{name}_seeds": len(seeds)}
        if variant.is_sync:
            continue
        each = [a / b - 1 for a, b in zip(ours, sync, strict=True)]
        figures |= {f"{name}_difference": difference, f"{name}_largest_seed_difference": max(each, key=abs)}
        figures[f"{name}_spared"] = spared
        if difference <= 0.01:
            figures["best_spared"] = max(figures["best_spared"], spared)
        if spared >= 100:
            figures["least_difference_100x"] = min(figures.get("least_difference_100x", difference), difference)
    return figures


LIMITS = {"least_difference_100x": 0.01}
QUICK_LIMITS = {"h5_difference": 0.2}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lanes", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny model, under a minute")
    parser.add_argument("--part", help="run only this part (such as h30-s0), print no figures")
    parser.add_argument("--done", action="store_true", help="run nothing: figures of what is there")
    options = parser.parse_args(arguments)
    setting = QUICK if options.quick else FULL
    out = OUT / "lanes"
    out.mkdir(parents=True, exist_ok=True)
    if options.quick:
        for old in out.glob("quick-*"):
            old.unlink()
    text = _book(512) if options.quick else corpus(8192)
    parts = [(variant, seed) for seed in setting.seeds for variant in setting.variants]
    if options.part:
        parts = [(variant, seed) for variant, seed in parts if f"{variant.name}-s{seed}" == options.part]
        if not parts:
            raise InputError(f"no part is named {options.part!r}")
    results: Results = {}
    for variant, seed in parts:
        found = (saved if options.done else run_part)(setting, variant, seed, text, out)
        if found.done:
            results[variant.name, seed] = found
    if options.part:
        return 0
    figures = figures_of(setting, results)
    write_table(figures, setting.variants, out / f"{setting.name}-table.md")
    plot(
        figures, {part: p.holdout for part, p in results.items()}, setting.variants, out / f"{setting.name}-losses.png"
    )
    limits = QUICK_LIMITS if options.quick else LIMITS
    ok = all(name in figures and figures[name] <= limit for name, limit in limits.items())
    print(json.dumps({"name": "lanes", "figures": figures, "limits": limits, "ok": ok}))
    return 0 if ok else 1


def _book(vocab_size: int) -> Corpus:
    """The book that comes with the repository, every twentieth piece held out."""
    book = (Path(__file__).resolve().parent.parent / "iota" / "assets" / "moby_dick.txt").read_text()
    return corpus(vocab_size, documents=[book[i : i + 8192] for i in range(0, len(book), 8192)])


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except InputError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
