"""Whether an export is the swarm's model: its logits in plain ``transformers`` against the stages', every bit of them."""

from __future__ import annotations

import importlib
import importlib.util
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor
from transformers import AutoModelForCausalLM

from iota.export_adapter import base_specs
from subnet.errors import ConfigError, Corrupt
from subnet.model.checkpoints import write_pretrained
from subnet.model.own_code import MODULES
from subnet.model.plan import ModelPlan
from subnet.model.sequence_files import load_directory
from subnet.model.stage import Boundary, StageModule, build_stage, prepare_torch
from subnet.numerics.layout import TensorSpec

Read = Callable[[TensorSpec], Tensor]


@dataclass(frozen=True)
class CheckedLogits:
    """What was compared: so many numbers, with this hash."""

    num_logits: int
    hash: str


def check_logits(directory: Path, plan: ModelPlan, read: Read) -> CheckedLogits:
    """Compares one chunk's logits; ``read`` gives the snapshot's tensors. Raises :class:`Corrupt` where they differ.

    Sets this process's thread count to the run's. Bits are those of this machine, for both; one stage is in memory at a
    time, and the export beside it. Boundaries are compared uncoded.
    """
    prepare_torch(plan.config.precision.num_threads)
    tokens_BL = check_tokens(plan)
    return _compared(directory, staged_logits(plan, read, tokens_BL), plain_logits(directory, plan, tokens_BL))


def _compared(directory: Path, ours: Tensor, theirs: Tensor) -> CheckedLogits:
    if not torch.equal(ours, theirs):
        wrong = int((ours != theirs).sum())
        raise Corrupt(
            f"{directory}: {wrong} of {ours.numel()} logits are not the swarm's, the largest difference is "
            f"{float((ours - theirs).abs().max()):.3g}",
            hint="export again; if it stays, the installed transformers differs from the fleet's",
        )
    return CheckedLogits(ours.numel(), blake3(ours.contiguous().numpy().data.cast("B")).hexdigest())


def check_adapter_logits(directory: Path, plan: ModelPlan, read: Read) -> CheckedLogits:
    """The same for an adapter's directory, through ``peft`` on the frozen weights."""
    if importlib.util.find_spec("peft") is None:
        raise ConfigError("checking an adapter takes the library peft, which isn't installed", hint="pip install peft")
    prepare_torch(plan.config.precision.num_threads)
    tokens_BL = check_tokens(plan)
    with tempfile.TemporaryDirectory(dir=directory.parent) as scratch:
        base = Path(scratch) / "base"
        write_pretrained(base, plan.model_config, base_specs(plan), read)
        theirs = plain_logits(base, plan, tokens_BL, adapter=directory)
    return _compared(directory, staged_logits(plan, read, tokens_BL), theirs)


def check_tokens(plan: ModelPlan) -> Tensor:
    """One chunk of the run's shape, tokens from all over the vocabulary."""
    pipeline, length = plan.config.pipeline, plan.config.data.sequence_length
    rows = pipeline.microbatch_rows // pipeline.chunks
    return (torch.arange(rows * length, dtype=torch.int64) * 2_654_435_761 % plan.vocab_size).reshape(rows, length)


def staged_logits(plan: ModelPlan, read: Read, tokens_BL: Tensor) -> Tensor:
    """Logits (B, L, V) as fp32 of the engine's stages, one after the other."""
    given = Boundary(tokens_BL)
    module: StageModule | None = None
    for stage in range(plan.num_stages):
        module = build_stage(plan, stage)
        module.bind({spec.name: read(spec) for spec in plan.stage_tensors[stage]})
        with torch.no_grad():
            given = module.through(given)
    assert module is not None
    with torch.no_grad(), module.region(tokens_BL.device):
        return module.logits(given.hidden_BLH).float()


def _plain_sequence(directory: Path, plan: ModelPlan, tokens_BL: Tensor) -> Tensor:
    """Of a builder's own modules, one after the other."""
    x = tokens_BL
    bf16 = plan.config.precision.compute == "bf16"
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=bf16, cache_enabled=False):
        for module in load_directory(directory):
            x = module(x).float()
    return x


def plain_logits(directory: Path, plan: ModelPlan, tokens_BL: Tensor, *, adapter: Path | None = None) -> Tensor:
    """The same of plain ``transformers``, in the run's precision; with an adapter, of ``peft``."""
    if plan.model_config["model_type"] == MODULES:
        return _plain_sequence(directory, plan, tokens_BL)
    model: Any = AutoModelForCausalLM.from_pretrained(
        directory, attn_implementation=plan.config.model.attention, dtype=torch.float32
    )
    if plan.config.precision.compute == "bf16":
        for name, parameter in model.named_parameters():
            if ".experts." in name and parameter.dim() == 3:
                parameter.data = parameter.data.to(torch.bfloat16)
    if adapter is not None:
        peft: Any = importlib.import_module("peft")
        model = peft.PeftModel.from_pretrained(model, adapter)
    bf16 = plan.config.precision.compute == "bf16"
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=bf16, cache_enabled=False):
        return model.eval()(input_ids=tokens_BL, use_cache=False).logits.float()
