"""What slow links cost: 100 Mbit/s and 50 ms between all members against links as fast as the machine, for each boundary code.

Two stages on two miners, each in a network namespace (``benchmarks/link_spaces.py``), encrypted as between strangers; the model is
chosen on the spot so that a microbatch computes about as long as its raw boundary takes at that rate. Per code: tokens/s with
and without the limit, bytes up each step, and how much of the transfer time is hidden behind compute.

    python -m benchmarks.links [--quick] [--codes raw int8 int4] [--steps N] [--fresh]
    python -m benchmarks.links --lanes    # 20 Mbit/s and 80 ms, rounds of 4 lanes of 8 inner steps (docs/lanes.md), int8

Each finished part is kept under ``benchmarks/out/links`` and not measured again; ``--fresh`` forgets them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.corpus import OUT
from benchmarks.link_spaces import Link, Spaces, why_not
from benchmarks.link_swarm import SpacedSwarm
from benchmarks.swarms import run_swarm
from benchmarks.throughput import breakdown
from iota.plan import measure_unit_costs
from iota.prepare import prepare_data
from iota.swarm import LocalSwarm, SwarmOptions
from subnet.errors import DeadlinePassed
from subnet.protocol.api import RunStatus
from subnet.run.config import (
    NO_AUDITS,
    DataSection,
    EvaluationSection,
    LanesSection,
    ModelSection,
    PipelineSection,
    RunConfig,
    RunSection,
    SnapshotSection,
)

DIRECTORY = OUT / "links"
BOOK = Path(__file__).resolve().parent.parent / "iota" / "assets" / "moby_dick.txt"
LINK = Link(bytes_per_s=100e6 / 8, delay_s=0.025)
HOME_LINK = Link(bytes_per_s=20e6 / 8, delay_s=0.04)
LIMITS = {"int8_share_of_unlimited": 0.8}
LANES_LIMITS = {"int8_share_of_unlimited": 0.9}
QUICK_LIMITS = {"int8_share_of_unlimited": 0.3}
WARMUP_STEPS = 1
INTERMEDIATE = (128, 256, 512, 768, 1024, 1536, 2048)


@dataclass(frozen=True)
class Shape:
    """Two layers, one a stage; ``intermediate`` 0: not chosen yet."""

    hidden: int = 192
    heads: int = 6
    vocab_size: int = 512
    rows: int = 4
    sequence_length: int = 256
    microbatches: int = 128
    intermediate: int = 0
    link: Link = LINK
    lanes: int = 0
    """``microbatches`` are then those of a round, of all lanes and inner steps."""
    inner_steps: int = 1

    @property
    def tokens_per_step(self) -> int:
        return self.microbatches * self.rows * self.sequence_length

    @property
    def raw_transfer_s(self) -> float:
        """Of one microbatch's boundary, at the link's rate."""
        return 4 * self.rows * self.sequence_length * self.hidden / self.link.bytes_per_s


FULL, QUICK = Shape(), Shape(microbatches=16)
LANES = Shape(hidden=384, microbatches=64, intermediate=2048, link=HOME_LINK, lanes=4, inner_steps=8)
"""So large that a microbatch computes for longer than its coded boundary travels."""


def config_of(shape: Shape, code: str, steps: int, name: str) -> RunConfig:
    data = DIRECTORY / f"data-{shape.vocab_size}"
    prepare_data([BOOK], data, vocab_size=shape.vocab_size, holdout_fraction=0.05)
    model: dict[str, Any] = {
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate or INTERMEDIATE[0],
        "num_hidden_layers": 2,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "max_position_embeddings": shape.sequence_length,
        "tie_word_embeddings": False,
    }
    each = shape.microbatches // (shape.lanes * shape.inner_steps) if shape.lanes else shape.microbatches
    return RunConfig(
        audit=NO_AUDITS,
        run=RunSection(name=name, seed=1, steps=steps),
        model=ModelSection(config=model),
        data=DataSection(sources=(str(data),), sequence_length=shape.sequence_length),
        pipeline=PipelineSection(stages=2, microbatches=each, microbatch_rows=shape.rows, boundary_code=code),
        lanes=LanesSection(count=shape.lanes, inner_steps=shape.inner_steps) if shape.lanes else LanesSection(),
        snapshot=SnapshotSection(every_steps=1000),
        evaluation=EvaluationSection(rows=0),
    )


def chosen(shape: Shape) -> Shape:
    """With the intermediate size for which the slower stage computes as long as its raw boundary travels."""
    best, best_off = shape, math.inf
    for size in INTERMEDIATE:
        tried = replace(shape, intermediate=size)
        config = config_of(tried, "raw", 1, "costs")
        costs = measure_unit_costs(config, config.model.config or {}, budget_s=6.0)
        off = math.log((costs[1] + max(costs[0], costs[-1])) / shape.raw_transfer_s)
        print(f"intermediate {size}: {math.exp(off):.2f} of the raw transfer time", file=sys.stderr, flush=True)
        if abs(off) < best_off:
            best, best_off = tried, abs(off)
        if off > 0:
            break
    return best


class Watch:
    """What each miner has sent, at the first sealed step that counts and at the end."""

    def __init__(self, spaces: Spaces) -> None:
        self._spaces = spaces
        self._began: list[int] | None = None

    def seen(self, swarm: LocalSwarm, status: RunStatus, now_s: float) -> None:
        if self._began is None and status.summary.step >= WARMUP_STEPS:
            self._began = self._sent()

    def most_sent(self) -> int:
        """Of the miner that sent most, since then."""
        began = self._began or [0] * len(self._spaces.names)
        return max(now - then for now, then in zip(self._sent(), began, strict=True))

    def _sent(self) -> list[int]:
        return [self._spaces.sent_bytes(number) for number in range(len(self._spaces.names))]


def measure(shape: Shape, code: str, limited: bool, steps: int) -> dict[str, Any]:
    """Medians over ``steps`` steps, from planned to planned (merge, seal and update included)."""
    name = f"links-{code}-{'limited' if limited else 'unlimited'}"
    config = config_of(shape, code, WARMUP_STEPS + steps, name)
    directory = DIRECTORY / "swarm"
    with Spaces(2, shape.link if limited else None) as spaces:
        watch = Watch(spaces)

        def swarm_of(where: Path, run: RunConfig, count: int, options: SwarmOptions) -> LocalSwarm:
            return SpacedSwarm(where, run, spaces, options)

        options = SwarmOptions(measure_costs=False, spare_miners=0)
        result = run_swarm(
            directory,
            config,
            2,
            limit_s=1800.0,
            options=options,
            on_status=watch.seen,
            swarm_class=swarm_of,  # type: ignore[arg-type]
        )
        sent_bytes = watch.most_sent() / steps
    seconds = [step.seconds for step in result.status.steps if step.step >= WARMUP_STEPS]
    busy = breakdown(directory).values()
    items = shape.microbatches * (WARMUP_STEPS + steps + 1)
    compute_s = max(((kinds.get("forward", 0.0) + kinds.get("backward", 0.0)) / items for kinds in busy), default=0.0)
    return {
        "seconds_per_step": median(seconds),
        "steps_s": seconds,
        "tokens_per_s": shape.tokens_per_step / median(seconds),
        "compute_s_per_microbatch": compute_s,
        "most_sent_bytes_per_step": sent_bytes,
        "num_voids": result.status.num_voids,
        "root": result.root,
    }


def part(shape: Shape, code: str, limited: bool, steps: int, directory: Path) -> dict[str, Any]:
    """Measured, or as it was measured before."""
    path = directory / f"{code}-{'limited' if limited else 'unlimited'}.json"
    key = {"shape": asdict(shape), "steps": steps}
    if path.exists():
        kept = json.loads(path.read_text())
        if kept["key"] == key:
            return kept["found"]
    found = measure(shape, code, limited, steps)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"key": key, "found": found}, indent=1))
    speed, seconds = found["tokens_per_s"], found["seconds_per_step"]
    print(f"  {path.stem}: {speed:.0f} tokens/s, {seconds:.2f} s a step", file=sys.stderr, flush=True)
    return found


def compared(shape: Shape, codes: list[str], steps: int, directory: Path) -> dict[str, Any]:
    """Each code right after itself without limits."""
    figures: dict[str, Any] = {}
    for code in codes:
        free = part(shape, code, False, steps, directory)
        slow = part(shape, code, True, steps, directory)
        transfer_s = slow["most_sent_bytes_per_step"] / shape.link.bytes_per_s
        lost_s = slow["seconds_per_step"] - free["seconds_per_step"]
        figures[code] = {"unlimited": free, "limited": slow, "transfer_s_per_step": transfer_s}
        figures[code]["same_root"] = free["root"] == slow["root"]
        figures[code]["hidden_share_of_transfer"] = 1 - max(0.0, lost_s) / transfer_s
        figures[f"{code}_share_of_unlimited"] = free["seconds_per_step"] / slow["seconds_per_step"]
    if "raw" in codes:
        raw = figures["raw"]["unlimited"]
        figures["compute_over_raw_transfer"] = raw["compute_s_per_microbatch"] / shape.raw_transfer_s
        for code in codes:
            slow_s = figures[code]["limited"]["seconds_per_step"]
            figures[f"{code}_share_of_raw_unlimited"] = raw["seconds_per_step"] / slow_s
    return figures


def kept_shape(shape: Shape, directory: Path) -> Shape:
    """Chosen once: every part is measured with the same model."""
    path = directory / "shape.json"
    if path.exists():
        read = json.loads(path.read_text())
        kept = Shape(**{**read, "link": Link(**read["link"])}) if "link" in read else Shape()
        if replace(kept, intermediate=0) == shape:
            return kept
    found = chosen(shape)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(found)))
    return found


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.links", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="int8 only, 16 microbatches, limits of its own")
    parser.add_argument("--codes", nargs="+", choices=["raw", "int8", "int4"], default=["raw", "int8", "int4"])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--lanes", action="store_true", help="rounds of local steps over a home link, int8")
    parser.add_argument("--fresh", action="store_true", help="measure everything again")
    options = parser.parse_args(arguments)
    reason = why_not()
    if reason:
        print(f"no network namespaces here: {reason}", file=sys.stderr)
        print(json.dumps({"name": "links", "figures": {"skipped": reason}, "limits": LIMITS, "ok": False}))
        return 1
    directory = DIRECTORY / ("quick" if options.quick else "lanes" if options.lanes else "full")
    if options.fresh:
        shutil.rmtree(directory, ignore_errors=True)
    shape, codes, steps, limits = FULL, options.codes, options.steps, LIMITS
    if options.quick:
        shape, codes, steps, limits = QUICK, ["int8"], 2, QUICK_LIMITS
    elif options.lanes:
        shape, codes, steps, limits = LANES, ["int8"], 2, LANES_LIMITS
    shape = shape if shape.intermediate else kept_shape(shape, directory)
    figures: dict[str, Any] = {
        "link": asdict(shape.link),
        "shape": asdict(shape),
        **compared(shape, codes, steps, directory),
    }
    checked = {name: limit for name, limit in limits.items() if name in figures}
    ok = bool(checked) and all(figures[name] >= limit for name, limit in checked.items())
    ok = ok and all(figures[code]["same_root"] for code in codes)
    name = "links_lanes" if options.lanes else "links"
    print(json.dumps({"name": name, "figures": figures, "limits": limits, "ok": ok}))
    return 0 if ok else 1


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        sys.exit(main(sys.argv[1:]))
    except DeadlinePassed as error:
        print(error, file=sys.stderr)
        sys.exit(1)
