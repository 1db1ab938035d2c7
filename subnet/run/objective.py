"""The section ``[objective]`` of a run file: what is predicted."""

from __future__ import annotations

from subnet.run.config_base import Section, check


class ObjectiveSection(Section, frozen=True):
    kind: str = "causal_lm"
    """``causal_lm``: every token is predicted; ``sft``: the answers of dialogues are (docs/finetune.md)."""
    ce_chunk_tokens: int = 1024
    """Tokens per piece of the chunked cross-entropy; part of the run's arithmetic."""
    packing: bool = True
    """``sft``: several dialogues share a row, none seeing another; else one a row."""

    def __post_init__(self) -> None:
        check(self.kind in ("causal_lm", "sft"), "objective.kind", self.kind, "causal_lm, sft")
        check(1 <= self.ce_chunk_tokens <= 2**20, "objective.ce_chunk_tokens", self.ce_chunk_tokens, "1 to 2^20")
