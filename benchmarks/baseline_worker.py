"""One process of a baseline of :mod:`benchmarks.baselines`: plain PyTorch, or one rank of a 1F1B pipeline.

Started with one JSON argument (:class:`Work`); its last line of output is a JSON list of numbers. It ends by itself
when its time is up.
"""

from __future__ import annotations

import signal
import sys
import time
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM


class Shape(msgspec.Struct, frozen=True):
    """A Llama and the work of one optimizer step."""

    hidden: int = 512
    intermediate: int = 1376
    layers: int = 8
    heads: int = 8
    vocab_size: int = 8192
    sequence_length: int = 256
    rows: int = 4
    microbatches: int = 16

    @property
    def layer_parameters(self) -> int:
        return 4 * self.hidden**2 + 3 * self.hidden * self.intermediate + 2 * self.hidden

    @property
    def parameters(self) -> int:
        """With embedding and head tied: 29.5M for the shape as it stands."""
        return self.vocab_size * self.hidden + self.layers * self.layer_parameters + self.hidden

    @property
    def tokens_per_step(self) -> int:
        return self.microbatches * self.rows * self.sequence_length

    @property
    def flop_per_token(self) -> float:
        """6 N + 12 · layers · hidden · sequence."""
        return 6.0 * self.parameters + 12.0 * self.layers * self.hidden * self.sequence_length

    @property
    def first_stage_layers(self) -> int:
        """Of two stages, the cut with the least work on the busier one; the head counts as the layers it costs."""
        head = self.vocab_size * self.hidden / self.layer_parameters
        return min(range(1, self.layers), key=lambda n: max(n, self.layers - n + head))

    def llama(self, *, tied: bool) -> LlamaConfig:
        return LlamaConfig(
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads,
            vocab_size=self.vocab_size,
            max_position_embeddings=self.sequence_length,
            tie_word_embeddings=tied,
            use_cache=False,
        )


class Work(msgspec.Struct, frozen=True):
    """What a worker process is asked to do."""

    kind: str
    """``plain``, ``pipeline``, ``pipeline_dp`` or ``matmul``."""
    precision: str
    threads: int
    steps: int
    warmup: int
    deadline_s: float
    shape: Shape
    rank: int = 0
    replicas: int = 1
    rendezvous: str = ""
    """Path of the file through which the ranks find each other."""
    clock: str = "wall"
    """``cpu``: seconds of all threads of a ``plain`` process instead of the wall's."""


class HalfModel(nn.Module):
    """Stage 0 or 1 of two: the library's own decoder layers, embedding first, norm and head last."""

    def __init__(self, shape: Shape, stage: int, precision: str) -> None:
        super().__init__()
        whole = LlamaForCausalLM(shape.llama(tied=False))
        cut = shape.first_stage_layers
        layers: Any = whole.model.layers
        self.embedding = whole.model.embed_tokens if stage == 0 else None
        self.layers = layers[:cut] if stage == 0 else layers[cut:]
        self.rotary = whole.model.rotary_emb
        self.norm = whole.model.norm if stage == 1 else None
        self.head = whole.lm_head if stage == 1 else None
        self.bf16 = precision == "bf16"

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
            if self.embedding is not None:
                x = self.embedding(x)
            positions = self.rotary(x, torch.arange(x.shape[1])[None])
            for layer in self.layers:
                x = layer(x, position_embeddings=positions)
            return x if self.head is None or self.norm is None else self.head(self.norm(x))


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def _optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def _tokens(shape: Shape, rows: int) -> Tensor:
    return torch.randint(0, shape.vocab_size, (rows, shape.sequence_length + 1))


def plain(work: Work) -> list[float]:
    """Whole optimizer steps in one process, seconds each, by ``work.clock``."""
    shape = work.shape
    model = LlamaForCausalLM(shape.llama(tied=True))
    parameters = list(model.parameters())
    optimizer = _optimizer(parameters)
    batches = _tokens(shape, shape.microbatches * shape.rows).split(shape.rows)
    seconds: list[float] = []
    now = time.process_time if work.clock == "cpu" else time.perf_counter
    for _ in range(work.warmup + work.steps):
        began = now()
        for batch in batches:
            with torch.autocast("cpu", torch.bfloat16, enabled=work.precision == "bf16"):
                logits = model(input_ids=batch[:, :-1], use_cache=False).logits
            (loss_of(logits, batch[:, 1:]) / shape.microbatches).backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds.append(now() - began)
    return seconds[work.warmup :]


def _clip(parameters: list[nn.Parameter], stages: dist.ProcessGroup | None) -> None:
    """The global norm over both stages, as plain PyTorch has it."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    square = nn.utils.get_total_norm(gradients).square()
    dist.all_reduce(square, group=stages)
    nn.utils.clip_grads_with_norm_(parameters, 1.0, square.sqrt())


def _average(parameters: list[nn.Parameter], replicas: dist.ProcessGroup, count: int) -> None:
    gradients = [p.grad for p in parameters if p.grad is not None]
    flat = torch.cat([g.flatten() for g in gradients])
    dist.all_reduce(flat, group=replicas)
    flat /= count
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def pipeline(work: Work) -> list[float]:
    """1F1B over two stages, each with ``replicas`` ranks that share the microbatches; rank = 2 · replica + stage."""
    shape, stage_index, replica = work.shape, work.rank % 2, work.rank // 2
    world = 2 * work.replicas
    timeout = timedelta(seconds=work.deadline_s)
    dist.init_process_group(
        "gloo", init_method=f"file://{work.rendezvous}", rank=work.rank, world_size=world, timeout=timeout
    )
    lines: list[Any] = [dist.new_group([2 * r, 2 * r + 1]) for r in range(work.replicas)]
    columns: list[Any] = [dist.new_group([2 * r + s for r in range(work.replicas)]) for s in range(2)]
    module = HalfModel(shape, stage_index, work.precision)
    parameters = list(module.parameters())
    optimizer = _optimizer(parameters)
    stage = PipelineStage(module, stage_index, 2, torch.device("cpu"), group=lines[replica])
    mine = shape.microbatches // work.replicas
    schedule = Schedule1F1B(stage, mine, loss_fn=loss_of)
    batch = _tokens(shape, mine * shape.rows)
    seconds: list[float] = []
    for _ in range(work.warmup + work.steps):
        dist.barrier()
        began = time.perf_counter()
        if stage_index == 0:
            schedule.step(batch[:, :-1].contiguous())
        else:
            schedule.step(target=batch[:, 1:].contiguous(), return_outputs=False)
        if work.replicas > 1:
            _average(parameters, columns[stage_index], work.replicas)
        _clip(parameters, lines[replica])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        dist.barrier()
        seconds.append(time.perf_counter() - began)
    dist.destroy_process_group()
    return seconds[work.warmup :]


def matmul(work: Work) -> list[float]:
    """GFLOP/s of square matrix products: the best of several, as large as takes a fifth of a second."""
    dtype = torch.bfloat16 if work.precision == "bf16" else torch.float32
    size, best = 256, 0.0
    while True:
        a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
        seconds: list[float] = []
        for _ in range(4):
            began = time.perf_counter()
            torch.mm(a, b)
            seconds.append(time.perf_counter() - began)
        best = max(best, 2.0 * size**3 / min(seconds) / 1e9)
        if min(seconds) > 0.2 or size >= 2048:
            return [best]
        size *= 2


KINDS = {"plain": plain, "pipeline": pipeline, "pipeline_dp": pipeline, "matmul": matmul}


def main(argument: str) -> None:
    work = msgspec.json.decode(argument, type=Work)
    signal.alarm(int(work.deadline_s) + 5)
    torch.set_num_threads(work.threads)
    torch.manual_seed(0)
    print(msgspec.json.encode(KINDS[work.kind](work)).decode(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
