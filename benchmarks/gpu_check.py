"""A GPU looked at before it mines: bits that must be equal, bytes that must arrive, and how fast one stage of a 2 B model is.

- the golden task of each stage, twice: a device whose own bits change can't be in a pinned run;
- quantising, scales and the AdamW update (fp32 and 8-bit moments) on the same numbers as the CPU: equal to the bit;
- boundaries through pinned memory on the copy stream, and back;
- forward and backward of one stage (hidden 2048, 24 layers in four stages, bf16) by the engine that miners run, against the
  same layers as plain PyTorch in bf16: tokens/s, and the share of the device's matrix products (MFU).

Ends with one JSON line. Exit status 0: all is well; 1: something isn't equal; 3: there is no GPU.

    scripts/gpu-check
    scripts/gpu-check --device cuda:1
    scripts/gpu-check --cpu      # every line of this on a CPU, with a tiny model: tests the check, not the machine
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from miner.hardware import choose_device, matmul_flops, memory_taken
from subnet.engine.stage_executor import PartialKey, StageExecutor
from subnet.engine.stage_state import StageState
from subnet.errors import ConfigError
from subnet.model.device_copies import copies_of
from subnet.model.hardware_class import hardware_class
from subnet.model.plan import ModelPlan
from subnet.model.registry import load_architecture, plan_model
from subnet.model.stage import prepare_torch
from subnet.numerics.fixed_point import PartialSum, exponents, update_scales
from subnet.numerics.layout import Section, TensorSpec, build_layout
from subnet.numerics.optimizer import update_
from subnet.numerics.state_arrays import ARRAYS, state_kinds
from subnet.run.config import (
    NO_AUDITS,
    DataSection,
    ModelSection,
    ObjectiveSection,
    OptimizerSection,
    PipelineSection,
    PrecisionSection,
    RunConfig,
    RunSection,
)
from subnet.run.schedule import fp32_bits, step_scalars
from subnet.words import ItemKey

NO_GPU = 3
STAGES, STAGE = 4, 1
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "4090": 165e12, "3090": 71e12, "A6000": 155e12}
"""Dense bf16 FLOP/s with fp32 sums, by the makers' sheets; the first name that the device's contains."""


@dataclass(frozen=True)
class Shape:
    """The model and the chunk; a stage has a quarter of the layers."""

    hidden: int
    layers: int
    heads: int
    intermediate: int
    vocab: int
    rows: int
    length: int
    repeats: int

    def plan(self, compute: str) -> ModelPlan:
        architecture = load_architecture(
            {
                "model_type": "llama",
                "vocab_size": self.vocab,
                "hidden_size": self.hidden,
                "intermediate_size": self.intermediate,
                "num_hidden_layers": self.layers,
                "num_attention_heads": self.heads,
                "num_key_value_heads": max(1, self.heads // 2),
                "max_position_embeddings": self.length,
                "tie_word_embeddings": False,
            }
        )
        run = RunConfig(
            audit=NO_AUDITS,
            run=RunSection(name="gpu-check", steps=10),
            model=ModelSection(config=architecture.model_config),
            data=DataSection(sequence_length=self.length),
            objective=ObjectiveSection(ce_chunk_tokens=min(2048, self.rows * self.length)),
            pipeline=PipelineSection(stages=STAGES, microbatches=4, microbatch_rows=2 * self.rows, chunks=2),
            precision=PrecisionSection(compute=compute),
        )
        return plan_model(run, architecture, tuple(range(0, self.layers, self.layers // STAGES)))


TWO_BILLION = Shape(2048, 24, 16, 8192, 65_536, rows=2, length=2048, repeats=5)
TINY = Shape(64, 4, 4, 128, 256, rows=2, length=32, repeats=2)


def golden(plan: ModelPlan, device: str) -> dict[str, Any]:
    """Whether the device's golden hashes stay; and, as a fact, whether they are this CPU's."""
    first, again = hardware_class(plan, device), hardware_class(plan, device)
    return {
        "golden_stable": first == again,
        "golden": first[STAGE][:16],
        "golden_of_cpu": first == hardware_class(plan),
    }


def _section() -> Section:
    tensors = (TensorSpec("a.weight", (96, 1500), False), TensorSpec("model.embed_tokens.weight", (70, 300), True))
    return build_layout([(*tensors, TensorSpec("a.bias", (333,), False))], tied=None, qmax=1023).sections[0]


def merged_and_updated(config: RunConfig, device: torch.device) -> dict[str, bytes]:
    """Sums, scales and the state's arrays after two updates on the same numbers, as bytes."""
    section, generator = _section(), torch.Generator().manual_seed(0)

    def on_device(numbers: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(numbers, generator=generator) * scale).to(device)

    blank = torch.zeros(section.num_blocks, device=device)
    limit, decayed = blank, blank
    arrays = {
        kind: torch.zeros(
            section.num_elements, dtype=torch.float32 if array.dtype == "f4" else torch.uint8, device=device
        )
        if not array.per_block
        else torch.zeros(section.num_blocks, device=device)
        for kind, array in ((kind, ARRAYS[kind]) for kind in state_kinds(config))
    }
    arrays["weight"] = on_device(section.num_elements, 0.02)
    found: dict[str, bytes] = {}
    for step in (-1, 0, 1):
        scales = None if step < 0 else exponents(limit, section.leaf_qmax)
        summed = PartialSum(section, scales, device=device)
        for _ in range(3):
            grads = [
                (index, on_device(span.spec.num_elements, 1e-3).view(span.spec.shape))
                for index, span in enumerate(section.tensors)
            ]
            summed.add_item(grads)
        if scales is not None:
            found[f"sum {step}"] = _bytes(summed.values)
            settings = config.optimizer
            update_(section, arrays, summed.values, scales, fp32_bits(0.25), step_scalars(config, step), settings)
        decayed, limit = update_scales(section, decayed, limit, summed.maxima, first=step < 0)
        found[f"limit {step}"] = _bytes(limit)
    return {**found, **{kind: _bytes(array) for kind, array in arrays.items()}}


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().numpy().tobytes()


def equal_updates(config: RunConfig, device: torch.device) -> dict[str, bool]:
    """By optimizer, whether the device's bytes are the CPU's."""
    found: dict[str, bool] = {}
    for name, settings in (("adamw", OptimizerSection()), ("adamw_8bit", OptimizerSection(state_bits=8))):
        run = _with_optimizer(config, settings)
        found[f"{name}_bits_equal_cpu"] = merged_and_updated(run, device) == merged_and_updated(
            run, torch.device("cpu")
        )
    return found


def _with_optimizer(config: RunConfig, settings: OptimizerSection) -> RunConfig:
    import msgspec

    return msgspec.structs.replace(config, optimizer=settings)


def copied(shape: Shape, device: torch.device) -> dict[str, Any]:
    """Boundaries there and back: bytes arrive as they were, and the rate of both ways."""
    copies = copies_of(device)
    host = copies.buffer((2 * shape.rows, shape.length, shape.hidden))
    host.copy_(torch.randn(host.shape, generator=torch.Generator().manual_seed(1)))
    ways: list[float] = []
    same = True
    for _ in range(shape.repeats):
        began = time.perf_counter()
        back = copies.download(copies.upload(host))()
        ways.append(time.perf_counter() - began)
        same = same and torch.equal(back, host)
    return {"copies_equal": same, "copies_gb_per_s": 2e-9 * host.nbytes / statistics.median(ways)}


def engine_tokens_per_s(plan: ModelPlan, shape: Shape, device: torch.device) -> float:
    """Of one stage as a miner runs it: bytes in, forward, backward, measure, bytes out."""
    state = StageState(plan, STAGE, device=str(device))
    generator = torch.Generator().manual_seed(2)
    state.load_weights(
        {
            spec.name: torch.empty(spec.shape).normal_(0, 0.02, generator=generator)
            if len(spec.shape) > 1
            else torch.ones(spec.shape)
            for spec in state.specs
        }
    )
    executor = StageExecutor(plan, STAGE, state, graph_budget_bytes=64 << 30)
    size = (2 * shape.rows, shape.length, shape.hidden)
    x, grad = (torch.randn(size, generator=generator).mul_(scale).numpy().data.cast("B") for scale in (1.0, 1e-4))
    key = PartialKey(-1, 1, 0, 0)  # of the calibration step, whose sums are maxima; quantising costs about as much

    def item(number: int) -> Callable[[], None]:
        def work() -> None:
            executor.forward(ItemKey(-1, number, STAGE), x, None, keep_graph=True)
            executor.backward(ItemKey(-1, number, STAGE), grad, partial=key)
            executor.drop_partial(key)

        return work

    return _rate([item(0)] * shape.repeats, 2 * shape.rows * shape.length, device)


def plain_tokens_per_s(plan: ModelPlan, shape: Shape, device: torch.device) -> float:
    """The same layers of ``transformers``, weights and activations in bf16, forward and backward of the same chunks."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    config = load_architecture(plan.model_config).config
    config._attn_implementation = "sdpa"
    layers = [LlamaDecoderLayer(config, index).to(device, torch.bfloat16) for index in plan.layers_of(STAGE)]
    rotary = LlamaRotaryEmbedding(config).to(device)
    size = (shape.rows, shape.length, shape.hidden)
    x_BLH = torch.randn(size, generator=torch.Generator().manual_seed(3)).to(device, torch.bfloat16)
    grad_BLH = torch.full_like(x_BLH, 1e-4)
    positions = torch.arange(shape.length, device=device).unsqueeze(0)
    embedded = rotary(x_BLH, position_ids=positions)

    def chunk() -> None:
        hidden: Any = x_BLH.detach().requires_grad_()
        for layer in layers:
            hidden = layer(
                hidden, attention_mask=None, position_embeddings=embedded, position_ids=positions, use_cache=False
            )
        hidden.backward(grad_BLH)

    return _rate([chunk] * (2 * shape.repeats), shape.rows * shape.length, device)


def _rate(work: list[Callable[[], None]], tokens: int, device: torch.device) -> float:
    """Tokens a second: the median of each, after one that warms up."""
    work[0]()
    _wait(device)
    spent: list[float] = []
    for one in work:
        began = time.perf_counter()
        one()
        _wait(device)
        spent.append(time.perf_counter() - began)
    return tokens / statistics.median(spent)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def speed(shape: Shape, device: torch.device) -> dict[str, Any]:
    """Of the stage, in bf16; MFU against matrix products measured here and, where the device is known, against its sheet."""
    plan = shape.plan("bf16")
    flops = sum(plan.units.unit_flops_per_token[layer + 1] for layer in plan.layers_of(STAGE))
    plain = plain_tokens_per_s(plan, shape, device)
    ours = engine_tokens_per_s(plan, shape, device)
    peak = matmul_flops(str(device), "bf16", seconds=0.5)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    sheet = next((value for part, value in PEAKS.items() if part in name), 0.0)
    return {
        "stage_parameters": sum(spec.num_elements for spec in plan.stage_tensors[STAGE]),
        "tokens_per_s": ours,
        "plain_tokens_per_s": plain,
        "of_plain": ours / plain,
        "mfu_measured": ours * flops / peak,
        "plain_mfu_measured": plain * flops / peak,
        "matmul_flop_per_s": peak,
        **({"mfu_sheet": ours * flops / sheet, "plain_mfu_sheet": plain * flops / sheet} if sheet else {}),
        "memory_bytes": memory_taken(str(device)),
    }


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="scripts/gpu-check", description=__doc__)
    parser.add_argument("--device", default="cuda", help="cuda or cuda:N")
    parser.add_argument(
        "--cpu", action="store_true", help="run all of it on the CPU with a tiny model: a test of this file"
    )
    options = parser.parse_args(arguments)
    if not options.cpu and not torch.cuda.is_available():
        print("this torch finds no CUDA device: nothing to check (--cpu tests the check itself)", file=sys.stderr)
        return NO_GPU
    began = time.monotonic()
    device = torch.device("cpu" if options.cpu else choose_device(options.device))
    shape = TINY if options.cpu else TWO_BILLION
    prepare_torch(1)
    np.seterr(all="ignore")
    small = TINY.plan("bf16")
    facts: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        **golden(small, str(device)),
        **equal_updates(small.config, device),
        **copied(shape, device),
        **speed(shape, device),
    }
    facts["seconds"] = round(time.monotonic() - began, 1)
    required = ("golden_stable", "adamw_bits_equal_cpu", "adamw_8bit_bits_equal_cpu", "copies_equal")
    ok = all(facts[name] for name in required)
    for name, value in facts.items():
        print(f"{name:28} {value:.4g}" if isinstance(value, float) else f"{name:28} {value}", file=sys.stderr)
    print(json.dumps({"name": "gpu_check", "figures": facts, "limits": dict.fromkeys(required, True), "ok": ok}))
    return 0 if ok else 1


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
