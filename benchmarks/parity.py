"""Fixed point learns what fp32 learns: the reference against plain PyTorch, same data, weights, schedule.

Each (setting, variant, seed) is a part, saved as JSON under ``benchmarks/out/parity`` when it is done; a killed part
goes on from its last checkpoint. Ends with one JSON line; exit status 1 when a figure misses its limit.

    python -m benchmarks.parity             # all parts that aren't there yet, then the figures
    python -m benchmarks.parity --part m16-fixed-s0
    python -m benchmarks.parity --quick     # tiny, under a minute, limits of its own
    python -m benchmarks.parity --update-delay 1    # gradients one update old: against plain PyTorch with and without
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
from blake3 import blake3

from benchmarks.corpus import OUT, Corpus, corpus
from benchmarks.plain import Plain
from benchmarks.reference import Reference
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

CHECKPOINT_EVERY_S = 120.0


@dataclass(frozen=True)
class Setting:
    """One comparison. The last twentieth of the steps is evaluated after each step."""

    name: str
    model: dict[str, Any]
    microbatches: int
    rows: int
    sequence_length: int
    steps: int
    seeds: tuple[int, ...]
    evaluation_rows: int
    learning_rate: float = 2e-3
    evaluate_every: int = 25
    measure_every: int = 5

    def config(self, seed: int, update_delay: int = 0) -> RunConfig:
        return RunConfig(
            audit=NO_AUDITS,
            run=RunSection(name=f"parity-{self.name}", seed=seed, steps=self.steps),
            model=ModelSection(config=self.model),
            data=DataSection(sequence_length=self.sequence_length),
            optimizer=OptimizerSection(learning_rate=self.learning_rate),
            schedule=ScheduleSection(warmup_steps=max(1, self.steps // 8)),
            pipeline=PipelineSection(
                microbatches=self.microbatches, microbatch_rows=self.rows, update_delay=update_delay
            ),
            evaluation=EvaluationSection(rows=self.evaluation_rows),
        )

    @property
    def last_steps(self) -> range:
        return range(self.steps - math.ceil(self.steps / 20), self.steps)


def _llama(vocab_size: int, hidden: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 1,
        "vocab_size": vocab_size,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
    }


FIVE_MILLION = _llama(8192, 256, 2, 4)
"""4.9M parameters, most of them in embedding and head: the cheapest shape of that size, and the burstiest gradients."""

FULL = (
    Setting("m16", FIVE_MILLION, 16, 8, 64, steps=245, seeds=(0, 1, 2), evaluation_rows=128),
    Setting("m512", FIVE_MILLION, 512, 1, 32, steps=60, seeds=(0,), evaluation_rows=256, measure_every=10),
)
QUICK = (Setting("quick", _llama(512, 48, 2, 4), 8, 2, 32, steps=40, seeds=(0, 1), evaluation_rows=64),)


DELAYED = "-delayed"
VARIANTS = {0: ("plain", "fixed"), 1: ("plain", f"plain{DELAYED}", f"fixed{DELAYED}")}
"""By ``update_delay``: what is run and compared."""


@dataclass(frozen=True)
class Part:
    setting: Setting
    variant: str
    seed: int

    @property
    def config(self) -> RunConfig:
        return self.setting.config(self.seed, int(self.variant.endswith(DELAYED)))

    @property
    def name(self) -> str:
        return f"{self.setting.name}-{self.variant}-s{self.seed}"


class Progress(msgspec.Struct):
    """What a part has recorded so far; entries at or beyond ``updates`` of the saved state are dropped on resuming."""

    identity: str
    losses: list[tuple[int, float]] = []
    holdout: list[tuple[int, float]] = []
    """(step, hold-out loss after it); step -1 is the initial state."""
    measured: list[tuple[int, dict[str, dict[str, float]]]] = []
    cpu_s: float = 0.0
    done: bool = False
    root: str = ""
    """State root after the last step; plain PyTorch has none."""


def parts_of(settings: tuple[Setting, ...], update_delay: int = 0) -> Iterator[Part]:
    for setting in settings:
        for seed in setting.seeds:
            for variant in VARIANTS[update_delay]:
                yield Part(setting, variant, seed)


def _identity(config: RunConfig, text: Corpus) -> str:
    digest = blake3(msgspec.json.encode(config))
    digest.update(text.training.tobytes())
    digest.update(text.holdout.tobytes())
    return digest.hexdigest()


def _load(path: Path, identity: str) -> Progress:
    if path.exists():
        progress = msgspec.json.decode(path.read_bytes(), type=Progress)
        if progress.identity == identity:
            return progress
    return Progress(identity)


def _save(path: Path, progress: Progress) -> None:
    partial = path.with_suffix(".partial")
    partial.write_bytes(msgspec.json.encode(progress))
    partial.replace(path)


def _resume(run: Reference | Plain, state: Path, progress: Progress) -> None:
    """Brings the run to its checkpoint, or to its start where there is none."""
    known = bool(progress.losses)
    if known and state.exists():
        run.load(state)
    elif isinstance(run, Reference):
        run.calibrate()
    at = run.updates
    progress.losses = [each for each in progress.losses if each[0] < at]
    progress.holdout = [each for each in progress.holdout if each[0] < at]
    progress.measured = [each for each in progress.measured if each[0] < at]


def run_part(part: Part, text: Corpus, out: Path) -> Progress:
    """Runs a part to its end, unless its result is there already."""
    setting, config = part.setting, part.config
    result, state = out / f"{part.name}.json", out / f"{part.name}.state"
    progress = _load(result, _identity(config, text))
    if progress.done:
        return progress
    kind = Reference if part.variant.startswith("fixed") else Plain
    run = kind(config, setting.model, text.training, text.holdout)
    _resume(run, state, progress)
    began, saved_at = time.process_time(), time.monotonic()
    if not progress.holdout:
        progress.holdout.append((-1, run.holdout_loss()))
    while run.updates < setting.steps:
        t = run.updates
        _one_step(run, t, setting, progress)
        if time.monotonic() - saved_at > CHECKPOINT_EVERY_S and run.updates < setting.steps:
            progress.cpu_s, began = progress.cpu_s + time.process_time() - began, time.process_time()
            _save(result, progress)
            run.save(state)
            saved_at = time.monotonic()
            print(f"{part.name}: step {t + 1}/{setting.steps}, loss {progress.losses[-1][1]:.4f}", flush=True)
    progress.cpu_s += time.process_time() - began
    progress.done = True
    progress.root = run.state_root() if isinstance(run, Reference) else ""
    _save(result, progress)
    state.unlink(missing_ok=True)
    print(f"{part.name}: done, hold-out {last_mean(progress, setting):.4f}, {progress.cpu_s:.0f} CPU s", flush=True)
    return progress


def _one_step(run: Reference | Plain, t: int, setting: Setting, progress: Progress) -> None:
    if isinstance(run, Reference):
        report = run.step(t, measure=t % setting.measure_every == 1)
        progress.losses.append((t, report.loss))
        if report.measured:
            progress.measured.append((t, {name: each.as_dict() for name, each in report.measured.items()}))
    else:
        progress.losses.append((t, run.step(t)))
    if t in setting.last_steps or (t + 1) % setting.evaluate_every == 0:
        progress.holdout.append((t, run.holdout_loss()))


def last_mean(progress: Progress, setting: Setting) -> float:
    """Mean hold-out loss over the last twentieth of the steps."""
    return fmean(loss for t, loss in progress.holdout if t in setting.last_steps)


def per_tensor(runs: list[Progress]) -> dict[str, dict[str, float]]:
    """Mean and largest measure of each tensor over the measured steps."""
    found: dict[str, dict[str, list[float]]] = {}
    for run in runs:
        for _, tensors in run.measured:
            for tensor, measures in tensors.items():
                for measure, value in measures.items():
                    found.setdefault(tensor, {}).setdefault(measure, []).append(value)
    return {
        tensor: {f"{kind}_{measure}": fold(v) for measure, v in measures.items() for kind, fold in FOLDS}
        for tensor, measures in found.items()
    }


FOLDS = (("mean", fmean), ("max", max))


def figures_of(setting: Setting, results: dict[str, Progress], out: Path) -> dict[str, float]:
    """The comparison of one setting; energies are the worst tensor's; the whole table goes to a file.

    ``share_lost_above_1e-3``: of all measurements (one tensor in one step), in which clipping cost more than that.
    """
    fixed = [results[Part(setting, "fixed", seed).name] for seed in setting.seeds]
    plain = [results[Part(setting, "plain", seed).name] for seed in setting.seeds]
    means = [[last_mean(run, setting) for run in runs] for runs in (fixed, plain)]
    table = per_tensor(fixed)
    (out / f"{setting.name}-tensors.json").write_text(json.dumps(table, indent=1))
    name = setting.name
    figures = {
        f"{name}_fixed_loss": fmean(means[0]),
        f"{name}_plain_loss": fmean(means[1]),
        f"{name}_difference": abs(fmean(means[0]) / fmean(means[1]) - 1),
        f"{name}_largest_seed_difference": max(abs(a / b - 1) for a, b in zip(*means, strict=True)),
    }
    for measure in ("lost_energy", "error_energy", "quantising_energy"):
        for kind, _ in FOLDS:
            figures[f"{name}_{kind}_{measure}"] = max(measures[f"{kind}_{measure}"] for measures in table.values())
    measured = [measures["lost_energy"] for run in fixed for _, step in run.measured for measures in step.values()]
    figures[f"{name}_share_lost_above_1e-3"] = sum(lost > 1e-3 for lost in measured) / len(measured)
    return figures


def figures_of_delay(setting: Setting, results: dict[str, Progress]) -> dict[str, float]:
    """What the fixed point does to a delayed run, and what the delay does to a run."""
    means = {
        variant: fmean(last_mean(results[Part(setting, variant, seed).name], setting) for seed in setting.seeds)
        for variant in VARIANTS[1]
    }
    fixed, plain = means[f"fixed{DELAYED}"], means[f"plain{DELAYED}"]
    return {
        f"{setting.name}_delayed_fixed_loss": fixed,
        f"{setting.name}_delayed_plain_loss": plain,
        f"{setting.name}_plain_loss": means["plain"],
        f"{setting.name}_delayed_difference": abs(fixed / plain - 1),
        f"{setting.name}_cost_of_delay": fixed / means["plain"] - 1,
    }


def _swarm_figure(path: Path, results: dict[str, Progress]) -> float:
    """A swarm's run against the plain run of its seed: the file holds ``seed`` and ``holdout`` as [step, loss]."""
    found = json.loads(path.read_text())
    setting = FULL[0]
    swarm = Progress("", holdout=[(int(t), float(loss)) for t, loss in found["holdout"]])
    plain = results[Part(setting, "plain", int(found["seed"])).name]
    return abs(last_mean(swarm, setting) / last_mean(plain, setting) - 1)


LIMITS = {
    "m16_difference": 0.005,
    "m512_difference": 0.005,
    "swarm_difference": 0.005,
    "m16_delayed_difference": 0.005,
    "m512_delayed_difference": 0.005,
}
QUICK_LIMITS = {
    "quick_difference": 0.02,
    "quick_mean_lost_energy": 0.1,
    "quick_mean_error_energy": 0.1,
    "quick_delayed_difference": 0.02,
}


def _texts(quick: bool) -> Corpus:
    if not quick:
        return corpus(8192)
    root = Path(__file__).parent.parent
    files = sorted([*root.glob("docs/*.md"), *root.glob("benchmarks/*.py"), *root.glob("subnet/**/*.py")])
    whole = "\n".join(path.read_text() for path in files)
    return corpus(512, documents=[whole[i : i + 4096] for i in range(0, len(whole), 4096)])


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parity", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny model, under a minute")
    parser.add_argument("--part", help="run only this part, print no figures")
    parser.add_argument("--setting", help="only this setting (m16, m512)")
    parser.add_argument("--update-delay", type=int, default=0, choices=[0, 1], help="1: compare delayed runs")
    parser.add_argument("--swarm-result", type=Path, help="JSON with the hold-out losses of a swarm's run")
    options = parser.parse_args(arguments)
    settings = QUICK if options.quick else FULL
    if options.setting:
        settings = tuple(setting for setting in settings if setting.name == options.setting)
    every = list(parts_of(settings, options.update_delay))
    parts = [part for part in every if options.part in (None, part.name)]
    if not parts:
        raise InputError(f"no part is named {options.part!r}: {', '.join(part.name for part in every)}")
    out = OUT / "parity"
    out.mkdir(parents=True, exist_ok=True)
    text = _texts(options.quick)
    results = {part.name: run_part(part, text, out) for part in parts}
    if options.part:
        return 0
    compared = (
        figures_of_delay(setting, results) if options.update_delay else figures_of(setting, results, out)
        for setting in settings
    )
    figures = {name: value for found in compared for name, value in found.items()}
    if options.swarm_result:
        figures["swarm_difference"] = _swarm_figure(options.swarm_result, results)
    limits = {name: limit for name, limit in (QUICK_LIMITS if options.quick else LIMITS).items() if name in figures}
    ok = all(figures[name] <= limit for name, limit in limits.items())
    print(json.dumps({"name": "parity", "figures": figures, "limits": limits, "ok": ok}))
    return 0 if ok else 1


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except InputError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
