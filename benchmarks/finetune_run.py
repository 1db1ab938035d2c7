"""Both sides of the fine-tuning benchmark: the engine's stages in one process, and ``peft`` with plain PyTorch.

Same weights, rows, adapters and schedule. Ours: integer sums, merge and update as members do them, three stages one after
the other. Theirs: the library's whole model, autograd, ``clip_grad_norm_``, ``torch.optim.AdamW``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM

from benchmarks.setting import holdout_rows, learning_rate, training_rows
from subnet.engine.stage_executor import PartialKey, StageExecutor
from subnet.engine.stage_merge import StageMerge
from subnet.engine.stage_state import StageState
from subnet.model.checkpoints import initial_weights
from subnet.model.dialogues import split_bits
from subnet.model.plan import ModelPlan
from subnet.model.pretrained import PretrainedDirectory
from subnet.run.schedule import norm_and_coefficient, step_scalars
from subnet.run.trainable import is_adapter
from subnet.words import CALIBRATION_STEP, ItemKey

Tokens = NDArray[Any]


def start_weights(plan: ModelPlan, source: PretrainedDirectory) -> dict[str, Tensor]:
    """The directory's tensors, and adapters drawn from the run's seed."""
    given = {spec.name: tensor for spec, tensor in source.read([s for s in plan.canonical if not is_adapter(s.name)])}
    return {**given, **initial_weights(plan, [s for s in plan.canonical if is_adapter(s.name)])}


class Staged:
    """Every stage with one member, as a swarm works it."""

    def __init__(self, plan: ModelPlan, weights: Mapping[str, Tensor], tokens: Tokens, holdout: Tokens) -> None:
        self.plan, self.tokens, self.holdout, self.merged_bytes = plan, tokens, holdout, 0
        self.stages: list[StageExecutor] = []
        for stage in range(plan.num_stages):
            state = StageState(plan, stage)
            state.load_weights(weights)
            self.stages.append(StageExecutor(plan, stage, state, graph_budget_bytes=8 << 30))
        self._run(CALIBRATION_STEP)

    def step(self, step: int) -> float:
        """Update ``step``; gives its mean loss."""
        losses = self._run(step)
        return sum(losses) / len(losses)

    def _run(self, step: int) -> list[float]:
        counted = self.plan.config.pipeline.microbatches
        losses = [self._item(step, microbatch) for microbatch in range(counted)]
        key, merged, squares = PartialKey(step, 1, 0, 0), dict[tuple[int, int], bytes](), 0
        for group in self.plan.layout.groups:
            found: dict[int, list[Any]] = {}
            merges = [StageMerge(self.plan, stage, self.stages[stage].state) for stage in group.stages]
            for stage, merge in zip(group.stages, merges, strict=True):
                for index, made in merge.slices(self.stages[stage].partials[key]).items():
                    found.setdefault(index, []).append((made.data, made.num_items))
            for index, slices in found.items():
                owner = next(merge for merge in merges if index in merge.partitions)
                done = owner.merge_partition(index, slices, total_items=counted)
                merged[group.index, index], squares = bytes(done.data), squares + done.squares
        self.merged_bytes = sum(map(len, merged.values()))
        _, coefficient = norm_and_coefficient(squares, counted, self.plan.config.optimizer.clip_norm)
        for executor in self.stages:
            merge = StageMerge(self.plan, executor.stage, executor.state)
            sections = merge.merged_sections(
                {index: merged[merge.group, index] for index in merge.partitions}, total_items=counted
            )
            scalars = None if step == CALIBRATION_STEP else step_scalars(self.plan.config, step)
            executor.state.apply_step(step, sections, coefficient_bits=coefficient if scalars else 0, scalars=scalars)
            executor.drop_partial(key)
        return losses

    def _item(self, step: int, microbatch: int) -> float:
        rows, inputs = training_rows(self.plan.config, self.tokens, step, microbatch), list[Any]([None])
        key, last = PartialKey(step, 1, 0, 0), self.stages[-1]
        for executor in self.stages[:-1]:
            item = ItemKey(step, microbatch, executor.stage)
            inputs.append(executor.forward(item, inputs[-1], rows, keep_graph=True).output)
        done = last.backward(ItemKey(step, microbatch, last.stage), None, inputs[-1], rows, partial=key)
        grad = done.output
        for executor in reversed(self.stages[:-1]):
            item = ItemKey(step, microbatch, executor.stage)
            grad = executor.backward(item, grad, inputs[executor.stage], rows, partial=key).output
        return float(np.uint32(done.loss_bits or 0).view(np.float32))

    def holdout_loss(self) -> float:
        """Mean over the evaluation's items."""
        config, losses = self.plan.config, list[float]()
        for number in range(config.num_evaluation_items):
            rows, x, bits = holdout_rows(config, self.holdout, number), None, 0
            for executor in self.stages:
                item = ItemKey(executor.state.next_step, config.num_items + number, executor.stage)
                done = executor.forward(item, x, rows, keep_graph=False)
                x, bits = done.output, done.loss_bits or 0
            losses.append(float(np.uint32(bits).view(np.float32)))
        return sum(losses) / len(losses)

    def weights(self) -> dict[str, Tensor]:
        """The newest ones, by name."""
        return {s.name: executor.state.weight(s.name) for executor in self.stages for s in executor.state.specs}


class Plain:
    """``peft`` and PyTorch as its users write it."""

    def __init__(
        self,
        plan: ModelPlan,
        source: PretrainedDirectory,
        weights: Mapping[str, Tensor],
        tokens: Tokens,
        holdout: Tokens,
    ) -> None:
        self.plan, self.tokens, self.holdout = plan, tokens, holdout
        attention = plan.config.model.attention
        model: Any = AutoModelForCausalLM.from_pretrained(
            source.directory, dtype=torch.float32, attn_implementation=attention
        )
        self.model = _with_adapters(plan, model.eval(), weights)
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        settings = plan.config.optimizer
        self._groups: Sequence[Any] = parameters
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": settings.weight_decay},
                {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
            ],
            lr=settings.learning_rate,
            betas=settings.betas,
            eps=settings.epsilon,
        )

    def _loss(self, rows: NDArray[np.int64]) -> Tensor:
        given, positions, labels = torch.from_numpy(rows), None, torch.from_numpy(rows)[:, 1:]
        if self.plan.config.objective.kind == "sft":
            dialogues = split_bits(given)
            given, positions, labels = dialogues.ids, dialogues.positions_BL, dialogues.labels_BL
        bf16 = self.plan.config.precision.compute == "bf16"
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            logits = self.model(input_ids=given[:, :-1], position_ids=positions, use_cache=False).logits
        return functional.cross_entropy(logits.float().flatten(0, 1), labels.reshape(-1))

    def step(self, step: int) -> float:
        """Update ``step``; gives its mean loss."""
        config, total = self.plan.config, 0.0
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(config, step)
        self.optimizer.zero_grad(set_to_none=True)
        for microbatch in range(config.pipeline.microbatches):
            loss = self._loss(training_rows(config, self.tokens, step, microbatch))
            (loss / config.pipeline.microbatches).backward()
            total += loss.item()
        if config.optimizer.clip_norm:
            nn.utils.clip_grad_norm_(self._groups, config.optimizer.clip_norm)
        self.optimizer.step()
        return total / config.pipeline.microbatches

    def holdout_loss(self) -> float:
        """As :meth:`Staged.holdout_loss`."""
        config, losses = self.plan.config, list[float]()
        with torch.no_grad():
            for number in range(config.num_evaluation_items):
                losses.append(self._loss(holdout_rows(config, self.holdout, number)).item())
        return sum(losses) / len(losses) if losses else math.nan


def _with_adapters(plan: ModelPlan, model: Any, weights: Mapping[str, Tensor]) -> Any:
    section = plan.config.trainable
    if section.kind != "lora":
        return model
    from peft import LoraConfig, get_peft_model

    wrapped: Any = get_peft_model(
        model,
        LoraConfig(
            r=section.rank,
            lora_alpha=section.alpha,  # pyright: ignore[reportArgumentType] - whole or not
            target_modules=list(section.targets) or "all-linear",
            task_type="CAUSAL_LM",
        ),
    )
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if parameter.requires_grad:
                own = name.removeprefix("base_model.model.").replace(".default.", ".")
                parameter.copy_(weights[own])
    return wrapped.eval()
