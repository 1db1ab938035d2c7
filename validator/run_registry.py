"""Runs of one validator: one active at a time, others queue in order of submission; the list survives restarts.

A submission becomes a directory with the submission as it came (written temp, fsync, rename) and, once active, a journal.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from subnet.audit.memory import replay_bytes, state_bytes
from subnet.errors import ConfigError, Corrupt, Exists, InputError, NotFound
from subnet.model.plan import ModelPlan, ModelUnits
from subnet.numerics.layout import RunLayout
from subnet.policy.policy import AuditRules
from subnet.protocol import wire
from subnet.protocol.api import RunSubmission, RunSummary
from subnet.protocol.messages import LIMIT_SUBMISSION_BYTES
from subnet.run.config import RunConfig
from subnet.run.events import RunPlanned
from subnet.score.accounts import MOST_FLOPS
from subnet.store.disk import atomic_write
from subnet.words import PROTOCOL_VERSION, GroupShape
from validator.journal import JournalDatabase
from validator.journals import FILE_NAME, Journals, place_of
from validator.stage_plan import plan_cuts

MAX_QUEUED = 64


class AuditsRequired(InputError):
    """The policy wants more of a run's work to be checked."""

    code = "audits_required"


class StoredRun(msgspec.Struct, frozen=True):
    """``runs/NAME/run.msgpack``."""

    run_id: str
    name: str
    place: int
    submitter: str
    submission: RunSubmission


@dataclass
class RunEntry:
    stored: StoredRun
    config: RunConfig
    plan: ModelPlan
    directory: Path
    finished: bool = False
    ended: RunSummary | None = None
    """How it stood when it finished, where that is known."""
    journals: Journals = field(default_factory=Journals)

    @property
    def name(self) -> str:
        return self.stored.name

    def summary(self, place: int) -> RunSummary:
        """Of a run that isn't active."""
        if self.ended is not None:
            return self.ended
        state = "finished" if self.finished else "queued"
        return RunSummary(self.name, self.stored.run_id, state, place, 0, self.config.run.steps, None, None)

    @property
    def journal_path(self) -> Path:
        """What belongs to the journal on this disk lies beside it, whether the journal is this file or not."""
        return self.directory / FILE_NAME

    @property
    def has_journal(self) -> bool:
        return place_of(self.directory) is not None

    def journal(self) -> JournalDatabase:
        """To read, wherever it lies."""
        return self.journals.of(self.directory, self.stored.run_id)

    def journal_to_lead(self) -> JournalDatabase:
        return self.journals.to_lead(self.directory, self.stored.run_id)

    @property
    def finished_path(self) -> Path:
        """It is there once the run has finished, and as old as that."""
        return self.directory / "finished"


class AuditsTooLarge(InputError):
    """The validator's audit worker has too little memory for a stage of the run."""

    code = "audit_memory"


class RunRegistry:
    """``rules``: runs with less audits than the policy requires now are refused; ``audit_memory_bytes``: so are those whose audits
    need more; ``journals``: where the runs' journals lie."""

    def __init__(
        self,
        directory: Path,
        *,
        rules: Callable[[], AuditRules] = AuditRules,
        audit_memory_bytes: int = 1 << 62,
        journals: Journals | None = None,
    ) -> None:
        self._journals = journals or Journals()
        self._directory, self._rules = directory / "runs", rules
        self._audit_memory_bytes = audit_memory_bytes
        self.entries: dict[str, RunEntry] = {}
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            found = [_load(path, self._journals) for path in sorted(self._directory.glob("*/run.msgpack"))]
        except OSError as error:
            raise ConfigError(
                f"cannot use the directory {directory}: {error.strerror or error}", hint="check --dir"
            ) from error
        for entry in sorted(found, key=lambda entry: entry.stored.place):
            entry.finished = entry.finished_path.exists()
            entry.ended = _ended(entry.finished_path) if entry.finished else None
            self.entries[entry.name] = entry

    def active(self) -> RunEntry | None:
        """The first run that hasn't finished."""
        return next((entry for entry in self.entries.values() if not entry.finished), None)

    def get(self, name: str) -> RunEntry:
        try:
            return self.entries[name]
        except KeyError:
            known = ", ".join(self.entries) or "none"
            raise NotFound(f"no run is called {name!r}", hint=f"known runs: {known}") from None

    def place_of(self, name: str) -> int:
        """0: active; n: n runs are before it."""
        waiting = [entry.name for entry in self.entries.values() if not entry.finished]
        return waiting.index(name) if name in waiting else 0

    def add(self, submitter: str, submission: RunSubmission) -> RunEntry:
        """Check and keep a submission. The same run again is fine; another under the name isn't."""
        config, plan = plan_submission(submission)
        name = config.run.name
        if name in self.entries:
            if same_run(self.entries[name].stored.submission, submission):
                return self.entries[name]
            raise Exists(f"a run called {name!r} is already here", hint="choose another run.name")
        check_audits(config, self._rules())
        if config.audit.on:
            check_audit_memory(plan, self._audit_memory_bytes)
        if sum(not entry.finished for entry in self.entries.values()) >= MAX_QUEUED:
            raise InputError(f"{MAX_QUEUED} runs are queued already", hint="wait for one to finish")
        stored = StoredRun(f"{name}-{secrets.token_hex(4)}", name, len(self.entries), submitter, submission)
        directory = self._directory / name
        atomic_write(directory / "run.msgpack", wire.encode(stored))
        entry = RunEntry(stored, config, plan, directory, journals=self._journals)
        self.entries[name] = entry
        return entry

    def finish(self, entry: RunEntry, summary: RunSummary | None = None) -> None:
        atomic_write(entry.finished_path, b"" if summary is None else wire.encode(summary))
        entry.finished, entry.ended = True, summary


def check_audits(config: RunConfig, rules: AuditRules) -> None:
    """Refuse a run of whose work less is redone than the policy requires (its ``[audit]``)."""
    audit, levels, name = config.audit, ("none", "probation", "all"), config.run.name
    if levels.index(audit.before_seal) < levels.index(rules.required):
        few = "audits off" if not audit.on else "too few audits"
        hint = '"probation" (with audit.rate above 0) or "all"' if rules.required == "probation" else '"all"'
        raise AuditsRequired(
            f"run {name!r} has {few} (audit.before_seal = {audit.before_seal!r}); this validator's policy requires "
            f"{rules.required!r}",
            hint=f"set audit.before_seal to {hint} in the run file",
        )
    if audit.before_seal != "probation":
        return
    for key, given, least in (
        ("audit.rate", audit.rate, rules.min_rate),
        ("audit.probation_items", audit.probation_items, rules.min_probation_items),
    ):
        if given < least:
            raise AuditsRequired(
                f"run {name!r} has {key} = {given}; this validator's policy requires {least} at least",
                hint=f"raise {key} in the run file",
            )


def check_audit_memory(plan: ModelPlan, budget_bytes: int) -> None:
    """Refuse a run whose largest stage can't be done again within the budget: its audits would never end."""
    needed_bytes, stage = max((state_bytes(plan, k) + replay_bytes(plan, k), k) for k in range(plan.num_stages))
    if needed_bytes > budget_bytes:
        raise AuditsTooLarge(
            f"audits of stage {stage} take {needed_bytes} bytes of memory, this validator gives them {budget_bytes}",
            hint="raise --audit.memory, cut the model into more stages, or use smaller microbatches",
        )


def same_run(one: RunSubmission, other: RunSubmission) -> bool:
    """Whether two submissions are of one run: its result is a function of these. Costs measured anew don't matter."""

    def what(submission: RunSubmission) -> tuple[object, ...]:
        s = submission
        return (s.config, s.model_config, s.unit_tensors, s.tied, s.data, s.snapshot, s.tokenizer)

    return what(one) == what(other)


def _ended(path: Path) -> RunSummary | None:
    """What the file says of the run's end; it is only shown, and versions before left it empty."""
    try:
        return wire.decode(path.read_bytes(), RunSummary, limit_bytes=1 << 20, what=str(path))
    except (InputError, OSError):
        return None


def _load(path: Path, journals: Journals) -> RunEntry:
    data = path.read_bytes()
    try:
        stored = wire.decode(data, StoredRun, limit_bytes=2 * LIMIT_SUBMISSION_BYTES, what=str(path))
    except InputError as error:
        raise Corrupt(
            f"{path} cannot be read: {error.reason}", hint="move the directory away and submit again"
        ) from error
    config, plan = plan_submission(stored.submission)
    return RunEntry(stored, config, plan, path.parent, journals=journals)


def plan_submission(submission: RunSubmission) -> tuple[RunConfig, ModelPlan]:
    """The run's config and plan; everything in a submission is foreign input and checked here."""
    if submission.version != PROTOCOL_VERSION:
        raise InputError(f"submission version {submission.version} is not {PROTOCOL_VERSION}", hint="update iota")
    config = wire.decode(submission.config, RunConfig, limit_bytes=1 << 20, what="the submission's config")
    units = ModelUnits(submission.unit_tensors, submission.unit_flops_per_token, submission.tied)
    num_units = len(submission.unit_tensors)
    if num_units < 3 or len(submission.unit_flops_per_token) != num_units or len(submission.unit_costs) != num_units:
        raise InputError("the submission's units, FLOPs and costs don't match", hint="submit with this version's iota")
    if any(not 0 <= flops <= MOST_FLOPS for flops in submission.unit_flops_per_token):
        raise InputError("a unit's FLOPs per token are no number of 0 or more", hint="submit with this version's iota")
    if any(not cost > 0 for cost in submission.unit_costs[1:-1]):
        raise InputError("a unit's cost isn't above 0", hint="submit with this version's iota")
    carried = (submission.carried,) if submission.carried else ()
    for blob in (submission.data, submission.snapshot, submission.tokenizer, *carried):
        if not wire.is_blob_hash(blob):
            raise InputError(f"{blob[:80]!r} isn't the hash of a blob")
    cuts = submission.cuts or plan_cuts(submission.unit_costs, config.pipeline.stages)
    if len(cuts) != config.pipeline.stages:
        raise ConfigError(
            f"{len(cuts)} cuts don't make pipeline.stages = {config.pipeline.stages}", hint="one cut a stage"
        )
    return config, ModelPlan(config, submission.model_config, units, tuple(cuts))


def group_shapes(layout: RunLayout) -> tuple[GroupShape, ...]:
    """The layout's merge groups as the state machine sees them."""
    return tuple(
        GroupShape(group.stages, tuple(layout.sections[p.section].stages for p in group.partitions))
        for group in layout.groups
    )


def run_planned(entry: RunEntry) -> RunPlanned:
    submission = entry.stored.submission
    return RunPlanned(
        run_id=entry.stored.run_id,
        config=entry.config,
        model_config=submission.model_config,
        unit_tensors=submission.unit_tensors,
        unit_flops_per_token=submission.unit_flops_per_token,
        tied=submission.tied,
        cuts=entry.plan.cuts,
        groups=group_shapes(entry.plan.layout),
        data=submission.data,
        snapshot=submission.snapshot,
        tokenizer=submission.tokenizer,
        submitter=entry.stored.submitter,
    )
