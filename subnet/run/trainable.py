"""The section ``[trainable]`` of a run file, and which tensors it trains: a function of their names alone. No torch."""

from __future__ import annotations

from subnet.run.config_base import Section, check

LORA_A, LORA_B = ".lora_A.weight", ".lora_B.weight"
"""How the names of an adapter's two matrices end, behind the name of the layer they are beside."""
_EMBEDDING, _NORM, _HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
_LAYERS = "model.layers."


class TrainableSection(Section, frozen=True):
    """Which parameters a run changes (docs/finetune.md); all others are frozen: they have no gradient and no moments."""

    kind: str = "full"
    """``full``; ``lora``: low-rank adapters beside linear layers, as ``peft`` makes them; ``layers``: some of the layers."""
    targets: tuple[str, ...] = ()
    """``lora``: linear layers that get an adapter, by name or its end, as ``target_modules`` of ``peft``; none: all of them."""
    rank: int = 8
    alpha: float = 16.0
    """``lora``: the adapter's output is multiplied by alpha / rank."""
    layers: tuple[int, ...] = ()
    """``layers``: the decoder layers that are trained. ``lora``: those that get adapters; none: all of them."""
    also: tuple[str, ...] = ()
    """``layers``: of ``embedding``, ``norm`` and ``head``, what is trained beside them. A tied head is the embedding."""

    def __post_init__(self) -> None:
        kinds, parts = ("full", "lora", "layers"), ("embedding", "norm", "head")
        check(self.kind in kinds, "trainable.kind", self.kind, ", ".join(kinds))
        lora, some = self.kind == "lora", self.kind == "layers"
        check(lora or not self.targets, "trainable.targets", list(self.targets), 'nothing, or kind = "lora"')
        check(all(self.targets), "trainable.targets", list(self.targets), "names that aren't empty")
        check(1 <= self.rank <= 1024, "trainable.rank", self.rank, "1 to 1024")
        check(0 < self.alpha <= 1e6, "trainable.alpha", self.alpha, "above 0, at most 1e6")
        check(
            self.kind != "full" or not self.layers,
            "trainable.layers",
            list(self.layers),
            "nothing where all is trained",
        )
        check(all(n >= 0 for n in self.layers), "trainable.layers", list(self.layers), "numbers of layers, 0 and up")
        check(some or not self.also, "trainable.also", list(self.also), 'nothing, or kind = "layers"')
        check(set(self.also) <= set(parts), "trainable.also", list(self.also), ", ".join(parts))
        check(
            not some or bool(self.layers or self.also), "trainable.layers", [], "one layer or more, or trainable.also"
        )

    @property
    def scaling(self) -> float:
        return self.alpha / self.rank


def is_adapter(name: str) -> bool:
    """Whether a tensor is one of an adapter's two."""
    return name.endswith((LORA_A, LORA_B))


def trains(section: TrainableSection, name: str, *, tied: bool) -> bool:
    """Whether a tensor of the whole model is trained; ``tied``: the head is the embedding."""
    if section.kind == "full":
        return True
    if section.kind == "lora":
        return is_adapter(name)
    if name.startswith(_LAYERS):
        number = name.removeprefix(_LAYERS).split(".", 1)[0]
        return number.isdecimal() and int(number) in section.layers
    also = {"embedding", "head"} if tied and name == _EMBEDDING else {_PARTS.get(name, "")}
    return not also.isdisjoint(section.also)


_PARTS = {_EMBEDDING: "embedding", _NORM: "norm", _HEAD: "head"}
