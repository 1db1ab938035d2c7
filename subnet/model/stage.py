"""One pipeline stage of a model: the library's own layers, cut without changing a bit of loss or gradients.

One builder for every family; where families differ is said in :mod:`subnet.model.families`.
Shape suffixes: B rows of a chunk, L positions, H hidden size, N = B · L tokens, V vocabulary, 2E sums of the router loss.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from subnet.model.adapters import add_adapters
from subnet.model.dialogues import IGNORED_LABEL
from subnet.model.families import SLIDING
from subnet.model.plan import ModelPlan
from subnet.model.registry import EMBEDDING_NAME, HEAD_NAME, NORM_NAME, Architecture, load_architecture
from subnet.model.routing import add_layers, no_routing, router_loss
from subnet.run.trainable import TrainableSection, trains

EXPERTS = "grouped_mm"
"""The library's way to multiply experts: its default, whose sums have a fixed order and whose gradients are one product."""


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

    layers: Sequence[int]
    is_first: bool
    is_last: bool


@dataclass(frozen=True)
class Leaf:
    """A parameter with a gradient of its own; ``tensor`` is its entry in the canonical list.

    Under bf16 a linear layer's parameter is a bf16 copy of ``master``, made once per update instead of once per chunk; so are
    the experts' matrices, which autocast would leave in fp32.
    A buffer that is part of the state (``trained`` is false) has a gradient of zeros. A frozen one has none.
    """

    name: str
    tensor: str
    parameter: Tensor
    master: Tensor
    trained: bool = True
    frozen: bool = False


@dataclass(frozen=True)
class LossResult:
    """Loss of a chunk and, if asked for, its gradients with respect to the last hidden states, head and router sums."""

    loss: Tensor
    hidden_grad_BLH: Tensor | None = None
    head_grad_VH: Tensor | None = None
    routing_grad_2E: Tensor | None = None


class Boundary(NamedTuple):
    """What crosses from a layer to the next, or its gradient; ``routing_2E`` only where the model has a router loss."""

    hidden_BLH: Tensor
    routing_2E: Tensor | None = None

    def detach(self) -> Boundary:
        """The values without the graph behind them."""
        return Boundary(self.hidden_BLH.detach(), None if self.routing_2E is None else self.routing_2E.detach())


@dataclass(frozen=True)
class _ShapeConstants:
    """What depends on a chunk's shape alone; masks and rotary tables by kind of attention."""

    positions: Tensor
    masks: dict[str, Tensor | None]
    rotary: dict[str, Any]


class StageModule(nn.Module):
    """Built without memory for its weights: call :meth:`bind` for every leaf before the first forward."""

    def __init__(
        self,
        architecture: Architecture,
        spec: StageSpec,
        attention: str,
        *,
        compute: str = "fp32",
        trainable: TrainableSection | None = None,
    ) -> None:
        super().__init__()
        # A config of its own: implementations must not leak into another user of the architecture.
        own = load_architecture(architecture.model_config)
        config = own.config
        config._attn_implementation = attention
        config._experts_implementation = EXPERTS
        parts = architecture.parts
        self.config = config
        self.architecture = own
        self.spec = spec
        self.tied = architecture.tied
        self.compute = compute
        self.trainable = trainable or TrainableSection()
        hidden, vocab = architecture.hidden_size, architecture.vocab_size
        with torch.device("meta"):
            self.embed_tokens = _embedding(own) if spec.is_first else None
            self.layers = nn.ModuleDict({str(i): parts.decoder_layer(config, i) for i in spec.layers})
            for index, layer in self.layers.items():
                add_adapters(layer, own.adapter_targets(int(index), self.trainable), self.trainable)
            self.norm = parts.norm(hidden, eps=config.rms_norm_eps) if spec.is_last else None
            self.lm_head = nn.Linear(hidden, vocab, bias=False) if spec.is_last else None
        if self.embed_tokens is not None and parts.scaled_embedding is not None:
            self.embed_tokens.embed_scale = torch.tensor(self.embed_tokens.scalar_embed_scale)
        self.rotary_emb = parts.rotary_embedding(config=config)
        self.bound: tuple[Leaf, ...] = ()
        self._constants: dict[tuple[int, int], _ShapeConstants] = {}
        self._router_logits: list[Tensor] = []
        if own.num_routed:
            for index in filter(own.is_sparse, spec.layers):
                router = self.layers[str(index)].get_submodule(own.family.router)
                router.register_forward_hook(self._keep_logits)
        self.eval()

    def _keep_logits(self, _router: nn.Module, _given: object, made: tuple[Tensor, ...]) -> None:
        self._router_logits.append(made[0])

    def leaf_names(self) -> list[tuple[str, str]]:
        """(leaf, entry of the canonical list) of each parameter, embedding first, head last."""
        names: list[str] = [EMBEDDING_NAME] if self.spec.is_first else []
        for index, layer in self.layers.items():
            names += [f"model.layers.{index}.{name}" for name in layer.state_dict()]
        pairs = [(name, name) for name in names]
        if self.spec.is_last:
            pairs += [(NORM_NAME, NORM_NAME), (HEAD_NAME, EMBEDDING_NAME if self.tied else HEAD_NAME)]
        return pairs

    def bind(self, weights: Mapping[str, Tensor]) -> list[Leaf]:
        """Make each leaf a parameter that shares the storage of its entry's tensor (but see :class:`Leaf` for bf16).

        A leaf named in ``weights`` has that tensor: a lane's two leaves of tied embeddings part within a round.
        After the tensors changed, :meth:`refresh` must be called.
        """
        leaves: list[Leaf] = []
        for name, entry in self.leaf_names():
            path = name.removeprefix("model.").split(".")
            owner: nn.Module = self.get_submodule(".".join(path[:-1]))
            meta: Tensor = getattr(owner, path[-1])
            trained = path[-1] not in owner._buffers
            given = weights.get(name, weights[entry])
            if meta.shape != given.shape:
                raise ValueError(f"{entry}: {tuple(given.shape)} doesn't fit {tuple(meta.shape)}")
            frozen = not trains(self.trainable, entry, tied=self.tied)
            master = given.detach()
            experts = ".experts." in name and meta.dim() == 3
            cast = self.compute == "bf16" and (isinstance(owner, nn.Linear) or experts)
            parameter = nn.Parameter(master.to(torch.bfloat16) if cast else master, not frozen) if trained else master
            setattr(owner, path[-1], parameter)
            leaves.append(Leaf(name, entry, parameter, master, trained, frozen))
        device = leaves[0].parameter.device
        self.rotary_emb.to(device)
        if self.embed_tokens is not None and self.architecture.parts.scaled_embedding is not None:
            self.embed_tokens.embed_scale = self.embed_tokens.embed_scale.to(device)
        self._constants.clear()
        self.bound = tuple(leaves)
        return leaves

    def refresh(self, *, frozen: bool = False) -> None:
        """Bring bf16 copies up to the weights (``frozen``: of those that updates don't change too); graphs are void."""
        with torch.no_grad():
            for leaf in self.bound:
                if leaf.parameter.dtype != leaf.master.dtype and (frozen or not leaf.frozen):
                    leaf.parameter.copy_(leaf.master)

    def region(self, device: torch.device) -> AbstractContextManager[object]:
        """The autocast region of a chunk: no cast cache, which would change gradients between chunks."""
        if self.compute == "fp32":
            return nullcontext()
        return torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=False)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (B, L) at the first stage, hidden states (B, L, H) at others; the last applies the final norm."""
        return self.through(Boundary(x)).hidden_BLH

    def through(self, given: Boundary, positions_BL: Tensor | None = None) -> Boundary:
        """As :meth:`forward`, with the sums of the router loss in and out where the model has one.

        Where ``positions_BL`` start again within a row, what is before can't be seen from there on.
        """
        x, routing_2E = given
        self._router_logits.clear()
        with self.region(x.device):
            hidden_BLH: Tensor = x if self.embed_tokens is None else self.embed_tokens(x)
            constants = self._shape_constants(hidden_BLH, positions_BL)
            for index, layer in self.layers.items():
                kind = self.architecture.attention_of(int(index))
                hidden_BLH = layer(
                    hidden_BLH,
                    attention_mask=constants.masks[kind],
                    position_embeddings=constants.rotary[kind],
                    position_ids=constants.positions,
                    cache=None,
                    use_cache=False,
                )
            if self.norm is not None:
                hidden_BLH = self.norm(hidden_BLH)
            if self.architecture.num_routed:
                routing_2E = no_routing(self.architecture.num_routed, x.device) if routing_2E is None else routing_2E
                routing_2E = add_layers(routing_2E, self._router_logits, int(self.config.num_experts_per_tok))
                self._router_logits.clear()
            return Boundary(hidden_BLH, routing_2E)

    def _shape_constants(self, hidden_BLH: Tensor, positions_BL: Tensor | None) -> _ShapeConstants:
        """Positions, rotary tables and masks as the library builds them."""
        if positions_BL is not None:
            with torch.no_grad():
                return self._make_constants(hidden_BLH, positions_BL)
        key = (hidden_BLH.shape[0], hidden_BLH.shape[1])
        if key not in self._constants:
            with torch.no_grad():
                positions = torch.arange(hidden_BLH.shape[1], device=hidden_BLH.device).unsqueeze(0)
                self._constants[key] = self._make_constants(hidden_BLH, positions)
        return self._constants[key]

    def _make_constants(self, hidden_BLH: Tensor, positions: Tensor) -> _ShapeConstants:
        family = self.architecture.family
        kinds = sorted({self.architecture.attention_of(int(index)) for index in self.layers})
        masks: dict[str, Tensor | None] = {}
        rotary: dict[str, Any] = {}
        shared = None if family.rotary_by_layer else self.rotary_emb(hidden_BLH, position_ids=positions)
        for kind in kinds:
            windowed = kind == SLIDING or (family.masks == "window" and self.config.sliding_window is not None)
            make: Any = create_sliding_window_causal_mask if windowed else create_causal_mask
            masks[kind] = make(
                config=self.config,
                inputs_embeds=hidden_BLH,
                attention_mask=None,
                cache=None,
                position_ids=positions,
            )
            rotary[kind] = self.rotary_emb(hidden_BLH, positions, kind) if shared is None else shared
        return _ShapeConstants(positions, masks, rotary)

    def logits(self, hidden_NH: Tensor) -> Tensor:
        """The head's logits, softly capped where the model does so; call it inside :meth:`region`."""
        if self.lm_head is None:
            raise RuntimeError("only the last stage has a head")
        logits_NV = self.lm_head(hidden_NH)
        cap = self.architecture.logit_softcap
        if cap is not None:
            logits_NV = torch.tanh(logits_NV / cap) * cap
        return logits_NV

    def chunk_loss(
        self,
        hidden_BLH: Tensor,
        labels_BL: Tensor,
        *,
        divisor: int,
        piece_tokens: int,
        want_grad: bool,
        routing_2E: Tensor | None = None,
        num_tokens: int | None = None,
    ) -> LossResult:
        """Cross-entropy in pieces, so that the logits of one piece are alive at a time.

        The gradients are those autograd gives for ``total = piece_0; total = total + piece_1; ...; total / divisor``:
        there the last piece is differentiated first, so the head's gradients add from the last piece to the first.
        With ``routing_2E`` the router loss is added, weighted by the chunk's share of the microbatch's ``num_tokens``
        (None: of ``divisor``).
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
                logits_NV = self.logits(leaf_NH).float()
                loss = functional.cross_entropy(logits_NV, piece_labels, ignore_index=IGNORED_LABEL, reduction="sum")
            losses.append(loss.detach())
            if want_grad:
                wanted = (leaf_NH, head.weight) if head.weight.requires_grad else (leaf_NH,)
                piece_grad, *weight_grad = torch.autograd.grad(loss, wanted, grad_outputs=unit)
                grads.append(piece_grad)
                for grad in weight_grad:
                    head_grad = grad.float() if head_grad is None else head_grad.add_(grad)
            del logits_NV, loss
        total = losses.pop()
        while losses:
            total = total + losses.pop()
        loss = total / scale
        routing_grad_2E: Tensor | None = None
        if routing_2E is not None:
            added, routing_grad_2E = self._router_loss(routing_2E, labels_BL.numel(), num_tokens or divisor, want_grad)
            loss = loss + added
        if not want_grad:
            return LossResult(loss)
        return LossResult(loss, torch.cat(grads[::-1]).reshape(hidden_BLH.shape), head_grad, routing_grad_2E)

    def _router_loss(
        self, routing_2E: Tensor, tokens: int, of_tokens: int, want_grad: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The chunk's part of the microbatch's router loss and its gradient."""
        factor = self.architecture.router_loss_coefficient * (tokens / of_tokens)
        with torch.set_grad_enabled(want_grad):
            leaf_2E = routing_2E.detach().requires_grad_(want_grad)
            loss = router_loss(leaf_2E, tokens * self.architecture.num_sparse_layers, factor)
            grad_2E = torch.autograd.grad(loss, leaf_2E)[0] if want_grad else None
        return loss.detach(), grad_2E


def _embedding(architecture: Architecture) -> Any:
    hidden, vocab, padding = architecture.hidden_size, architecture.vocab_size, architecture.config.pad_token_id
    scaled = architecture.parts.scaled_embedding
    if scaled is None:
        return nn.Embedding(vocab, hidden, padding)
    return scaled(vocab, hidden, padding, embed_scale=hidden**0.5)


def stage_spec(plan: ModelPlan, stage: int) -> StageSpec:
    return StageSpec(plan.layers_of(stage), plan.is_first(stage), plan.is_last(stage))


def make_stage(
    architecture: Architecture,
    spec: StageSpec,
    attention: str,
    *,
    compute: str = "fp32",
    trainable: TrainableSection | None = None,
) -> StageModule:
    """A stage of the library's modules, or of a builder's own."""
    from subnet.model.sequence import SequenceArchitecture, SequenceStage  # it is built on this module

    if isinstance(architecture, SequenceArchitecture):
        return SequenceStage(architecture, spec, compute=compute, trainable=trainable)
    return StageModule(architecture, spec, attention, compute=compute, trainable=trainable)


def build_stage(plan: ModelPlan, stage: int) -> StageModule:
    """The stage's module as the run file asks for it, not yet bound to weights."""
    return make_stage(
        load_architecture(plan.model_config),
        stage_spec(plan, stage),
        plan.config.model.attention,
        compute=plan.config.precision.compute,
        trainable=plan.config.trainable,
    )
