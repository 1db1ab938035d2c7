"""AdamW against Muon against AdamW with 8-bit moments: the reference on real text, same tokens, same initial weights.

Each (optimizer, learning rate, seed) is a part, saved under ``benchmarks/out/optimizers`` when it is done; a killed part goes on
from its last checkpoint. The parts of most interest come first, so that a stop after any of them leaves something to say. Ends
with a table and one JSON line: hold-out losses, their difference to AdamW's best in per cent, bytes of state for each parameter.
Exit status 1 where a loss misses its limit: 8-bit moments within 1 % of AdamW's, Muon not above it.

    python -m benchmarks.optimizers            # every part that isn't there yet, or as many as fit into --cpu-minutes
    python -m benchmarks.optimizers --quick    # tiny, under a minute, limits of its own
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import msgspec
from blake3 import blake3

from benchmarks.corpus import OUT, Corpus, corpus
from benchmarks.reference import Reference
from subnet.numerics.state_arrays import ARRAYS, state_kinds
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

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "muon": {"kind": "muon"},
    "adamw8bit": {"state_bits": 8},
}
CHECKPOINT_EVERY_S = 60.0


@dataclass(frozen=True)
class Setting:
    name: str
    hidden: int
    layers: int
    vocab_size: int
    microbatches: int
    rows: int
    steps: int
    evaluation_rows: int
    parts: tuple[tuple[str, float, int], ...]
    limit_8bit: float
    sequence_length: int = 128

    @property
    def tokens(self) -> int:
        """Of one part."""
        return self.steps * self.microbatches * self.rows * self.sequence_length

    def config(self, optimizer: str, rate: float, seed: int) -> RunConfig:
        model = {
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": 3 * self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.sequence_length,
            "tie_word_embeddings": False,
        }
        return RunConfig(
            audit=NO_AUDITS,
            run=RunSection(name="optimizers", seed=seed, steps=self.steps),
            model=ModelSection(config=model),
            data=DataSection(sequence_length=self.sequence_length),
            optimizer=OptimizerSection(learning_rate=rate, **OPTIMIZERS[optimizer]),
            schedule=ScheduleSection(kind="wsd", warmup_steps=max(1, self.steps // 10), final_fraction=0.0),
            pipeline=PipelineSection(microbatches=self.microbatches, microbatch_rows=self.rows),
            evaluation=EvaluationSection(rows=self.evaluation_rows),
        )


FULL = Setting(
    "full", 128, 4, 2048, 4, 8, 80, 32,
    (
        ("adamw", 4e-3, 0), ("muon", 4e-3, 0), ("adamw8bit", 4e-3, 0),
        ("adamw", 2e-3, 0), ("adamw8bit", 2e-3, 0), ("muon", 2e-3, 0),
        ("adamw", 2e-3, 1), ("adamw8bit", 2e-3, 1), ("muon", 2e-3, 1),
        ("adamw", 2e-3, 2), ("adamw8bit", 2e-3, 2), ("muon", 2e-3, 2),
        ("adamw", 1e-3, 0), ("adamw", 8e-3, 0), ("muon", 8e-3, 0),
    ),
    0.01,
)  # fmt: skip
QUICK = Setting("quick", 64, 2, 512, 2, 4, 12, 8, (("adamw", 4e-3, 0), ("muon", 4e-3, 0), ("adamw8bit", 4e-3, 0)), 0.05)


class Progress(msgspec.Struct):
    """What a part has recorded; ``holdout``: (updates, loss), the last entry of the final state."""

    identity: str
    losses: list[float] = []
    holdout: list[tuple[int, float]] = []
    cpu_s: float = 0.0
    done: bool = False


def part_name(part: tuple[str, float, int]) -> str:
    optimizer, rate, seed = part
    return f"{optimizer}-{rate:g}-s{seed}"


def run_part(setting: Setting, part: tuple[str, float, int], text: Corpus) -> Progress:
    """The part from its last checkpoint to its end."""
    directory = OUT / "optimizers" / setting.name
    directory.mkdir(parents=True, exist_ok=True)
    config = setting.config(*part)
    name = part_name(part)
    identity = blake3(msgspec.json.encode((config, text.vocab_size))).hexdigest()[:16]
    record, state = directory / f"{name}.json", directory / f"{name}.npz"
    progress = Progress(identity)
    if record.exists():
        found = msgspec.json.decode(record.read_bytes(), type=Progress)
        progress = found if found.identity == identity else progress
    if progress.done:
        return progress
    began = time.process_time() - progress.cpu_s
    reference = Reference(config, dict(config.model.config or {}), text.training, text.holdout)
    if progress.losses and state.exists():
        reference.load(state)
        progress.losses = progress.losses[: reference.updates]
        progress.holdout = [entry for entry in progress.holdout if entry[0] <= reference.updates]
    else:
        reference.calibrate()
        progress.losses, progress.holdout = [], [(0, reference.holdout_loss())]
    saved = time.monotonic()
    for step in range(reference.updates, setting.steps):
        progress.losses.append(reference.step(step).loss)
        if (step + 1) % max(1, setting.steps // 8) == 0 or step + 1 == setting.steps:
            progress.holdout.append((step + 1, reference.holdout_loss()))
        if time.monotonic() - saved > CHECKPOINT_EVERY_S:
            reference.save(state)
            progress.cpu_s, saved = time.process_time() - began, time.monotonic()
            _save(record, progress)
    progress.cpu_s, progress.done = time.process_time() - began, True
    _save(record, progress)
    state.unlink(missing_ok=True)
    print(f"{name}: hold-out {progress.holdout[-1][1]:.4f}, {progress.cpu_s:.0f} CPU s", flush=True)
    return progress


def _save(path: Any, progress: Progress) -> None:
    partial = path.with_suffix(".partial")
    partial.write_bytes(msgspec.json.encode(progress))
    partial.replace(path)


def state_bytes_per_parameter(config: RunConfig) -> float:
    """Of weights, moments and scales, with blocks of 1024."""
    per_block = sum(4 for kind in state_kinds(config) if ARRAYS[kind].per_block)
    return (
        sum(int(ARRAYS[kind].dtype[1:]) for kind in state_kinds(config) if not ARRAYS[kind].per_block)
        + per_block / 1024
    )


def figures(setting: Setting, done: dict[tuple[str, float, int], Progress]) -> dict[str, Any]:
    """By optimizer: its best rate of seed 0, the mean over the seeds that were run at it, and against AdamW's of those seeds."""
    last = {part: progress.holdout[-1][1] for part, progress in done.items()}
    found: dict[str, Any] = {}
    for optimizer in OPTIMIZERS:
        rates = {rate: loss for (name, rate, seed), loss in last.items() if name == optimizer and seed == 0}
        if not rates:
            continue
        shared = [
            (loss, last["adamw", rate, seed])
            for (name, rate, seed), loss in last.items()
            if name == optimizer and ("adamw", rate, seed) in last
        ]
        found[optimizer] = {
            "best_rate": min(rates, key=lambda rate: rates[rate]),
            "best_loss": min(rates.values()),
            "against_adamw_percent": 100 * fmean(loss / other - 1 for loss, other in shared) if shared else None,
            "pairs": len(shared),
            "state_bytes_per_parameter": state_bytes_per_parameter(setting.config(optimizer, 1e-3, 0)),
        }
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--cpu-minutes", type=float, default=30.0)
    args = parser.parse_args(argv)
    setting = QUICK if args.quick else FULL
    text = corpus(setting.vocab_size)
    done: dict[tuple[str, float, int], Progress] = {}
    spent = 0.0
    for part in setting.parts:
        if spent > 60 * args.cpu_minutes:
            break
        done[part] = run_part(setting, part, text)
        spent += done[part].cpu_s
    table = figures(setting, done)
    for part, progress in done.items():
        curve = " ".join(f"{loss:.3f}" for _, loss in progress.holdout)
        print(f"| {part[0]} | {part[1]:g} | {part[2]} | {progress.holdout[-1][1]:.4f} | {curve} |")
    eight, muon = table.get("adamw8bit"), table.get("muon")
    ok = eight is None or eight["against_adamw_percent"] <= 100 * setting.limit_8bit
    ok = ok and (muon is None or args.quick or muon["best_loss"] <= table["adamw"]["best_loss"])
    summary = {"benchmark": "optimizers", "setting": setting.name, "tokens": setting.tokens, "cpu_s": round(spent)}
    print(json.dumps({**summary, "parts": len(done), "optimizers": table, "ok": ok}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
