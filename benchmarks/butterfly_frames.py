"""What the butterfly benchmark's processes share: a cell of its table, a gradient's layout, and the frames between miners."""

from __future__ import annotations

import msgspec
import torch

from subnet.numerics.layout import RunLayout, build_layout
from subnet.protocol.messages import PeerFrame, SliceFrame
from subnet.run.config import default_qmax
from subnet.words import Member, TensorSpec

PARTITIONS = 16
TWO_OWNERS = "owners2"


class Cell(msgspec.Struct, frozen=True):
    """One cell of the table; ``kind`` is ``straight``, ``owners2`` (straight, two owners a partition), ``store`` or ``gloo``."""

    size_mib: int
    microbatches: int
    miners: int
    kind: str
    rounds: int
    store_url: str = ""
    store_secret: str = ""

    @property
    def num_elements(self) -> int:
        return self.size_mib << 18


class Measured(msgspec.Struct, frozen=True):
    """One miner's round: when it was done, what it moved, and CPU seconds by kind of work."""

    ended_s: float
    bytes_up: int
    bytes_down: int
    split_s: dict[str, float]


class MergedFrame(PeerFrame, tag="M", frozen=True):
    """A merged partition; without a body it is in the store under ``blob``."""

    partition: int
    hash: str
    blob: str
    size_bytes: int
    squares: str
    sender: Member


class HashesFrame(PeerFrame, tag="H", frozen=True):
    """What a member has committed itself to."""

    hashes: tuple[str, ...]
    num_items: int
    sender: Member


class SeedFrame(PeerFrame, tag="S", frozen=True):
    seed: str
    sender: Member


class PrintsFrame(PeerFrame, tag="F", frozen=True):
    values: tuple[tuple[int, ...], ...]
    sender: Member


Header = SliceFrame | MergedFrame | HashesFrame | SeedFrame | PrintsFrame


def layout_of(cell: Cell) -> RunLayout:
    """Matrices and a few vectors, as a stage has them, cut by the run's own rule."""
    rows = cell.num_elements // 1024
    shapes = [(rows // 8, 1024)] * 7
    left = rows - 7 * (rows // 8)
    specs = [TensorSpec(f"matrix{i}", shape) for i, shape in enumerate([*shapes, (left - 1, 1024)])]
    specs += [TensorSpec("vector", (1024,))]
    return build_layout([specs], tied=None, qmax=default_qmax(cell.microbatches), target_partitions=PARTITIONS)


class FixedScales:
    """Stands for a stage's state: scales, and nothing to train."""

    device = torch.device("cpu")
    next_step = 0

    def __init__(self, layout: RunLayout) -> None:
        self._exponents = torch.full((layout.sections[0].num_blocks,), -20, dtype=torch.int16)

    def exponents(self, section: int, step: int | None = None) -> torch.Tensor:
        return self._exponents


class WithLayout(msgspec.Struct, frozen=True):
    layout: RunLayout
