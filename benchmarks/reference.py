"""A second writing of ``docs/arithmetic.md``: what a run's state must be after each step, bit for bit.

The whole model as plain ``transformers`` in one process, one int64 sum of each gradient element, no scheduler, no wire,
no stage (but for the cuts where a run with a code rounds its boundaries). It shares no code with the parts it checks;
only the run file's types, the permutation of the samples and the error classes are common.
"""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from benchmarks.entry import BLOCK, F32, Entry, Floats, scalar
from benchmarks.expert_products import experts_rounded
from benchmarks.measuring import Measured, Measurement
from benchmarks.reference_optimizers import begin, update
from benchmarks.rounding import cut_for
from benchmarks.setting import build_model, draw, holdout_rows, learning_rate, norm_start, training_rows
from subnet.errors import InputError
from subnet.run.config import RunConfig

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True)
class StepReport:
    """What a step was: ``coefficient`` is the factor of the integer sum, ``skipped`` the non-finite microbatches."""

    step: int
    loss: float
    norm: float
    coefficient: float
    learning_rate: float
    skipped: tuple[int, ...]
    measured: dict[str, Measured]


class Reference:
    """A run in one process. ``tokens`` and ``tokens_holdout`` are the two token streams; ``cuts`` are needed with a code.

    Use: ``calibrate()`` once, then ``step(0)``, ``step(1)``, ...; ``state_root()`` and ``holdout_loss()`` at any time.
    """

    def __init__(
        self,
        config: RunConfig,
        model_config: dict[str, Any],
        tokens: NDArray[Any],
        tokens_holdout: NDArray[Any],
        *,
        cuts: Sequence[int] = (0,),
    ) -> None:
        if len(tokens) <= config.data.sequence_length:
            raise InputError(f"{len(tokens)} training tokens are less than one sample")
        torch.set_num_threads(config.precision.num_threads)
        torch.use_deterministic_algorithms(True)
        self.config = config
        self.tokens, self.tokens_holdout = tokens, tokens_holdout
        self.delayed = bool(config.pipeline.update_delay)
        self.tied = bool(model_config.get("tie_word_embeddings", False))
        self.deviation = float(model_config.get("initializer_range", 0.02))
        self.norm_start = norm_start(model_config)
        self.model = build_model(config, model_config, tied=False)
        cut_for(config, self.model, cuts)
        self.parameters = self.find_parameters()
        self.entries = [self._entry(name) for name in self.parameters if not (self.tied and name == HEAD)]
        self.updates = 0
        self.initial_state()

    def find_parameters(self) -> dict[str, Tensor]:
        """All tensors of the model's state, by name, in canonical order."""
        return self.model.state_dict(keep_vars=True)

    @property
    def num_items(self) -> int:
        """What a step's sum is over."""
        return self.config.pipeline.microbatches

    def _entry(self, name: str) -> Entry:
        shape = tuple(self.parameters[name].shape)
        by_row = name in (EMBEDDING, HEAD) or len(shape) == 3 or (len(shape) == 2 and ".experts." in name)
        rows = shape[0] if by_row else 1
        pair = self.tied and name == EMBEDDING
        qmax = self.config.merge.qmax or self._chosen_qmax()
        empty = torch.empty(0)
        return Entry(
            name, shape, (EMBEDDING, HEAD) if pair else (name,), qmax // 2 if pair else qmax, rows,
            math.prod(shape) // rows, empty, empty, empty,
        )  # fmt: skip

    def _chosen_qmax(self) -> int:
        return _default_qmax(self.num_items)

    def initial_state(self) -> None:
        """Weights of §10, moments zero, no scales yet."""
        for entry in self.entries:
            entry.weight = draw(entry.name, entry.shape, self.config.run.seed, self.deviation, self.norm_start)
            blocks = entry.rows * -(-entry.length // BLOCK)
            entry.decayed, entry.limit = np.zeros(blocks, F32), np.zeros(blocks, F32)
            begin(self.config, entry)
            entry.limit_used = np.zeros(blocks, F32) if self.delayed else entry.limit
            entry.weight_used = entry.weight.clone() if self.delayed else entry.weight
        self._compute_with_newest(newest=True)
        self.updates = 0

    def _compute_with_newest(self, *, newest: bool) -> None:
        """With the newest weights, or those that a step's gradients are of."""
        for entry in self.entries:
            for leaf in entry.leaves:
                self.parameters[leaf].data = entry.weight if newest else entry.weight_used

    # §4

    def _chunk_loss(self, rows: Tensor, *, routers: bool = False) -> Tensor:
        """With ``routers`` and the model's router loss."""
        config, settings = self.config, self.model.config
        routers = (
            routers and bool(getattr(settings, "output_router_logits", False)) and hasattr(self.model, "num_experts")
        )
        divisor = config.pipeline.microbatch_rows * config.data.sequence_length
        balance: Tensor | None = None
        bf16 = config.precision.compute == "bf16"
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16, cache_enabled=False), experts_rounded(bf16):
            made = self.model.model(input_ids=rows[:, :-1], use_cache=False, output_router_logits=routers)
            hidden = made.last_hidden_state.flatten(0, 1)
            labels = rows[:, 1:].reshape(-1)
            total: Tensor | None = None
            for begin in range(0, len(labels), config.objective.ce_chunk_tokens):
                piece = slice(begin, begin + config.objective.ce_chunk_tokens)
                logits = self.model.lm_head(hidden[piece])
                cap = getattr(settings, "final_logit_softcapping", None)
                if cap is not None:
                    logits = torch.tanh(logits / cap) * cap
                logits = logits.float()
                loss = functional.cross_entropy(logits, labels[piece], reduction="sum")
                total = loss if total is None else total + loss
            if routers:
                library: Any = sys.modules[type(self.model).__module__]
                counts = (self.model.num_experts, self.model.num_experts_per_tok)
                weight = self.model.router_aux_loss_coef * (len(labels) / divisor)
                balance = weight * library.load_balancing_loss_func(made.router_logits, *counts)
        if total is None:
            raise InputError("a chunk without tokens")
        loss = total / scalar(float(divisor))
        return loss if balance is None else loss + balance

    def _chunks(self, rows: NDArray[np.int64]) -> tuple[Tensor, ...]:
        return torch.from_numpy(rows).split(self.config.pipeline.microbatch_rows // self.config.pipeline.chunks)

    def microbatch(self, t: int, m: int) -> float:
        """Leaves the gradient of the microbatch in ``.grad`` of the leaves and gives its fp32 loss."""
        return self._back_propagate(training_rows(self.config, self.tokens, t, m))

    def _back_propagate(self, rows: NDArray[np.int64]) -> float:
        for parameter in self.parameters.values():
            parameter.grad = None
        loss: Tensor | None = None
        for chunk in self._chunks(rows):
            part = self._chunk_loss(chunk, routers=True)
            part.backward()
            loss = part.detach() if loss is None else loss + part.detach()
        return math.nan if loss is None else loss.item()

    # §5

    def _leaf_gradients(self, entry: Entry) -> list[Tensor]:
        gradients = [self.parameters[leaf].grad for leaf in entry.leaves]
        return [torch.zeros(entry.shape) if g is None else g.contiguous() for g in gradients]

    def _gather(self, t: int, sums: dict[str, Tensor] | None, measure: Measurement | None) -> _Gathered:
        """Works through the microbatches of a step; adds their integers into ``sums``, if there are any."""
        gathered = _Gathered({e.name: np.zeros(len(e.decayed), F32) for e in self.entries})
        exponents = {entry.name: entry.exponents() for entry in self.entries} if sums is not None else {}
        down = {e.name: e.block_table(np.ldexp(F32(1), -exponents[e.name])) for e in self.entries if exponents}
        for m in range(self.num_items):
            loss = self.microbatch(t, m)
            leaves = {entry.name: self._leaf_gradients(entry) for entry in self.entries}
            maxima = {e.name: np.max([e.block_maxima(g) for g in leaves[e.name]], axis=0) for e in self.entries}
            if not all(np.isfinite(x).all() for x in maxima.values()):
                gathered.skipped.append(m)
                continue
            gathered.losses.append(loss)
            for entry in self.entries:
                name = entry.name
                gathered.maxima[name] = np.maximum(gathered.maxima[name], maxima[name])
                if sums is None:
                    continue
                for gradient in leaves[name]:
                    if measure is not None:
                        pairs = [(view, down[name][:, columns]) for view, columns in entry.views(gradient)]
                        measure.add(name, gradient, pairs, entry.qmax)
                    self._quantise(entry, gradient, down[name], sums[name])
        if not gathered.losses:
            raise InputError(f"every microbatch of step {t} has a gradient that is not finite")
        return gathered

    @staticmethod
    def _quantise(entry: Entry, gradient: Tensor, down: Tensor, total: Tensor) -> None:
        """Adds the integers of ``gradient``, which is overwritten, to ``total``."""
        for view, columns in entry.views(gradient):
            view.mul_(down[:, columns]).round_().clamp_(-entry.qmax, entry.qmax)
        sums = total.numpy()
        np.add(sums, gradient.numpy().astype(np.int32), out=sums)

    # §6 to §8

    def calibrate(self) -> None:
        """Step -1: block maxima of the data of step 0 set the scales."""
        gathered = self._gather(-1, None, None)
        for entry in self.entries:
            entry.calibrate(gathered.maxima[entry.name])

    def step(self, t: int, *, measure: bool = False) -> StepReport:
        """Update ``t``. With ``measure`` the report says what the integers lost, tensor by tensor."""
        if t != self.updates:
            raise InputError(f"step {t} asked for after {self.updates} updates")
        sums = {entry.name: torch.zeros(entry.shape, dtype=torch.int64) for entry in self.entries}
        measurement = Measurement() if measure else None
        self._compute_with_newest(newest=False)
        gathered = self._gather(t, sums, measurement)
        self._compute_with_newest(newest=True)
        up = {e.name: e.block_table(np.ldexp(F32(1), e.exponents())) for e in self.entries}
        count = len(gathered.losses)
        norm = math.sqrt(float(self._square_sum(sums))) / count
        clip = self.clip_norm()
        coefficient = float(F32((min(1.0, clip / (norm + 1e-6)) if clip else 1.0) / count))
        measured: dict[str, Measured] = {}
        for entry in self.entries:
            gradient = sums[entry.name].to(torch.float32)
            for view, columns in entry.views(gradient):
                view.mul_(up[entry.name][:, columns])
            if measurement is not None:
                measured[entry.name] = measurement.result(entry.name, gradient)
            if self.delayed:
                entry.keep_before()
            self._update(entry, gradient, coefficient, t)
            entry.rescale(gathered.maxima[entry.name])
        self.updates = t + 1
        loss, rate = _sum(gathered.losses) / count, learning_rate(self.config, t)
        return StepReport(t, loss, norm, coefficient, rate, tuple(gathered.skipped), measured)

    def clip_norm(self) -> float:
        return self.config.optimizer.clip_norm

    def _update(self, entry: Entry, gradient: Tensor, coefficient: float, t: int) -> None:
        """With the sum of the step, which is overwritten."""
        update(self.config, entry, gradient.mul_(scalar(coefficient)), t)

    def _square_sum(self, sums: dict[str, Tensor]) -> Fraction:
        by_exponent: dict[int, int] = {}
        for entry in self.entries:
            exponents = entry.exponents().reshape(entry.rows, -1)
            for view, columns in entry.views(sums[entry.name]):
                squares = (view * view).sum(dim=-1).numpy()
                for k in np.unique(exponents[:, columns]):
                    part = squares[exponents[:, columns] == k]
                    by_exponent[int(k)] = by_exponent.get(int(k), 0) + sum(int(s) for s in part)
        return sum((Fraction(s) * Fraction(4) ** k for k, s in by_exponent.items()), Fraction(0))

    # §9 and evaluation

    def _leaf(self, entry: Entry) -> bytes:
        digest = blake3(b"iota/leaf/1\0" + entry.name.encode() + b"\0")
        digest.update(struct.pack(f"<{1 + len(entry.shape)}Q", len(entry.shape), *entry.shape))
        arrays = {kind: values for kind, values in self._arrays_of(entry).items() if kind != "weight_used"}
        for values in arrays.values():
            data = np.ascontiguousarray(values).tobytes()
            digest.update(struct.pack("<Q", len(data)))
            digest.update(data)
        return digest.digest()

    def state_root(self) -> str:
        """The run root of §9, as hex digits."""
        leaves = b"".join(self._leaf(entry) for entry in self.entries)
        return blake3(b"iota/root/1\0" + struct.pack("<Q", self.updates) + leaves).hexdigest()

    def holdout_loss(self) -> float:
        """Mean over the evaluation's items; NaN where the run evaluates nothing."""
        losses: list[float] = []
        with torch.no_grad():
            for item in range(self.config.num_evaluation_items):
                parts = [
                    self._chunk_loss(c) for c in self._chunks(holdout_rows(self.config, self.tokens_holdout, item))
                ]
                losses.append(_sum_fp32(parts))
        return _sum(losses) / len(losses) if losses else math.nan

    # state in and out

    def _arrays_of(self, entry: Entry) -> dict[str, NDArray[Any]]:
        kept = entry.codes or {"m": entry.m.numpy(), "v": entry.v.numpy()}
        moments = {"weight": entry.weight.numpy(), **kept}
        used = {"limit_used": entry.limit_used, "weight_used": entry.weight_used.numpy()} if self.delayed else {}
        return {**moments, "decayed": entry.decayed, "limit": entry.limit, **used}

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The state as ``"<tensor>/<weight, m, v, decayed or limit>"`` to array (shared, not copied)."""
        return {f"{e.name}/{kind}": values for e in self.entries for kind, values in self._arrays_of(e).items()}

    def save(self, path: Path) -> None:
        partial = path.with_suffix(".partial.npz")
        arrays: dict[str, Any] = {"updates": np.array(self.updates), **self.arrays()}
        np.savez(partial, **arrays)
        partial.replace(path)

    def load(self, path: Path) -> None:
        with np.load(path) as stored:
            self.updates = int(stored["updates"])
            for entry in self.entries:
                for kind, target in self._arrays_of(entry).items():
                    target[...] = stored[f"{entry.name}/{kind}"]


def _default_qmax(microbatches: int) -> int:
    """§5: quanta fall with the root of the number of microbatches, as far as fp32 adds their sums exactly."""
    bits = max(10, 8 + math.ceil(math.log2(microbatches) / 2))
    return 2 ** min(bits, max(b for b in range(1, 24) if microbatches * (2**b - 1) < 2**24)) - 1


@dataclass
class _Gathered:
    maxima: dict[str, Floats]
    losses: list[float] = field(default_factory=lambda: [])
    skipped: list[int] = field(default_factory=lambda: [])


def _sum(values: list[float]) -> float:
    """Left to right in fp64, as the page says (``math.fsum`` rounds only once)."""
    total = 0.0
    for value in values:
        total += value
    return total


def _sum_fp32(parts: list[Tensor]) -> float:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total.item()
