"""``[optimizer]`` and ``[schedule]``: what an update does with a gradient, and how the learning rate goes over the steps."""

from __future__ import annotations

from subnet.run.config_base import Section, check

MAX_LEARNING_RATE = 10.0


class OptimizerSection(Section, frozen=True):
    kind: str = "adamw"
    """``adamw``, or ``muon``: Muon for hidden matrices and experts, AdamW for embedding, head, norms and biases."""
    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    """Of matrices; never of norms and biases."""
    decay_embeddings: bool = True
    """Whether the embedding decays too (a head of its own always does)."""
    momentum: float = 0.95
    """Muon's, with Nesterov's look ahead."""
    state_bits: int = 32
    """8: AdamW's moments in one byte each, with a scale for each block of at most 1024 elements."""
    clip_norm: float = 1.0
    """Global gradient norm; 0 switches clipping off."""

    def __post_init__(self) -> None:
        check(self.kind in ("adamw", "muon"), "optimizer.kind", self.kind, "adamw, muon")
        check(
            0 < self.learning_rate <= MAX_LEARNING_RATE,
            "optimizer.learning_rate",
            self.learning_rate,
            "above 0, at most 10",
        )
        check(all(0 <= b < 1 for b in self.betas), "optimizer.betas", self.betas, "two numbers in [0, 1)")
        check(0 < self.epsilon <= 1, "optimizer.epsilon", self.epsilon, "above 0, at most 1")
        check(0 <= self.weight_decay <= 10, "optimizer.weight_decay", self.weight_decay, "0 to 10")
        check(0 <= self.momentum < 1, "optimizer.momentum", self.momentum, "0 to below 1")
        bits = (8, 32) if self.kind == "adamw" else (32,)
        allowed = "8, 32" if self.kind == "adamw" else "32 with optimizer.kind muon (8 is for adamw)"
        check(self.state_bits in bits, "optimizer.state_bits", self.state_bits, allowed)
        check(0 <= self.clip_norm <= 1e6, "optimizer.clip_norm", self.clip_norm, "0 (off) to 1e6")


class ScheduleSection(Section, frozen=True):
    kind: str = "cosine"
    """After the warm-up: ``cosine`` and ``linear`` fall to the last step, ``constant`` doesn't, ``wsd`` is stable and then
    falls for ``decay_steps``."""
    warmup_steps: int = 0
    final_fraction: float = 0.1
    """Of the learning rate, at the last step; ``constant`` has none."""
    decay_fraction: float = 0.2
    """With ``wsd``: share of all steps in which it falls, where ``decay_steps`` is 0."""
    decay_steps: int = 0
    decay_shape: str = "linear"
    """With ``wsd``: how it falls: ``linear``, or ``sqrt`` (1 - sqrt)."""

    def __post_init__(self) -> None:
        kinds = ("cosine", "linear", "constant", "wsd")
        check(self.kind in kinds, "schedule.kind", self.kind, ", ".join(kinds))
        check(self.warmup_steps >= 0, "schedule.warmup_steps", self.warmup_steps, "0 or more")
        check(0 <= self.final_fraction <= 1, "schedule.final_fraction", self.final_fraction, "0 to 1")
        check(0 < self.decay_fraction <= 1, "schedule.decay_fraction", self.decay_fraction, "above 0, at most 1")
        check(0 <= self.decay_steps <= 10_000_000, "schedule.decay_steps", self.decay_steps, "0 to 10,000,000")
        check(self.decay_shape in ("linear", "sqrt"), "schedule.decay_shape", self.decay_shape, "linear, sqrt")
