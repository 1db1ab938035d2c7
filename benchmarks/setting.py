"""What the reference and the plain baseline start from: rows, learning rates, initial weights, the library's model."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from subnet.model.data import DataManifest, TokenStream, permute
from subnet.run.config import RunConfig


def draw(name: str, shape: tuple[int, ...], seed: int, deviation: float, norm: float = 1.0) -> Tensor:
    """The initial value of one tensor (§10)."""
    if name.endswith("bias"):
        return torch.zeros(shape)
    if name.endswith("norm.weight"):
        return torch.full(shape, norm)
    digest = blake3(b"iota/init/1\0" + struct.pack("<Q", seed) + name.encode()).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "little") & (2**63 - 1))
    return torch.empty(shape).normal_(0.0, deviation, generator=generator)


def norm_start(model_config: dict[str, Any]) -> float:
    """Gemma's norms multiply by one more than their weight."""
    return 0.0 if str(model_config.get("model_type")).startswith("gemma") else 1.0


def lane_rows(config: RunConfig, tokens: NDArray[Any], round_: int, lane: int, part: int) -> NDArray[np.int64]:
    """The tokens of a lane's part, 1 to H · J (§14)."""
    each = config.lanes.inner_steps * config.pipeline.microbatches
    number = (max(round_, 0) * config.lanes.count + lane) * each + part - 1
    return _rows(config, tokens, number)


def training_rows(config: RunConfig, tokens: NDArray[Any], t: int, m: int) -> NDArray[np.int64]:
    """The (rows, sequence_length + 1) tokens of a microbatch (§3)."""
    return _rows(config, tokens, (config.run.first_step + max(t, 0)) * config.pipeline.microbatches + m)


def _rows(config: RunConfig, tokens: NDArray[Any], number: int) -> NDArray[np.int64]:
    """Of the microbatch that is the run's ``number``-th in the order of the data."""
    rows, length = config.pipeline.microbatch_rows, config.data.sequence_length
    size = (len(tokens) - 1) // length
    first = number * rows
    samples = [permute(i % size, size, config.run.seed, i // size) for i in range(first, first + rows)]
    return np.stack([tokens[s * length : (s + 1) * length + 1] for s in samples]).astype(np.int64)


def holdout_rows(config: RunConfig, tokens: NDArray[Any], item: int) -> NDArray[np.int64]:
    """The (rows, sequence_length + 1) tokens of a hold-out item: in order, round and round (§3)."""
    rows, length = config.pipeline.microbatch_rows, config.data.sequence_length
    size = (len(tokens) - 1) // length
    samples = [i % size for i in range(item * rows, (item + 1) * rows)]
    return np.stack([tokens[s * length : (s + 1) * length + 1] for s in samples]).astype(np.int64)


def learning_rate(config: RunConfig, t: int) -> float:
    """§8."""
    schedule, top, steps = config.schedule, config.optimizer.learning_rate, config.schedule_steps
    before = config.run.first_step * config.lanes.inner_steps
    t, steps = t + before, steps + before
    if t < schedule.warmup_steps:
        return top * (t + 1) / schedule.warmup_steps
    if schedule.kind == "constant":
        return top
    start = schedule.warmup_steps
    if schedule.kind == "wsd":
        falls = schedule.decay_steps or max(1, int(schedule.decay_fraction * steps + 0.5))
        start = max(start, steps - falls)
        if t < start:
            return top
    p = min(1.0, (t - start) / max(1, steps - start))
    f = schedule.final_fraction
    if schedule.kind == "cosine":
        return top * (f + (1 - f) * (0.5 * (1 + math.cos(math.pi * p))))
    root = schedule.kind == "wsd" and schedule.decay_shape == "sqrt"
    return top * (f + (1 - f) * (1 - (math.sqrt(p) if root else p)))


def build_model(config: RunConfig, model_config: dict[str, Any], *, tied: bool) -> Any:
    """The model of ``transformers``, weights not yet drawn, with one or two leaves for embedding and head."""
    fields = {**model_config, "tie_word_embeddings": tied}
    library_config = AutoConfig.for_model(str(fields.pop("model_type", "llama")), **fields)
    model = AutoModelForCausalLM.from_config(library_config, attn_implementation=config.model.attention)
    return model.to(torch.float32).eval()


def stream_tokens(manifest: DataManifest, stream: TokenStream, read: Callable[[str], bytes]) -> NDArray[Any]:
    """The tokens of a prepared stream, ``read`` giving the bytes of a blob."""
    return np.concatenate([np.frombuffer(read(shard.blob), manifest.token_dtype) for shard in stream.shards])
