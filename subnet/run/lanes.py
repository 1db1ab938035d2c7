"""``[lanes]`` of a run file: local steps, where a step of the run is a round (docs/arithmetic.md, 14)."""

from __future__ import annotations

from subnet.run.config_base import Section, check


class LanesSection(Section, frozen=True):
    """Local steps: in a round each lane makes ``inner_steps`` updates of its own, then what they changed is merged."""

    count: int = 1
    """Fixed trajectories of a round, whose pseudo-gradients are merged. 1 and ``inner_steps`` 1: none, a merge each step."""
    inner_steps: int = 1
    """Optimizer steps of a lane between two merges, of ``pipeline.microbatches`` microbatches each."""
    outer_learning_rate: float = 0.7
    """Of the round's update by Nesterov's momentum; 1 with momentum 0 is the plain mean of the lanes' weights."""
    outer_momentum: float = 0.9
    inner_clip_norm: float = 0.0
    """Norm to which each tensor's gradient is clipped in an inner step; 0 switches it off. (``optimizer.clip_norm`` is of
    the whole model's gradient, which no stage knows between two merges: it doesn't apply.)"""
    pseudo_gradient_bits: int = 16
    """Bits of one lane's integers: 16 (as without lanes, at least 11 are used), 8 or 4. Fewer bytes, coarser; pack them
    with ``merge.packing`` ``bits``. ``merge.qmax`` goes before."""

    def __post_init__(self) -> None:
        check(1 <= self.count <= 1024, "lanes.count", self.count, "1 to 1024")
        check(1 <= self.inner_steps <= 4096, "lanes.inner_steps", self.inner_steps, "1 to 4096")
        rate = self.outer_learning_rate
        check(0 < rate <= 10, "lanes.outer_learning_rate", rate, "above 0, at most 10")
        check(0 <= self.outer_momentum < 1, "lanes.outer_momentum", self.outer_momentum, "0 to below 1")
        check(0 <= self.inner_clip_norm <= 1e6, "lanes.inner_clip_norm", self.inner_clip_norm, "0 (off) to 1e6")

        bits = self.pseudo_gradient_bits
        check(bits in (4, 8, 16), "lanes.pseudo_gradient_bits", bits, "4, 8, 16")

    @property
    def qmax(self) -> int:
        """The bound of one lane's integers; 0: as without lanes."""
        return {4: 7, 8: 127}.get(self.pseudo_gradient_bits, 0)

    @property
    def on(self) -> bool:
        return self.count > 1 or self.inner_steps > 1
