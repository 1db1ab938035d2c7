"""What a machine of another hardware class can say of a claim: how far it lies from what this machine computes.

Distances are relative L2 norms of the decoded numbers: |claimed - computed| / |computed|. The limits below are a few times what
honest machines were found to differ by (``docs/audits.md`` has the figures, ``python -m benchmarks.audit_tolerance`` measures
them). Being outside accuses nobody: it is a reason to ask a machine of the class. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from subnet.audit.case import Distance, ItemCase, MergedCase, OtherClass, PartialCase, RedoneItem
from subnet.errors import InputError
from subnet.model.plan import ModelPlan
from subnet.numerics.codes import decode
from subnet.numerics.layout import Partition, Section, block_starts
from subnet.numerics.slices import TILE, Buffer, parse_slice
from subnet.run.config import RunConfig
from subnet.run.schedule import bits_fp32
from subnet.words import ItemKey, Member

Find = Callable[[str], Buffer | None]
"""The bytes of a hash, if they are there."""
SumsApart = Callable[[Buffer, bool], tuple[float, float]]
"""(claimed bytes, whether they are packed) -> distances of the integers and of the block maxima."""
FAR = math.inf
"""Distance of what can't be compared with anything: another shape, no number, nothing computed."""


class Tolerance(msgspec.Struct, frozen=True):
    """Relative L2 limits. Changing one changes no result of any run, only what a foreign machine says of it."""

    output: float
    """Of an item's forward."""
    gradient: float
    """Of an item's backward."""
    loss: float
    integers: float
    """Of a sum's whole numbers, each times its block's scale."""
    maxima: float
    """Of a sum's block maxima."""


TOLERANCES: dict[tuple[str, str], Tolerance] = {
    ("fp32", "raw"): Tolerance(1e-5, 1e-5, 1e-5, 2e-3, 1e-5),
    ("fp32", "int8"): Tolerance(1e-2, 1e-2, 1e-5, 2e-3, 1e-5),
    ("fp32", "int4"): Tolerance(3e-2, 3e-2, 1e-5, 2e-3, 1e-5),
    ("bf16", "raw"): Tolerance(1e-2, 1e-2, 1e-4, 3e-2, 2e-2),
    ("bf16", "int8"): Tolerance(3e-2, 3e-2, 1e-4, 3e-2, 2e-2),
    ("bf16", "int4"): Tolerance(2e-1, 1e-1, 1e-4, 3e-2, 2e-2),
}
"""By (precision.compute, pipeline.boundary_code)."""


def tolerance_of(config: RunConfig) -> Tolerance:
    return TOLERANCES[config.precision.compute, config.pipeline.boundary_code]


def relative_l2(claimed: NDArray[Any], computed: NDArray[Any], scale: NDArray[np.float64] | None = None) -> float:
    """|claimed - computed| / |computed| in fp64, each number times its ``scale`` if there is one.

    0 where both are all zeros, :data:`FAR` where only the computed one is, shapes differ, or a number isn't finite.
    """
    if claimed.shape != computed.shape:
        return FAR
    theirs, ours = claimed.reshape(-1), computed.reshape(-1)
    apart = size = 0.0
    for at in range(0, len(ours), TILE):
        tile = ours[at : at + TILE].astype(np.float64)
        off = theirs[at : at + TILE] - tile
        if scale is not None:
            tile, off = tile * scale[at : at + TILE], off * scale[at : at + TILE]
        apart += float(np.dot(off, off))
        size += float(np.dot(tile, tile))
    if not (math.isfinite(apart) and math.isfinite(size)):
        return FAR
    return math.sqrt(apart / size) if size else (0.0 if apart == 0.0 else FAR)


def sums_apart(
    section: Section,
    partition: Partition,
    claimed: Buffer,
    computed: Buffer,
    num_items: int,
    exponents: NDArray[np.int16] | None,
) -> tuple[float, float]:
    """Distances of two canonical slices: of the integers at their blocks' scales, and of the maxima."""
    calibration = exponents is None
    ours, our_maxima = parse_slice(section, partition, computed, num_items, calibration=calibration)
    theirs, their_maxima = parse_slice(section, partition, claimed, num_items, calibration=calibration)
    integers = 0.0
    if exponents is not None and ours is not None and theirs is not None:
        blocks = slice(partition.block_start, partition.block_end)
        lengths = np.diff(block_starts(section)[partition.block_start : partition.block_end + 1])
        integers = relative_l2(theirs, ours, np.repeat(np.exp2(exponents[blocks].astype(np.float64)), lengths))
    return integers, relative_l2(their_maxima, our_maxima)


@dataclass(frozen=True)
class Computed:
    """An item as this machine has it: hashes, and the bytes of what came out."""

    redone: RedoneItem
    forward: Buffer | None = None
    backward: Buffer | None = None


@dataclass(frozen=True)
class Elsewhere:
    """This machine is of another class (``ours``, golden hash of the stage); ``find`` gives claimed outputs, where they are."""

    ours: str
    theirs: str
    find: Find


@dataclass
class Measure:
    """Collects the distances of one replay; where hashes are equal the distance is 0, and no bytes are needed."""

    config: RunConfig
    hidden: int
    elsewhere: Elsewhere
    distances: list[Distance] = field(default_factory=list[Distance])
    not_compared: int = 0

    def __post_init__(self) -> None:
        self._limits = tolerance_of(self.config)

    @classmethod
    def of(cls, plan: ModelPlan, elsewhere: Elsewhere) -> Measure:
        return cls(plan.config, plan.hidden_size, elsewhere)

    def result(self) -> OtherClass:
        where = self.elsewhere
        return OtherClass(where.ours, where.theirs, tuple(self.distances), self.not_compared)

    def item(self, member: Member, item: ItemKey, claimed: ItemCase, computed: Computed) -> None:
        redone, limits = computed.redone, self._limits
        self._boundary(member, f"output of {item}", claimed.forward, redone.forward, computed.forward, limits.output)
        self._boundary(
            member, f"gradient of {item}", claimed.backward, redone.backward, computed.backward, limits.gradient
        )
        if claimed.loss_bits is not None:
            ours = redone.loss_bits
            apart = FAR if ours is None else relative_l2(_number(claimed.loss_bits), _number(ours))
            self._note(member, f"loss of {item}", apart, limits.loss)

    def no_sum(self, member: Member) -> None:
        """An item can't be computed here: there is nothing to hold the claimed slices against."""
        self._note(member, "sum of items that can't be computed here", FAR, self._limits.integers)

    def slice(self, partial: PartialCase, index: int, computed: str, apart: SumsApart) -> None:
        claimed = dict(partial.commitment.hashes)[index]
        self._sum(partial.member, f"slice of partition {index}", (claimed, claimed), computed, apart)

    def merged(self, told: MergedCase, computed: str, apart: SumsApart) -> None:
        self._sum(told.owner, f"merged partition {told.partition}", (told.hash, told.blob), computed, apart)

    def _boundary(
        self, member: Member, what: str, claimed: str, found: str, computed: Buffer | None, limit: float
    ) -> None:
        """Of coded boundaries; ``claimed`` "": nothing was said."""
        if not claimed:
            return
        data = None
        if claimed != found and (data := self.elsewhere.find(claimed)) is None:
            self.not_compared += 1
            return
        try:
            apart = 0.0 if data is None else relative_l2(self._decoded(data), self._decoded(computed or b""))
        except InputError:
            apart = FAR
        self._note(member, what, apart, limit)

    def _decoded(self, data: Buffer) -> NDArray[np.float32]:
        pipeline = self.config.pipeline
        tokens = pipeline.microbatch_rows * self.config.data.sequence_length
        values = np.empty((tokens, self.hidden), dtype=np.float32)
        decode(pipeline.boundary_code, data, values, pipeline.chunks, finite=True, what="boundary")
        return values

    def _sum(self, member: Member | None, what: str, named: tuple[str, str], computed: str, apart: SumsApart) -> None:
        """``named``: the claimed hash, and the address of its bytes: another one where they are packed."""
        claimed, blob = named
        data = None
        if claimed != computed and (data := self.elsewhere.find(blob)) is None:
            self.not_compared += 1
            return
        try:
            integers, maxima = (0.0, 0.0) if data is None else apart(data, blob != claimed)
        except InputError:
            integers = maxima = FAR
        self._note(member, what, integers, self._limits.integers)
        self._note(member, f"maxima of {what}", maxima, self._limits.maxima)

    def _note(self, member: Member | None, what: str, distance: float, limit: float) -> None:
        self.distances.append(Distance(member, what, distance, limit))


def _number(bits: int) -> NDArray[np.float64]:
    return np.array([bits_fp32(bits)])
