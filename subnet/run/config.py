"""The run file as a typed object: every section is a frozen struct whose construction checks it.

The same struct is what ``run.toml`` decodes to, what travels in a submission, and what ``RunPlanned`` journals.
A wrong value raises :class:`~subnet.errors.ConfigError` naming the key, the value, and what is allowed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, cast

from subnet.run.alarms import AlarmsSection
from subnet.run.config_base import Section as _Section
from subnet.run.config_base import check as _check
from subnet.run.lanes import LanesSection
from subnet.run.objective import ObjectiveSection
from subnet.run.optimization import OptimizerSection, ScheduleSection
from subnet.run.trainable import TrainableSection

MAX_STEPS = 10_000_000


class RunSection(_Section, frozen=True):
    name: str
    """Letters, digits, ``-`` and ``_``; names the run on the validator."""
    seed: int = 0
    steps: int = 100
    """Number of optimizer steps."""
    first_step: int = 0
    """Of a fork (``iota run fork`` fills it in): updates that its first state has had. Data, schedule and bias corrections go
    on from there."""

    def __post_init__(self) -> None:
        ok = 0 < len(self.name) <= 64 and all(c.isalnum() or c in "-_" for c in self.name)
        _check(ok, "run.name", self.name, "1 to 64 letters, digits, - and _")
        _check(0 <= self.seed < 2**63, "run.seed", self.seed, "0 to 2^63 - 1")
        _check(1 <= self.steps <= MAX_STEPS, "run.steps", self.steps, "1 to 10,000,000")
        _check(0 <= self.first_step <= MAX_STEPS, "run.first_step", self.first_step, "0 to 10,000,000")


def _numbers(value: object) -> Iterator[float]:
    """Every float in nested tables and lists."""
    if isinstance(value, float):
        yield value
    elif isinstance(value, dict):
        for entry in cast("dict[str, object]", value).values():
            yield from _numbers(entry)
    elif isinstance(value, list | tuple):
        for entry in cast("Sequence[object]", value):
            yield from _numbers(entry)


class ModelSection(_Section, frozen=True):
    config: dict[str, Any] | None = None
    """A ``transformers`` config as a table (``model_type`` included), or None when ``pretrained`` is given; with ``modules``
    the arguments of its function."""
    pretrained: str | None = None
    """A Hugging Face directory whose weights the run starts from."""
    pretrained_hash: str = ""
    """BLAKE3 of the directory's config, weights and tokenizer; the submitter fills it in, or refuses what isn't that."""
    modules: str = ""
    """``path.py:build``: a function that gives a sequence of modules of the builder's own; private swarms alone take it."""
    modules_hash: str = ""
    """BLAKE3 of its file; filled in as ``pretrained_hash`` is."""
    attention: str = "sdpa"

    def __post_init__(self) -> None:
        given = (self.pretrained is not None) + bool(self.modules or self.config is not None)
        _check(
            given == 1, "model.config / model.pretrained", "both or neither", "exactly one of the two, or model.modules"
        )
        for key, hash_, beside in (
            ("pretrained", self.pretrained_hash, self.pretrained is not None),
            ("modules", self.modules_hash, bool(self.modules)),
        ):
            digits = len(hash_) == 64 and set(hash_) <= set("0123456789abcdef")
            ok = not hash_ or (digits and beside)
            _check(ok, f"model.{key}_hash", hash_, f"64 hexadecimal digits, beside model.{key}")
        _check(self.attention in ("sdpa", "eager"), "model.attention", self.attention, "sdpa, eager")
        for number in _numbers(self.config):
            _check(math.isfinite(number), "a number in model.config", number, "finite numbers: JSON has no others")


class DataSection(_Section, frozen=True):
    sources: tuple[str, ...] = ()
    """Text files, JSONL files (field ``text``; dialogues where the objective is ``sft``) or a directory made by
    ``iota data prepare``."""
    weights: tuple[float, ...] = ()
    """Each source's share of the training rows; none: all text once an epoch, whatever source it is of."""
    tokenizer: str = ""
    """Path of a ``tokenizer.json``; empty: a byte-level BPE of the model's vocabulary size is trained."""
    sequence_length: int = 128
    holdout_fraction: float = 0.05

    def __post_init__(self) -> None:
        _check(8 <= self.sequence_length <= 131_072, "data.sequence_length", self.sequence_length, "8 to 131072")
        ok = 0.0 <= self.holdout_fraction <= 0.5
        _check(ok, "data.holdout_fraction", self.holdout_fraction, "0 to 0.5")
        ok = all(0 < weight <= 1e6 for weight in self.weights) and len(self.weights) <= 256
        _check(ok, "data.weights", list(self.weights), "at most 256 numbers above 0, one for each source")


class PipelineSection(_Section, frozen=True):
    stages: int = 1
    microbatches: int = 8
    microbatch_rows: int = 4
    chunks: int = 1
    """Chunks of a microbatch, worked on one after the other; each has the exact shape rows / chunks."""
    update_delay: int = 0
    """1: a step is computed from the state one update older, while the step before it is merged."""
    boundary_code: str = "raw"
    """What activations and gradients are rounded to between stages: ``raw`` (fp32 as computed), ``int8`` or ``int4``.
    Part of the run's arithmetic, so with a code the list of cuts belongs to the run's identity."""
    boundaries: str = "straight"
    """How they travel: ``straight`` between miners, or ``store``: every one through the object store."""

    def __post_init__(self) -> None:
        _check(1 <= self.stages <= 256, "pipeline.stages", self.stages, "1 to 256")
        _check(
            1 <= self.microbatches <= 2**14, "pipeline.microbatches", self.microbatches, "1 to 16384 (sums stay exact)"
        )
        _check(1 <= self.microbatch_rows <= 4096, "pipeline.microbatch_rows", self.microbatch_rows, "1 to 4096")
        ok = 1 <= self.chunks <= self.microbatch_rows and self.microbatch_rows % self.chunks == 0
        _check(ok, "pipeline.chunks", self.chunks, "a divisor of microbatch_rows")
        _check(self.update_delay in (0, 1), "pipeline.update_delay", self.update_delay, "0, 1")
        _check(
            self.boundary_code in ("raw", "int8", "int4"),
            "pipeline.boundary_code",
            self.boundary_code,
            "raw, int8, int4",
        )
        _check(self.boundaries in ("straight", "store"), "pipeline.boundaries", self.boundaries, "straight, store")


class PrecisionSection(_Section, frozen=True):
    compute: str = "fp32"
    num_threads: int = 1
    """Compute threads of every miner; changes bits, so it is part of the run."""

    def __post_init__(self) -> None:
        _check(self.compute in ("fp32", "bf16"), "precision.compute", self.compute, "fp32, bf16")
        _check(1 <= self.num_threads <= 256, "precision.num_threads", self.num_threads, "1 to 256")


class MergeSection(_Section, frozen=True):
    qmax: int = 0
    """Largest integer that one microbatch adds to an element; 0: by the number of microbatches (:func:`default_qmax`)."""
    owners: int = 1
    """Replicas that reduce each partition: with 2 the faster of both counts, so that a slow or lost one isn't waited for;
    slices travel twice."""
    packing: str = "bytes"
    """How sums travel: ``bytes`` (next byte width; fast links) or ``bits`` (exact width; slow links)."""
    slowest_mbit: float = 20.0
    """The slowest link, in Mbit/s each way, that sums and boundaries are waited for: every wait for bytes grows by it."""

    def __post_init__(self) -> None:
        _check(self.qmax == 0 or 3 <= self.qmax <= 32767, "merge.qmax", self.qmax, "0 (chosen), or 3 to 32767")
        _check(self.owners in (1, 2), "merge.owners", self.owners, "1, 2")
        _check(self.packing in ("bytes", "bits"), "merge.packing", self.packing, "bytes, bits")
        _check(0.1 <= self.slowest_mbit <= 1e6, "merge.slowest_mbit", self.slowest_mbit, "0.1 to 1,000,000")


class SnapshotSection(_Section, frozen=True):
    every_steps: int = 50
    keep_steps: int = 0
    """How far back the run's owner can take it (``iota run rollback``): snapshots and merged gradients are kept so long.
    0: as far as the newest snapshot that two coldkeys have confirmed."""

    def __post_init__(self) -> None:
        _check(self.every_steps >= 1, "snapshot.every_steps", self.every_steps, "1 or more")
        _check(0 <= self.keep_steps <= MAX_STEPS, "snapshot.keep_steps", self.keep_steps, "0 to 10,000,000")


class EvaluationSection(_Section, frozen=True):
    every_steps: int = 0
    """0: only before the first step and after the last."""
    rows: int = 16
    """Hold-out rows, rounded up to whole microbatches; 0 switches evaluation off."""

    def __post_init__(self) -> None:
        _check(self.every_steps >= 0, "evaluation.every_steps", self.every_steps, "0 or more")
        _check(0 <= self.rows <= 2**20, "evaluation.rows", self.rows, "0 to 2^20")


class HardwareSection(_Section, frozen=True):
    policy: str = "pinned"

    def __post_init__(self) -> None:
        _check(self.policy == "pinned", "hardware.policy", self.policy, "pinned")


class AuditSection(_Section, frozen=True):
    """How much of the work is done again by a validator, and when. Off only where every machine is the builder's own."""

    rate: float = 0.02
    """Share of the members' partials (one member's sum of one step at one stage) redone after their seal. Never 0 unless
    ``before_seal`` is ``all`` (nothing is left to redo) or ``none`` (no audits at all)."""
    before_seal: str = "probation"
    """Whose partials are redone before the seal: ``probation`` (new and suspected members), ``all``, or ``none``."""
    probation_items: int = 16
    """Work items of a new or suspected hotkey that must have been redone, and right, before its word is taken."""
    rewind: bool = False
    """Whether a lie that is found after its seal takes the run back to the last snapshot before it."""
    window_steps: int = 8
    """Steps whose audits are drawn together, once the last of them is sealed."""
    open_windows: int = 4
    """So many windows may wait for their audits; then no step begins."""
    horizon_steps: int = 256
    """With ``rewind``: how far back snapshots and merged gradients are kept to go back to."""

    def __post_init__(self) -> None:
        _check(
            self.before_seal in ("none", "probation", "all"),
            "audit.before_seal",
            self.before_seal,
            "none, probation, all",
        )
        _check(0 <= self.rate <= 1, "audit.rate", self.rate, "0 to 1")
        never_zero = self.rate > 0 or self.before_seal != "probation"
        _check(never_zero, "audit.rate", self.rate, "above 0 where audit.before_seal is probation")
        _check(
            self.rate == 0 or self.before_seal != "none", "audit.rate", self.rate, "0 where audit.before_seal is none"
        )
        _check(1 <= self.probation_items <= 2**20, "audit.probation_items", self.probation_items, "1 to 2^20")
        _check(1 <= self.window_steps <= 4096, "audit.window_steps", self.window_steps, "1 to 4096")
        _check(1 <= self.open_windows <= 64, "audit.open_windows", self.open_windows, "1 to 64")
        _check(1 <= self.horizon_steps <= 2**20, "audit.horizon_steps", self.horizon_steps, "1 to 2^20")
        _check(not self.rewind or self.before_seal != "none", "audit.rewind", self.rewind, "false without audits")

    @property
    def on(self) -> bool:
        return self.before_seal != "none"


NO_AUDITS = AuditSection(rate=0.0, before_seal="none")
"""Where every machine is the builder's own, and for measurements of something else."""


class PricesSection(_Section, frozen=True):
    """What the object store costs, for the run's report; the defaults are the list prices of Cloudflare R2."""

    put_usd_per_million: float = 4.5
    """Writes and listings."""
    get_usd_per_million: float = 0.36
    stored_usd_per_gb_month: float = 0.015
    egress_usd_per_gb: float = 0.0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            _check(0 <= value <= 1e6, f"prices.{name}", value, "0 to 1e6")


def default_qmax(microbatches: int) -> int:
    """2^b - 1 with b = 8 + ceil(log2(M) / 2), at least 10, and M · qmax below 2^24.

    The more microbatches, the smaller is what each adds of a gradient they agree on, against its own noise; what is less
    than half a quantum would be lost from all of them. So the quantum falls with the root of their number.
    """
    bits = max(10, 8 + ((microbatches - 1).bit_length() + 1) // 2)
    while microbatches * (2**bits - 1) >= 2**24:
        bits -= 1
    return 2**bits - 1


class RunConfig(_Section, frozen=True):
    """A whole run file. Build it, or load it with :func:`subnet.run.runfile.load_run_file`."""

    run: RunSection
    model: ModelSection
    data: DataSection = DataSection()
    objective: ObjectiveSection = ObjectiveSection()
    trainable: TrainableSection = TrainableSection()
    optimizer: OptimizerSection = OptimizerSection()
    schedule: ScheduleSection = ScheduleSection()
    pipeline: PipelineSection = PipelineSection()
    lanes: LanesSection = LanesSection()
    precision: PrecisionSection = PrecisionSection()
    merge: MergeSection = MergeSection()
    snapshot: SnapshotSection = SnapshotSection()
    evaluation: EvaluationSection = EvaluationSection()
    hardware: HardwareSection = HardwareSection()
    audit: AuditSection = AuditSection()
    prices: PricesSection = PricesSection()
    alarms: AlarmsSection = AlarmsSection()

    def __post_init__(self) -> None:
        rows, seq = self.pipeline.microbatch_rows, self.data.sequence_length
        decay, warmup = self.schedule.decay_steps, self.schedule.warmup_steps
        _check(
            decay == 0 or decay + warmup <= self.schedule_steps + self.run.first_step * self.lanes.inner_steps,
            "schedule.decay_steps",
            decay,
            f"at most {max(0, self.schedule_steps - warmup)}: all optimizer steps less schedule.warmup_steps",
        )
        _check(
            self.num_items * self.qmax < 2**24,
            "merge.qmax · pipeline.microbatches",
            self.num_items * self.qmax,
            "below 2^24, so that fp32 adds whole numbers exactly",
        )
        _check(
            self.parts_per_item <= 2**14, "lanes.inner_steps · pipeline.microbatches", self.parts_per_item, "to 16384"
        )
        delayed = self.lanes.on and self.pipeline.update_delay > 0
        _check(not delayed, "pipeline.update_delay", self.pipeline.update_delay, "0 with [lanes]")
        _check(
            rows * seq <= 2**22, "pipeline.microbatch_rows · data.sequence_length", rows * seq, "at most 2^22 tokens"
        )

    @property
    def num_items(self) -> int:
        """Training items of a step, whose gradients are merged: its microbatches, or with lanes its lanes."""
        return self.lanes.count if self.lanes.on else self.pipeline.microbatches

    @property
    def parts_per_item(self) -> int:
        """Microbatches that an item is computed of: 1, or with lanes all those of a lane's inner steps."""
        return self.lanes.inner_steps * self.pipeline.microbatches if self.lanes.on else 1

    @property
    def schedule_steps(self) -> int:
        """Optimizer steps that the learning rate's schedule runs over: with lanes the inner ones."""
        return self.run.steps * self.lanes.inner_steps

    @property
    def merged_clip_norm(self) -> float:
        """Bound of the merged gradient's norm; with lanes there is none (0)."""
        return 0.0 if self.lanes.on else self.optimizer.clip_norm

    @property
    def qmax(self) -> int:
        """The bound of one microbatch's integers, chosen where the file says 0."""
        return self.merge.qmax or (self.lanes.on and self.lanes.qmax) or default_qmax(self.num_items)

    @property
    def num_evaluation_items(self) -> int:
        """Hold-out microbatches of one evaluation."""
        return -(-self.evaluation.rows // self.pipeline.microbatch_rows)

    def evaluates_at(self, step: int, end: int | None = None) -> bool:
        """Whether the state before update ``step`` is evaluated; ``end``: updates until the final state, if fewer."""
        if not self.evaluation.rows or step < 0:
            return False
        every = self.evaluation.every_steps
        return step in (0, self.run.steps if end is None else end) or (every > 0 and step % every == 0)

    def version_of(self, step: int) -> int:
        """The state that the gradients of ``step`` are of, as the number of updates it has had.

        With ``update_delay`` 1 it is the one before the newest; the first two steps share the first state with scales.
        """
        return step if step <= 0 else max(0, step - self.pipeline.update_delay)

    @property
    def tokens_per_step(self) -> int:
        return self.num_items * self.tokens_per_item

    @property
    def tokens_per_item(self) -> int:
        return self.parts_per_item * self.pipeline.microbatch_rows * self.data.sequence_length
