"""Tokens of dialogues as they lie in shards: two bits of each say whether it is learnt, and whether a dialogue starts there.

A run with ``objective.kind = "sft"`` has rows of these. A row holds one or more whole dialogues; none sees another, and
positions count from each one's start. Shape suffixes: B rows, L positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from subnet.model.token_bits import LEARNT, STARTS, TOKEN_BITS

IGNORED_LABEL = -100


@dataclass(frozen=True)
class DialogueRows:
    """Rows as the stages use them: ids (B, L + 1), positions (B, L), and labels (B, L) with -100 where none counts."""

    ids: Tensor
    positions_BL: Tensor
    labels_BL: Tensor

    @property
    def num_labels(self) -> int:
        """Tokens whose prediction counts: what the sum of their losses is divided by, and at least 1."""
        return max(1, int((self.labels_BL != IGNORED_LABEL).sum()))


def split_bits(tokens: Tensor) -> DialogueRows:
    """From int64 tokens with their bits, (B, L + 1); a row starts a dialogue whatever its first token says."""
    ids = tokens & TOKEN_BITS
    labels = torch.where((tokens & LEARNT) != 0, ids, IGNORED_LABEL)[:, 1:]
    starts = (tokens[:, :-1] & STARTS) != 0
    starts[:, 0] = True
    places = torch.arange(starts.shape[1]).expand_as(starts)
    since = torch.where(starts, places, 0).cummax(dim=1).values
    return DialogueRows(ids, places - since, labels)
