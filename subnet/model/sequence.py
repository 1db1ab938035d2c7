"""A model that is a sequence of a builder's own modules: an embedding, blocks, a head; cut between blocks, to the bit.

``build(**arguments)`` gives the modules in order: an ``nn.Embedding``, blocks that keep the shape (B, L, H), and an
``nn.Linear`` without bias as the head. What each gives is passed on as fp32, so cuts change nothing. Modules run in
evaluation mode: nothing is dropped, running statistics stay as they are.

Shape suffixes: B rows, L positions, H hidden size, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from types import SimpleNamespace
from typing import Any, cast

import torch
from blake3 import blake3
from torch import Tensor, nn

from subnet.errors import ConfigError
from subnet.model.families import Family, FamilyParts
from subnet.model.own_code import MODULES, called_with, function_of
from subnet.model.registry import EMBEDDING_NAME, HEAD_NAME, Architecture, LayerShapes
from subnet.model.stage import Boundary, StageModule, StageSpec
from subnet.numerics.layout import TensorSpec
from subnet.run.trainable import TrainableSection

FAMILY = Family(MODULES, "", attentions=("sdpa", "eager"))
LONGEST = 131_072
_FIRST = 3
"""An embedding, a block and a head at least."""


class SequenceArchitecture(Architecture):
    """A checked sequence; ``config`` has the few numbers that the rest asks of a library's config."""

    @cached_property
    def parts(self) -> FamilyParts:
        none: Any = None
        return FamilyParts(none, none, none, none, None)

    @cached_property
    def model_config(self) -> dict[str, Any]:
        return dict(vars(self.config))

    def build(self) -> list[nn.Module]:
        """The modules with the weights that the builder's code draws; on the CPU, and the caller's generator is left alone."""
        return build_modules(self.config.modules, self.config.modules_hash, self.config.arguments)

    def layer_kind(self, layer: int) -> tuple[str, bool]:
        """Each block for itself: its code may do anything."""
        return str(layer), False

    def linears(self, layer: int) -> tuple[str, ...]:
        return ()

    def layer_shapes(self, layer: int) -> LayerShapes:
        return self._shapes[layer]

    @cached_property
    def _shapes(self) -> tuple[LayerShapes, ...]:
        blocks = self.build()[1:-1]
        return tuple(tuple((name, tuple(t.shape)) for name, t in b.state_dict().items()) for b in blocks)

    def units(self, sequence_length: int, trainable: TrainableSection | None = None) -> Any:
        whole = super().units(sequence_length, trainable)
        head = () if self.tied else (TensorSpec(HEAD_NAME, (self.vocab_size, self.hidden_size), True),)
        return type(whole)((*whole.units[:-1], head), whole.unit_flops_per_token, whole.tied)

    def _layer_flops(self, layer: int, sequence_length: int) -> float:
        """As if a token met each element of a matrix or kernel once."""
        return 6.0 * sum(torch.Size(shape).numel() for _, shape in self.layer_shapes(layer)) or 1.0


def describe(called: str, hash_: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The model config of a run of these modules; raises :class:`ConfigError` where they can't be trained."""
    modules = build_modules(called, hash_, arguments)
    embedding, head = check_modules(called, modules)
    vocab, hidden = embedding.num_embeddings, embedding.embedding_dim
    widest = max(sum(p.numel() for p in block.parameters()) for block in modules[1:-1])
    return {
        "model_type": MODULES,
        "architectures": [f"sequence of {called}"],
        "modules": called,
        "modules_hash": hash_,
        "arguments": dict(arguments),
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": max(1, -(-widest // (3 * hidden))),
        "num_hidden_layers": len(modules) - 2,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "max_position_embeddings": LONGEST,
        "tie_word_embeddings": head.weight is embedding.weight,
    }


def load_sequence(model_config: Mapping[str, Any]) -> SequenceArchitecture:
    """The architecture that a config describes, if its code is allowed here and still gives what the config says."""
    called, hash_ = str(model_config.get("modules")), str(model_config.get("modules_hash"))
    given = model_config.get("arguments") or {}
    if not isinstance(given, Mapping):
        raise ConfigError("model.config of modules has no table of arguments", hint="submit the run again")
    expected = describe(called, hash_, cast("Mapping[str, Any]", given))
    for key, value in expected.items():
        if model_config.get(key) != value:
            raise ConfigError(
                f"model.config.{key} = {model_config.get(key)!r}, the modules say {value!r}",
                hint="submit the run again",
            )
    return SequenceArchitecture(FAMILY, SimpleNamespace(**expected))


def build_modules(called: str, hash_: str, arguments: Mapping[str, Any], *, seed: int = 0) -> list[nn.Module]:
    """What the builder's function gives, its draws taken from ``seed``; the caller's generator is left alone."""
    function = function_of(hash_, called)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = called_with(function, called, dict(arguments))
    modules = list(made) if isinstance(made, Sequence | nn.Sequential | nn.ModuleList) else []
    if not modules or not all(isinstance(module, nn.Module) for module in modules):
        raise ConfigError(f"model.modules: {called} gives no sequence of modules", hint="return a list of nn.Module")
    return [module.eval() for module in modules]


def check_modules(called: str, modules: Sequence[nn.Module]) -> tuple[nn.Embedding, nn.Linear]:
    """Embedding and head; raises :class:`ConfigError` where something can't be trained to the bit or exported."""

    def refuse(what: str, hint: str) -> ConfigError:
        return ConfigError(f"model.modules: {called}: {what}", hint=hint)

    if len(modules) < _FIRST:
        raise refuse(f"{len(modules)} modules", "an nn.Embedding, one block or more, an nn.Linear")
    embedding, head = modules[0], modules[-1]
    plain = isinstance(embedding, nn.Embedding) and not embedding.max_norm and not embedding.sparse
    if not isinstance(embedding, nn.Embedding) or not plain or embedding.scale_grad_by_freq:
        raise refuse("the first module is no plain nn.Embedding", "nn.Embedding(vocab_size, hidden_size)")
    if not isinstance(head, nn.Linear) or isinstance(head.bias, Tensor):
        raise refuse("the last module is no nn.Linear without bias", "nn.Linear(hidden_size, vocab_size, bias=False)")
    if (head.out_features, head.in_features) != (embedding.num_embeddings, embedding.embedding_dim):
        raise refuse(
            f"the head is {head.in_features} to {head.out_features}, the embedding "
            f"{embedding.num_embeddings} by {embedding.embedding_dim}",
            "both of the same vocabulary and width",
        )
    owner: dict[int, int] = {}
    for number, module in enumerate(modules):
        if not any(True for _ in module.parameters()):
            raise refuse(f"module {number} has no weights", "put it into the block before or behind it")
        for name, tensor in module.state_dict(keep_vars=True).items():
            tied = number == len(modules) - 1 and tensor is embedding.weight
            if not tied and owner.setdefault(id(tensor), number) != number:
                raise refuse(
                    f"modules {owner[id(tensor)]} and {number} share {name}", "only the head may be the embedding's"
                )
            if tensor.dtype != torch.float32:
                raise refuse(f"{name} of module {number} is {tensor.dtype}", "weights and stored buffers are float32")
            if isinstance(tensor, nn.Parameter) and not tensor.requires_grad:
                raise refuse(f"{name} of module {number} is frozen", "say what is trained in [trainable]")
    return embedding, head


def check_behaviour(architecture: SequenceArchitecture, sequence_length: int) -> None:
    """One row there and back: shapes are kept, no position sees a later one, each weight gets a gradient, twice the same.

    Raises :class:`ConfigError` naming the module; costs a forward and backward of one row, twice.
    """
    modules, called = architecture.build(), architecture.config.modules
    generator = torch.Generator().manual_seed(0)
    tokens_BL = torch.randint(0, architecture.vocab_size, (1, sequence_length), generator=generator)
    first = _through(called, modules, tokens_BL)
    first[-1].square().mean().backward()
    for number, module in enumerate(modules[1:-1], start=1):
        idle = next((name for name, p in module.named_parameters() if not isinstance(p.grad, Tensor)), None)
        if idle is not None:
            raise ConfigError(
                f"model.modules: {called}: {idle} of module {number} got no gradient", hint="leave out what isn't used"
            )
    half = sequence_length // 2
    with torch.no_grad():
        again = _through(called, modules, tokens_BL)
        changed_BL = tokens_BL.clone()
        changed_BL[:, half:] = (changed_BL[:, half:] + 1) % architecture.vocab_size
        other = _through(called, modules, changed_BL)
    for number, (one, same, cut) in enumerate(zip(first[1:], again[1:], other[1:], strict=True), start=1):
        if not torch.equal(one, same):
            raise ConfigError(
                f"model.modules: {called}: module {number} gives other numbers the second time",
                hint="no randomness and no state in forward",
            )
        if not torch.allclose(one[:, :half], cut[:, :half], rtol=1e-4, atol=1e-5):
            raise ConfigError(
                f"model.modules: {called}: module {number} lets a position see later ones, so the model would read "
                "what it is to predict",
                hint="mask attention, pad convolutions on the left alone",
            )


def _through(called: str, modules: Sequence[nn.Module], tokens_BL: Tensor) -> list[Tensor]:
    """What each module gives."""
    made: list[Tensor] = []
    x: Any = tokens_BL
    for number, module in enumerate(modules):
        try:
            x = module(x)
        except Exception as error:
            words = str(error).splitlines()[0][:300] if str(error) else ""
            raise ConfigError(
                f"model.modules: {called}: module {number} fails: {type(error).__name__}: {words}",
                hint="blocks take (rows, positions, hidden) and give the same shape",
            ) from error
        last = number == len(modules) - 1
        if not isinstance(x, Tensor) or (not last and made and x.shape != made[0].shape):
            what = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ConfigError(
                f"model.modules: {called}: module {number} gives {what}", hint="blocks keep (rows, positions, hidden)"
            )
        made.append(x)
    return made


def module_names(architecture: SequenceArchitecture) -> dict[str, str]:
    """Names in the run to names in ``nn.Sequential(*build())``, in canonical order."""
    last = architecture.num_layers + 1
    pairs = {EMBEDDING_NAME: "0.weight"}
    for layer in range(architecture.num_layers):
        pairs |= {f"model.layers.{layer}.{name}": f"{layer + 1}.{name}" for name, _ in architecture.layer_shapes(layer)}
    return pairs if architecture.tied else {**pairs, HEAD_NAME: f"{last}.weight"}


def drawn_weights(
    architecture: SequenceArchitecture, specs: Sequence[TensorSpec], seed: int
) -> Iterator[tuple[str, Tensor]]:
    """Initial weights as the builder's code draws them for the whole model: cuts change nothing."""
    config = architecture.config
    digest = blake3(b"iota/init/1\0" + seed.to_bytes(8, "little") + config.modules.encode()).digest()
    drawn = int.from_bytes(digest[:8], "little") & (2**63 - 1)
    modules = build_modules(config.modules, config.modules_hash, config.arguments, seed=drawn)
    names = module_names(architecture)
    held = {f"{number}.{name}": t for number, m in enumerate(modules) for name, t in m.state_dict().items()}
    for spec in specs:
        yield spec.name, held[names[spec.name]].detach().clone()


class SequenceStage(StageModule):
    """A stage of such a model: its blocks, each one's output as fp32."""

    def __init__(
        self, architecture: SequenceArchitecture, spec: StageSpec, *, compute: str, trainable: TrainableSection | None
    ) -> None:
        nn.Module.__init__(self)
        modules = architecture.build()
        self.config, self.architecture, self.spec = architecture.config, architecture, spec
        self.tied, self.compute = architecture.tied, compute
        self.trainable = trainable or TrainableSection()
        self.embed_tokens: Any = modules[0] if spec.is_first else None
        self.layers = nn.ModuleDict({str(index): modules[index + 1] for index in spec.layers})
        self.norm = None
        self.lm_head: Any = modules[-1] if spec.is_last else None
        if self.tied and spec.is_first and spec.is_last:  # two leaves with gradients of their own
            self.lm_head = nn.Linear(architecture.hidden_size, architecture.vocab_size, bias=False, device="meta")
        self.rotary_emb: Any = nn.Identity()
        self.bound = ()
        self._constants = {}
        self._router_logits = []
        self.eval()

    def leaf_names(self) -> list[tuple[str, str]]:
        return [pair for pair in super().leaf_names() if pair[0] != "model.norm.weight"]

    def bind(self, weights: Mapping[str, Tensor]) -> list[Any]:
        leaves = super().bind(weights)
        self.to(leaves[0].parameter.device)  # buffers that aren't stored
        return leaves

    def through(self, given: Boundary, positions_BL: Tensor | None = None) -> Boundary:
        x = given.hidden_BLH
        if positions_BL is not None:
            raise ValueError("modules of a builder's own don't know of documents within a row")
        with self.region(x.device):
            hidden_BLH: Tensor = x if self.embed_tokens is None else self.embed_tokens(x)
            for layer in self.layers.values():
                hidden_BLH = layer(hidden_BLH).float()
        return Boundary(hidden_BLH)


def config_json(architecture: SequenceArchitecture) -> str:
    """``config.json`` of an export."""
    return json.dumps({**architecture.model_config, "dtype": "float32"}, indent=2, sort_keys=True) + "\n"
