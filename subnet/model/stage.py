"""One pipeline stage of a model: the library's own layers, cut without changing a bit of loss or gradients.

Shape suffixes: B rows of a chunk, L positions, H hidden size, N = B · L tokens, V vocabulary.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.masking_utils import create_causal_mask

from subnet.model.plan import ModelPlan
from subnet.model.registry import EMBEDDING_NAME, HEAD_NAME, NORM_NAME, Architecture, load_architecture

IGNORED_LABEL = -100


def prepare_torch(num_threads: int) -> None:
    """Once per process, before the first kernel: deterministic algorithms, a fixed thread count, no autotuning."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_num_threads(num_threads)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.enable_cudnn_sdp(False)


@dataclass(frozen=True)
class StageSpec:
    """What a stage holds: its layers, the embedding if it is the first, norm and head if it is the last."""

    layers: range
    is_first: bool
    is_last: bool


@dataclass(frozen=True)
class Leaf:
    """A parameter with a gradient of its own; ``tensor`` is its entry in the canonical list.

    Under bf16 a linear layer's parameter is a bf16 copy of ``master``, made once per update instead of once per chunk.
    """

    name: str
    tensor: str
    parameter: nn.Parameter
    master: Tensor


@dataclass(frozen=True)
class LossResult:
    """Loss of a chunk and, if asked for, its gradients with respect to the last hidden states and the head."""

    loss: Tensor
    hidden_grad_BLH: Tensor | None = None
    head_grad_VH: Tensor | None = None


class StageModule(nn.Module):
    """Built without memory for its weights: call :meth:`bind` for every leaf before the first forward."""

    def __init__(self, architecture: Architecture, spec: StageSpec, attention: str, *, compute: str = "fp32") -> None:
        super().__init__()
        # A config of its own: the attention implementation must not leak into another user of the architecture.
        config = load_architecture(architecture.model_config).config
        config._attn_implementation = attention
        parts = architecture.parts
        self.config = config
        self.spec = spec
        self.tied = architecture.tied
        self.compute = compute
        hidden, vocab = architecture.hidden_size, architecture.vocab_size
        with torch.device("meta"):
            self.embed_tokens = nn.Embedding(vocab, hidden, config.pad_token_id) if spec.is_first else None
            self.layers = nn.ModuleDict({str(i): parts.decoder_layer(config, i) for i in spec.layers})
            self.norm = parts.norm(hidden, eps=config.rms_norm_eps) if spec.is_last else None
            self.lm_head = nn.Linear(hidden, vocab, bias=False) if spec.is_last else None
        self.rotary_emb = parts.rotary_embedding(config=config)
        self.bound: tuple[Leaf, ...] = ()
        self._constants: dict[tuple[int, int], tuple[Tensor, Any, Tensor | None]] = {}
        self.eval()

    def leaf_names(self) -> list[tuple[str, str]]:
        """(leaf, entry of the canonical list) of each parameter, embedding first, head last."""
        names: list[str] = [EMBEDDING_NAME] if self.spec.is_first else []
        for index, layer in self.layers.items():
            names += [f"model.layers.{index}.{name}" for name, _ in layer.named_parameters()]
        pairs = [(name, name) for name in names]
        if self.spec.is_last:
            pairs += [(NORM_NAME, NORM_NAME), (HEAD_NAME, EMBEDDING_NAME if self.tied else HEAD_NAME)]
        return pairs

    def bind(self, weights: Mapping[str, Tensor]) -> list[Leaf]:
        """Make each leaf a parameter that shares the storage of its entry's tensor (but see :class:`Leaf` for bf16).

        After the tensors changed, :meth:`refresh` must be called.
        """
        leaves: list[Leaf] = []
        for name, entry in self.leaf_names():
            path = name.removeprefix("model.").split(".")
            owner: nn.Module = self.get_submodule(".".join(path[:-1]))
            meta: Tensor = getattr(owner, path[-1])
            if meta.shape != weights[entry].shape:
                raise ValueError(f"{entry}: {tuple(weights[entry].shape)} doesn't fit {tuple(meta.shape)}")
            master = weights[entry].detach()
            cast = self.compute == "bf16" and isinstance(owner, nn.Linear)
            parameter = nn.Parameter(master.to(torch.bfloat16) if cast else master)
            setattr(owner, path[-1], parameter)
            leaves.append(Leaf(name, entry, parameter, master))
        self.rotary_emb.to(leaves[0].parameter.device)
        self._constants.clear()
        self.bound = tuple(leaves)
        return leaves

    def refresh(self) -> None:
        """Bring bf16 copies up to the weights; graphs built before are void."""
        with torch.no_grad():
            for leaf in self.bound:
                if leaf.parameter.dtype != leaf.master.dtype:
                    leaf.parameter.copy_(leaf.master)

    def region(self, device: torch.device) -> AbstractContextManager[object]:
        """The autocast region of a chunk: no cast cache, which would change gradients between chunks."""
        if self.compute == "fp32":
            return nullcontext()
        return torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=False)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (B, L) at the first stage, hidden states (B, L, H) at others; the last applies the final norm."""
        with self.region(x.device):
            hidden_BLH: Tensor = x if self.embed_tokens is None else self.embed_tokens(x)
            positions, rotary, mask = self._shape_constants(hidden_BLH)
            for layer in self.layers.values():
                hidden_BLH = layer(
                    hidden_BLH,
                    attention_mask=mask,
                    position_embeddings=rotary,
                    position_ids=positions,
                    cache=None,
                    use_cache=False,
                )
            return hidden_BLH if self.norm is None else self.norm(hidden_BLH)

    def _shape_constants(self, hidden_BLH: Tensor) -> tuple[Tensor, Any, Tensor | None]:
        """Positions, rotary tables and mask as the library builds them; they depend on the shape alone."""
        key = (hidden_BLH.shape[0], hidden_BLH.shape[1])
        if key not in self._constants:
            with torch.no_grad():
                positions = torch.arange(key[1], device=hidden_BLH.device).unsqueeze(0)
                mask: Any = create_causal_mask(
                    config=self.config,
                    inputs_embeds=hidden_BLH,
                    attention_mask=None,
                    cache=None,
                    position_ids=positions,
                )
                rotary = self.rotary_emb(hidden_BLH, position_ids=positions)
            self._constants[key] = (positions, rotary, mask)
        return self._constants[key]

    def chunk_loss(
        self, hidden_BLH: Tensor, labels_BL: Tensor, *, divisor: int, piece_tokens: int, want_grad: bool
    ) -> LossResult:
        """Cross-entropy in pieces, so that the logits of one piece are alive at a time.

        The gradients are those autograd gives for ``total = piece_0; total = total + piece_1; ...; total / divisor``:
        there the last piece is differentiated first, so the head's gradients add from the last piece to the first.
        """
        head = self.lm_head
        if head is None:
            raise RuntimeError("only the last stage has a loss")
        pieces = hidden_BLH.detach().reshape(-1, hidden_BLH.shape[-1]).split(piece_tokens)
        labels = labels_BL.reshape(-1).split(piece_tokens)
        scale = torch.tensor(float(divisor), dtype=torch.float32, device=hidden_BLH.device)
        unit = torch.ones_like(scale) / scale
        losses: list[Tensor] = []
        grads: list[Tensor] = []
        head_grad: Tensor | None = None
        for piece_NH, piece_labels in zip(reversed(pieces), reversed(labels), strict=True):
            with torch.set_grad_enabled(want_grad), self.region(hidden_BLH.device):
                leaf_NH = piece_NH.detach().requires_grad_(want_grad)
                logits_NV = head(leaf_NH).float()
                loss = functional.cross_entropy(logits_NV, piece_labels, ignore_index=IGNORED_LABEL, reduction="sum")
            losses.append(loss.detach())
            if want_grad:
                piece_grad, weight_grad = torch.autograd.grad(loss, (leaf_NH, head.weight), grad_outputs=unit)
                grads.append(piece_grad)
                head_grad = weight_grad.float() if head_grad is None else head_grad.add_(weight_grad)
            del logits_NV, loss
        total = losses.pop()
        while losses:
            total = total + losses.pop()
        loss = total / scale
        if not want_grad:
            return LossResult(loss)
        return LossResult(loss, torch.cat(grads[::-1]).reshape(hidden_BLH.shape), head_grad)


def stage_spec(plan: ModelPlan, stage: int) -> StageSpec:
    return StageSpec(plan.layers_of(stage), plan.is_first(stage), plan.is_last(stage))


def build_stage(plan: ModelPlan, stage: int) -> StageModule:
    """The stage's module as the run file asks for it, not yet bound to weights."""
    return StageModule(
        load_architecture(plan.model_config),
        stage_spec(plan, stage),
        plan.config.model.attention,
        compute=plan.config.precision.compute,
    )
