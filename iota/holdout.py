"""A run's newest sealed hold-out loss, and of runs with several sources each one's: its items are of one source each, in turn."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from iota.remote import Remote
from subnet.errors import HashMismatch, NotFound
from subnet.model.data import DataManifest, decode_manifest
from subnet.protocol.api import RunStatus
from subnet.protocol.wire import blob_hash, decode
from subnet.run.config import RunConfig
from subnet.timing import Deadline

_STEPS = (512, 100_000)
"""So many of the last steps are looked at first, then all that are kept."""
_SIZE_UNKNOWN = 0


@dataclass(frozen=True)
class Holdout:
    """Mean losses in nats a token of the weights after ``step`` updates."""

    step: int
    loss: float
    sources: dict[str, float] = field(default_factory=lambda: dict[str, float]())
    """By source of the run's data; empty where there is one only."""

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        return math.exp(min(self.loss, 700.0))


def newest_holdout(remote: Remote, name: str, deadline: Deadline) -> Holdout:
    """Raises NotFound before the first evaluation, ConfigError without a signer."""
    found = (_newest(remote.status(deadline, run=name, steps=steps)) for steps in _STEPS)
    newest = next(filter(None, found), None)
    if newest is None:
        hint = "the first comes with its first step, more with evaluation.every_steps"
        raise NotFound(f"run {name} has sealed no hold-out loss", hint=hint)
    step, items = newest
    info = remote.export_info(name, None, deadline)
    config = decode(info.config, RunConfig, limit_bytes=1 << 20, what="the run's config")
    loss = sum(items) / len(items)
    if len(items) < 2 or not info.data or len(items) != config.num_evaluation_items:
        return Holdout(step, loss)  # one item, or one was skipped: whose each is isn't known
    data = bytes(remote.get(name, [(info.data, _SIZE_UNKNOWN)], deadline)[0])
    if blob_hash(data) != info.data:
        raise HashMismatch("the data manifest is not what its hash says", hint="ask again")
    return Holdout(step, loss, _by_source(decode_manifest(data), config, items))


def _newest(status: RunStatus) -> tuple[int, tuple[float, ...]] | None:
    if status.final_holdout_items:
        return status.summary.step, status.final_holdout_items
    return next(((view.step, view.holdout_items) for view in reversed(status.steps) if view.holdout_items), None)


def _by_source(manifest: DataManifest, config: RunConfig, items: tuple[float, ...]) -> dict[str, float]:
    rows = manifest.domain_rows(config.data.sequence_length, holdout=True)
    there = [name for name, (_, count) in zip(manifest.domain_names, rows, strict=True) if count]
    found: dict[str, list[float]] = {}
    for index, loss in enumerate(items):
        if there:
            found.setdefault(there[index % len(there)], []).append(loss)
    return {name: sum(losses) / len(losses) for name, losses in found.items()}
