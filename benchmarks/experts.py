"""A mixture of experts against a dense model of equal active parameters: same text, same steps, three stages each.

A Qwen3-MoE of 31 M parameters, of which a token meets 9 M, and a Qwen3 of 9 M are trained from scratch by swarms of three
miners on State of the Union addresses and Moby-Dick (:mod:`benchmarks.corpus`). What is compared is the hold-out loss;
how evenly the experts are used is counted in plain ``transformers`` on exports of the run, and drawn.

Each model is a part that is done once: killed, it goes on from its swarm's journal when started again. Ends with one JSON
line; exit status 1 when a figure misses its limit.

    python -m benchmarks.experts                 # about 1 M tokens; OUT/experts/experts.png
    python -m benchmarks.experts --tokens 500000
    python -m benchmarks.experts --part dense    # one of the two alone, beside the other
    python -m benchmarks.experts --quick         # tiny, with the one-process reference beside it
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from blake3 import blake3

from benchmarks.corpus import OUT, fetch_documents
from benchmarks.experts_load import ExpertLoad, draw, measure_load
from benchmarks.reference import Reference
from benchmarks.setting import stream_tokens
from iota.export import export_run
from iota.prepare import PreparedData, prepare_data
from iota.swarm import LocalSwarm, SwarmOptions
from subnet.errors import ConfigError
from subnet.protocol.api import RunStatus
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
    SnapshotSection,
)
from subnet.store.disk import atomic_write
from subnet.timing import Deadline

LIMIT_S = 6 * 3600.0
EXPORT_S = 900.0
STAGES = 3
NUM_EXPORTS = 4
"""Looks at the experts after the start: the last one is the end."""


@dataclass(frozen=True)
class Shape:
    """Widths and pace of both models; a token meets ``chosen`` of ``experts`` experts of width ``expert_width``."""

    hidden: int = 256
    layers: int = 8
    heads: int = 4
    experts: int = 16
    chosen: int = 2
    expert_width: int = 256
    vocab_size: int = 8192
    microbatches: int = 16
    rows: int = 8
    sequence_length: int = 128
    evaluation_rows: int = 64
    learning_rate: float = 2e-3
    router_loss: float = 0.01

    @property
    def step_tokens(self) -> int:
        return self.microbatches * self.rows * self.sequence_length

    def model(self, kind: str) -> dict[str, Any]:
        """``moe``, or ``dense`` with an MLP as wide as the experts that a token meets."""
        common: dict[str, Any] = {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads // 2,
            "head_dim": self.hidden // self.heads,
            "max_position_embeddings": self.sequence_length,
            "intermediate_size": self.chosen * self.expert_width,
            "tie_word_embeddings": False,
        }
        if kind == "dense":
            return {"model_type": "qwen3", **common}
        return {
            "model_type": "qwen3_moe",
            **common,
            "num_experts": self.experts,
            "num_experts_per_tok": self.chosen,
            "moe_intermediate_size": self.expert_width,
            "norm_topk_prob": True,
            "output_router_logits": True,
            "router_aux_loss_coef": self.router_loss,
        }

    def config(self, kind: str, steps: int, data: Path) -> RunConfig:
        every = max(1, steps // NUM_EXPORTS)
        return RunConfig(
            audit=NO_AUDITS,
            run=RunSection(name=f"experts-{kind}", seed=0, steps=steps),
            model=ModelSection(config=self.model(kind)),
            data=DataSection(sources=(str(data),), sequence_length=self.sequence_length),
            optimizer=OptimizerSection(learning_rate=self.learning_rate),
            schedule=ScheduleSection(warmup_steps=max(1, steps // 8)),
            pipeline=PipelineSection(stages=STAGES, microbatches=self.microbatches, microbatch_rows=self.rows),
            evaluation=EvaluationSection(every_steps=every, rows=self.evaluation_rows),
            snapshot=SnapshotSection(every_steps=every, keep_steps=steps),
        )


QUICK = Shape(
    hidden=32, layers=3, heads=2, experts=4, expert_width=24, vocab_size=512,
    microbatches=2, rows=2, sequence_length=32, evaluation_rows=4, learning_rate=1e-2,
)  # fmt: skip


class Part(msgspec.Struct, frozen=True):
    """What a finished run left; ``holdout`` is (updates done, loss)."""

    identity: str
    root: str
    num_parameters: int
    holdout: tuple[tuple[int, float], ...]
    tokens_per_s: float
    load: tuple[ExpertLoad, ...] = ()


def prepared(out: Path, shape: Shape, *, quick: bool) -> PreparedData:
    """The text as tokens, made once."""
    texts = out / "text"
    if not texts.exists():
        texts.mkdir(parents=True)
        root = Path(__file__).parent.parent
        files = [root / "docs" / "arithmetic.md", root / "docs" / "protocol.md"]
        documents = [path.read_text() for path in files] if quick else fetch_documents()
        for number, document in enumerate(documents):
            (texts / f"{number:03}.txt").write_text(document)
    sources = [str(path) for path in sorted(texts.glob("*.txt"))]
    return prepare_data(sources, out / "data", vocab_size=shape.vocab_size, holdout_fraction=0.05)


def run_part(kind: str, shape: Shape, steps: int, data: PreparedData, out: Path) -> Part:
    """Train one model to its end, unless its result is there; a swarm that was killed goes on."""
    config = shape.config(kind, steps, data.directory)
    identity = blake3(msgspec.json.encode(config) + data.manifest_path.read_bytes()).hexdigest()
    path, directory = out / f"{kind}.json", out / f"{kind}-{identity[:8]}"
    if path.exists() and (found := msgspec.json.decode(path.read_bytes(), type=Part)).identity == identity:
        return found
    begun = directory / "begun"
    with LocalSwarm(directory, None if begun.exists() else config, STAGES, SwarmOptions(measure_costs=False)) as swarm:
        status = _finished(swarm, begun)
        holdout = holdout_by_updates(status, steps)
        load = _loads(swarm, config, out / f"{kind}-exports", data) if kind == "moe" else ()
        part = Part(identity, swarm.final_root(), _parameters(config), holdout, status.tokens_per_s, load)
    atomic_write(path, msgspec.json.encode(part))
    return part


def holdout_by_updates(status: RunStatus, steps: int) -> tuple[tuple[int, float], ...]:
    """(updates done, hold-out loss): a step's view has the loss of the state that it began with."""
    found = [(view.step, view.holdout_loss) for view in status.steps if view.holdout_loss is not None]
    if status.final_holdout_loss is not None:
        found.append((steps, status.final_holdout_loss))
    return tuple(found)


def _parameters(config: RunConfig) -> int:
    from subnet.model.registry import load_architecture

    return load_architecture(config.model.config or {}).units(config.data.sequence_length).num_parameters


def _finished(swarm: LocalSwarm, begun: Path) -> RunStatus:
    told = time.monotonic()

    def seen(status: RunStatus) -> None:
        nonlocal told
        begun.touch()
        if time.monotonic() - told > 60:
            told = time.monotonic()
            last = status.steps[-1].loss if status.steps else float("nan")
            at = status.summary
            print(
                f"{at.name}: step {at.step}/{at.steps}, loss {last:.4f}, {status.tokens_per_s:.0f} tokens/s", flush=True
            )

    return swarm.wait_until(
        lambda status: status.summary.state == "finished", Deadline.after(LIMIT_S), steps=100_000, poll_s=1.0, seen=seen
    )


def _loads(swarm: LocalSwarm, config: RunConfig, directory: Path, data: PreparedData) -> tuple[ExpertLoad, ...]:
    """How the experts are used at the start, at each quarter and at the end."""
    steps, every = config.run.steps, config.snapshot.every_steps
    found: list[ExpertLoad] = []
    holdout = stream_tokens(data.manifest, data.manifest.holdout, _reader(data))
    for step in sorted({*range(0, steps, every), steps}):
        target = directory / str(step)
        if not (target / "config.json").exists():
            export_run(swarm.remote(), config.run.name, target, step=step, deadline=Deadline.after(EXPORT_S))
        found.append(measure_load(target, step, holdout, config.data.sequence_length, config.evaluation.rows))
    return tuple(found)


def _reader(data: PreparedData) -> Callable[[str], bytes]:
    files = {str(blob): path for blob, path in data.files().items()}
    return lambda blob: files[blob].read_bytes()


def reference_root(shape: Shape, steps: int, data: PreparedData) -> str:
    """Of the mixture, by one process of plain ``transformers``."""
    config, read = shape.config("moe", steps, data.directory), _reader(data)
    streams = (stream_tokens(data.manifest, each, read) for each in (data.manifest.train, data.manifest.holdout))
    reference = Reference(config, config.model.config or {}, *streams)
    reference.calibrate()
    for step in range(steps):
        reference.step(step)
    return reference.state_root()


def figures_of(shape: Shape, steps: int, moe: Part, dense: Part) -> dict[str, Any]:
    idle = shape.layers * (shape.experts - shape.chosen) * 3 * shape.hidden * shape.expert_width
    last = moe.load[-1]
    return {
        "tokens": steps * shape.step_tokens,
        "steps": steps,
        "moe_parameters": moe.num_parameters,
        "moe_active_parameters": moe.num_parameters - idle,
        "dense_parameters": dense.num_parameters,
        "moe_holdout": moe.holdout[-1][1],
        "dense_holdout": dense.holdout[-1][1],
        "moe_less_dense": moe.holdout[-1][1] - dense.holdout[-1][1],
        "busiest_expert": last.busiest,
        "busiest_expert_at_start": moe.load[0].busiest,
        "idlest_expert": last.idlest,
        "idlest_expert_at_start": moe.load[0].idlest,
        "moe_tokens_per_s": moe.tokens_per_s,
        "dense_tokens_per_s": dense.tokens_per_s,
        "moe_root": moe.root,
        "dense_root": dense.root,
    }


LIMITS = {"moe_less_dense": 0.0, "busiest_expert": 3.0}
"""The mixture is not worse, and no expert has thrice its share."""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.experts", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny, with the reference beside it")
    parser.add_argument("--tokens", type=int, default=1_000_000, help="training tokens of each model")
    parser.add_argument("--part", choices=["moe", "dense"], help="train only this one, print no figures")
    parser.add_argument("--out", type=Path, default=None, help="where parts and picture go")
    options = parser.parse_args(arguments)
    shape = QUICK if options.quick else Shape()
    steps = 8 if options.quick else max(NUM_EXPORTS, round(options.tokens / shape.step_tokens))
    out = options.out or OUT / ("experts-quick" if options.quick else "experts")
    out.mkdir(parents=True, exist_ok=True)
    data = prepared(out, shape, quick=options.quick)
    if options.part:
        run_part(options.part, shape, steps, data, out)
        return 0
    moe, dense = (run_part(kind, shape, steps, data, out) for kind in ("moe", "dense"))
    draw(out / "experts.png", moe.load, {"mixture": moe.holdout, "dense": dense.holdout}, shape.step_tokens)
    figures, limits = figures_of(shape, steps, moe, dense), LIMITS
    if options.quick:
        figures["num_different"] = int(moe.root != reference_root(shape, steps, data))
        limits = {"num_different": 0}
    ok = all(figures[name] <= limit for name, limit in limits.items())
    print(json.dumps({"name": "experts", "figures": figures, "limits": limits, "ok": ok}))
    return 0 if ok else 1


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
