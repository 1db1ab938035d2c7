"""Names of a model's tensors in Hugging Face directories, where they aren't those of the library's modules. No torch.

The library keeps the experts of a layer in one tensor; directories have them one by one (``Family.expert_names``).
"""

from __future__ import annotations

from dataclasses import dataclass

from subnet.model.families import Family
from subnet.numerics.layout import TensorSpec

_GATE_UP, _DOWN = ".mlp.experts.gate_up_proj", ".mlp.experts.down_proj"


@dataclass(frozen=True)
class Part:
    """A tensor of a directory and its place: the whole of ours, or rows ``start`` to ``end`` of one expert."""

    name: str
    shape: tuple[int, ...]
    expert: int | None = None
    start: int = 0
    end: int = 0


def stored_parts(family: Family, spec: TensorSpec) -> tuple[Part, ...]:
    """The tensors that one of ours is written as, in order."""
    if family.expert_names in ("", "stacked"):
        return (Part(spec.name, spec.shape),)
    own = family.expert_names == "mixtral"
    name = spec.name.replace(".mlp.", ".block_sparse_moe.") if own else spec.name
    if len(spec.shape) != 3:
        return (Part(name, spec.shape),)
    experts, rows, columns = spec.shape
    if spec.name.endswith(_GATE_UP):
        stem, half = name.removesuffix("gate_up_proj"), rows // 2
        gate, up = ("w1", "w3") if own else ("gate_proj", "up_proj")
        return tuple(
            Part(f"{stem}{e}.{which}.weight", (half, columns), e, start, start + half)
            for e in range(experts)
            for which, start in ((gate, 0), (up, half))
        )
    if not spec.name.endswith(_DOWN):
        raise ValueError(f"{spec.name} is no tensor of experts")
    stem = name.removesuffix("down_proj")
    down = "w2" if own else "down_proj"
    return tuple(Part(f"{stem}{e}.{down}.weight", (rows, columns), e, 0, rows) for e in range(experts))
