"""The reference of runs that train a part of a model, or on dialogues: ``peft``'s own adapters in one process.

A second writing of what ``docs/arithmetic.md`` says of them (§15, §16), on top of :mod:`benchmarks.reference`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from benchmarks.entry import F32, Entry
from benchmarks.reference import EMBEDDING, HEAD, Reference
from benchmarks.setting import draw, training_rows
from subnet.run.config import RunConfig

A, B = ".lora_A.weight", ".lora_B.weight"
STARTS, LEARNT, IDS = 1 << 30, 1 << 31, (1 << 30) - 1


class FinetuneReference(Reference):
    """As :class:`Reference`, for ``[trainable]`` and ``objective.kind = "sft"``."""

    def __init__(
        self,
        config: RunConfig,
        model_config: dict[str, Any],
        tokens: NDArray[Any],
        tokens_holdout: NDArray[Any],
        *,
        cuts: Sequence[int] = (0,),
    ) -> None:
        self.section, self.sft = config.trainable, config.objective.kind == "sft"
        self.frozen: list[Entry] = []
        super().__init__(config, model_config, tokens, tokens_holdout, cuts=cuts)

    def find_parameters(self) -> dict[str, Tensor]:
        model: Any = self.model
        if self.section.kind == "lora":
            from peft import LoraConfig, inject_adapter_in_model

            targets = list(self.section.targets) or [
                name for name, m in model.model.named_modules() if type(m) is torch.nn.Linear
            ]
            lora = LoraConfig(
                r=self.section.rank,
                lora_alpha=self.section.alpha,  # pyright: ignore[reportArgumentType] - whole or not
                target_modules=targets,
                layers_to_transform=list(self.section.layers) or None,
            )
            wrapped: Any = inject_adapter_in_model(lora, self.model)
            self.model: Any = wrapped.eval()
        state = self.model.state_dict(keep_vars=True)
        renamed = {name.replace(".base_layer.", ".").replace(".default.", "."): t for name, t in state.items()}
        for name, parameter in renamed.items():
            if isinstance(parameter, torch.nn.Parameter):
                parameter.requires_grad_(self._is_trained(name))
        return renamed

    def _is_trained(self, name: str) -> bool:
        section = self.section
        if section.kind == "full":
            return True
        if section.kind == "lora":
            return name.endswith((A, B))
        if name.startswith("model.layers."):
            return int(name.split(".")[2]) in section.layers
        if name in (EMBEDDING, HEAD):
            own = "embedding" if name == EMBEDDING else "head"
            return bool({"embedding", "head"} & set(section.also)) if self.tied else own in section.also
        return "norm" in section.also

    def initial_state(self) -> None:
        everything = self.entries
        for entry in everything:
            if entry.name.endswith(B):
                entry.weight = torch.zeros(entry.shape)
            elif entry.name.endswith(A):
                entry.weight = self._draw_a(entry)
            else:
                entry.weight = draw(entry.name, entry.shape, self.config.run.seed, self.deviation, self.norm_start)
            for leaf in entry.leaves:
                self.parameters[leaf].data = entry.weight
        self.order = [entry.name for entry in everything]
        self.frozen = [entry for entry in everything if not self._is_trained(entry.name)]
        self.entries = [entry for entry in everything if self._is_trained(entry.name)]
        drawn = {entry.name: entry.weight.clone() for entry in self.entries}
        self._begin(drawn)

    def _begin(self, weights: dict[str, Tensor]) -> None:
        super().initial_state()  # draws weights of its own, as if nothing were an adapter's
        for entry in self.entries:
            entry.weight.copy_(weights[entry.name])
            entry.weight_used.copy_(weights[entry.name])

    def _draw_a(self, entry: Entry) -> Tensor:
        digest = blake3(b"iota/init/1\0" + struct.pack("<Q", self.config.run.seed) + entry.name.encode()).digest()
        generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "little") & (2**63 - 1))
        bound = entry.shape[1] ** -0.5
        return torch.empty(entry.shape).uniform_(-bound, bound, generator=generator)

    # scales of an adapter's A, whose gradient is zero as long as B is

    def calibrate(self) -> None:
        super().calibrate()
        self._limits_of_a({})

    def step(self, t: int, *, measure: bool = False) -> Any:
        before = {entry.name: entry.decayed.any() for entry in self.entries}
        report = super().step(t, measure=measure)
        self._limits_of_a(before)
        return report

    def _limits_of_a(self, seen: dict[str, Any]) -> None:
        by_name = {entry.name: entry for entry in self.entries}
        for name, entry in by_name.items():
            if not name.endswith(A):
                continue
            delayed = entry.limit_used is not entry.limit
            if not entry.decayed.any():
                other = by_name[name.removesuffix(A) + B].limit
                entry.limit = np.full_like(entry.limit, max(F32(2.0**-60), other.max() * F32(2.0**-4)))
            elif name in seen and not seen[name]:
                entry.limit = entry._target()  # pyright: ignore[reportPrivateUsage]
            if not delayed or not seen:
                entry.limit_used = entry.limit

    # dialogues

    def microbatch(self, t: int, m: int) -> float:
        rows = training_rows(self.config, self.tokens, t, m)
        self._counted = max(1, int(((rows[:, 1:] & LEARNT) != 0).sum()))
        return self._back_propagate(rows)

    def _chunk_loss(self, rows: Tensor, *, routers: bool = False) -> Tensor:
        if not self.sft:
            return super()._chunk_loss(rows, routers=routers)
        ids = rows & IDS
        positions = torch.zeros_like(ids[:, :-1])
        for row, marks in zip(positions, rows, strict=True):
            for at in range(1, len(row)):
                row[at] = 0 if marks[at] & STARTS else row[at - 1] + 1
        labels = torch.where((rows[:, 1:] & LEARNT) != 0, ids[:, 1:], -100).reshape(-1)
        with torch.autocast(
            "cpu", torch.bfloat16, enabled=self.config.precision.compute == "bf16", cache_enabled=False
        ):
            wanted = routers and bool(getattr(self.model.config, "output_router_logits", False))
            made = self.model.model(
                input_ids=ids[:, :-1], position_ids=positions, use_cache=False, output_router_logits=wanted
            )
            hidden = made.last_hidden_state.flatten(0, 1)
            pieces: list[Tensor] = []
            for begin in range(0, len(labels), self.config.objective.ce_chunk_tokens):
                piece = slice(begin, begin + self.config.objective.ce_chunk_tokens)
                logits = self.model.lm_head(hidden[piece]).float()
                pieces.append(functional.cross_entropy(logits, labels[piece], ignore_index=-100, reduction="sum"))
            total = pieces[0]
            for piece in pieces[1:]:
                total = total + piece
        loss = total / torch.tensor(float(self._counted))
        return loss + self._balance(made.router_logits, labels.numel()) if wanted else loss

    def _balance(self, router_logits: Any, tokens: int) -> Tensor:
        import sys

        library: Any = sys.modules[type(self.model).__module__]
        of_tokens = self.config.pipeline.microbatch_rows * self.config.data.sequence_length
        counts = (self.model.num_experts, self.model.num_experts_per_tok)
        weight = self.model.router_aux_loss_coef * (tokens / of_tokens)
        return weight * library.load_balancing_loss_func(router_logits, *counts)

    # roots: a frozen tensor's leaf is its weights

    def state_root(self) -> str:
        leaves = {entry.name: self._leaf(entry) for entry in self.entries}
        for entry in self.frozen:
            digest = blake3(b"iota/leaf/1\0" + entry.name.encode() + b"\0")
            digest.update(struct.pack(f"<{1 + len(entry.shape)}Q", len(entry.shape), *entry.shape))
            data = entry.weight.numpy().tobytes()
            digest.update(struct.pack("<Q", len(data)) + data)
            leaves[entry.name] = digest.digest()
        whole = b"".join(leaves[name] for name in self.order)
        return blake3(b"iota/root/1\0" + struct.pack("<Q", self.updates) + whole).hexdigest()
