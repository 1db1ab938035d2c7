"""What operators and model builders exchange with a validator: submissions, run lists, live status.

Public reads (``GET /v1/hello, /v1/status, /v1/runs, /v1/runs/NAME``) need no signature; a submission is signed by an
allow-listed hotkey.
"""

from __future__ import annotations

from typing import Any

import msgspec

from subnet.protocol.audit_api import AuditCosts
from subnet.protocol.messages import StoreUse
from subnet.words import TensorSpec


class RunSubmission(msgspec.Struct, frozen=True):
    """``POST /v1/runs``. The blobs it names have been put into the store before, by presigned URLs."""

    version: int
    config: bytes
    """The run's config struct, encoded (``subnet.run.config.RunConfig``)."""
    model_config: dict[str, Any]
    unit_tensors: tuple[tuple[TensorSpec, ...], ...]
    unit_flops_per_token: tuple[float, ...]
    unit_costs: tuple[float, ...]
    """Seconds (or FLOPs) of embedding, each layer, head: what the cuts balance."""
    tied: TensorSpec | None
    data: str
    snapshot: str
    tokenizer: str
    hardware_class: tuple[str, ...] | None = None
    """Golden hashes of the operator's own machine, where it is of the fleet's class."""
    cuts: tuple[int, ...] | None = None
    """First layer of each stage; None: the validator plans them from the costs."""
    carried: str = ""
    """Blob of the tokenizer's and generation's other files, which an export gets as they are; empty: none."""


class ControlRequest(msgspec.Struct, frozen=True):
    """``POST /v1/runs/NAME/control``: its submitter's word about a run, to be journaled with its signature."""

    action: str
    """pause, resume, stop, set-lr, extend, rollback."""
    time_ns: int
    """The submitter's clock; later than that of the word before."""
    signature: bytes
    """Over :func:`subnet.run.control_event.control_statement`, purpose ``run-control/1``."""
    argument: str = ""
    """:class:`subnet.run.control_event.RunControlled` says what each action takes."""


class WaitView(msgspec.Struct, frozen=True):
    """Who is waited for, for what, for how long."""

    who: str
    what: str
    waited_s: float


class StallView(msgspec.Struct, frozen=True):
    """A run that hasn't sealed anything for longer than ``limit_s``; it ends with the next seal."""

    since_ns: int
    """Wall time of the last seal (or of the validator's start)."""
    no_seal_s: float
    limit_s: float
    waits: tuple[WaitView, ...]
    dump: str = ""
    """The validator's file with the stacks of its threads and tasks, if one was written."""


class RunSummary(msgspec.Struct, frozen=True):
    """One line of ``GET /v1/runs``. ``state``: queued, waiting (no members), running, paused, stalled, finished."""

    name: str
    run_id: str
    state: str
    place: int
    step: int
    steps: int
    loss: float | None
    root: str | None
    waiting_for: str = ""
    stall: StallView | None = None
    """What it is stalled by, while ``state`` is stalled."""


class MemberView(msgspec.Struct, frozen=True):
    hotkey: str
    incarnation: str
    stage: int
    ready_for_step: int
    leases: int
    items_done: int
    seconds_per_item: float | None
    heard_s_ago: float


class StepView(msgspec.Struct, frozen=True):
    step: int
    loss: float
    norm: float
    tokens: int
    seconds: float
    holdout_loss: float | None
    learning_rate: float | None = None
    """As journaled; None for steps before this was kept."""
    alarm: str = ""
    """In words, where the loss or the gradient is far off those before (``[alarms]``)."""
    holdout_items: tuple[float, ...] = ()
    """Hold-out losses by evaluation item, where the step evaluated; of several sources each item is of one, in turn."""


class StoreCosts(msgspec.Struct, frozen=True):
    """What the run asked of the object store; priced are ``own`` and ``reported``."""

    own: StoreUse
    """The validator's requests."""
    granted: StoreUse
    """URLs handed out, and the bytes they allow."""
    reported: StoreUse
    """What members say they sent and received."""
    usd: float
    """Requests and egress so far, by the run file's prices."""
    usd_per_month: float
    """Of what the store holds now."""


class RunStatus(msgspec.Struct, frozen=True):
    """``GET /v1/status``: what a live view shows."""

    summary: RunSummary
    time_ns: int
    members: tuple[MemberView, ...]
    steps: tuple[StepView, ...]
    """The last steps (``?steps=N``, at most 100,000)."""
    tokens_per_s: float
    num_merges: int
    num_voids: int
    num_gone: int
    num_joined: int
    events: tuple[str, ...]
    """The last noteworthy events, one line each, oldest first."""
    journal_length: int
    journal_head: str
    store_bytes: int
    weights: str = ""
    """What was last set on the chain, in words."""
    final_holdout_loss: float | None = None
    store: StoreCosts | None = None
    audits: AuditCosts | None = None
    """What audits have done and cost; None where the run has none."""
    final_holdout_items: tuple[float, ...] = ()
    """As :attr:`StepView.holdout_items`, of the last state."""


class StageSnapshot(msgspec.Struct, frozen=True):
    stage: int
    manifest: str
    root: str
    verified: bool


class ExportInfo(msgspec.Struct, frozen=True):
    """``GET /v1/runs/NAME/export?step=N``: where the state after ``step`` updates lies."""

    step: int
    model_config: dict[str, Any]
    config: bytes
    tokenizer: str
    snapshots: tuple[StageSnapshot, ...]
    run_root: str | None
    unit_tensors: tuple[tuple[TensorSpec, ...], ...]
    unit_flops_per_token: tuple[float, ...]
    tied: TensorSpec | None
    cuts: tuple[int, ...]
    hardware_class: tuple[str, ...] | None = None
    """Golden hashes of the class of machines that may join; None: not settled."""
    carried: str = ""
    """Blob of files for the directory (``RunSubmission.carried``)."""
    states: tuple[bytes, ...] = ()
    """By stage, where the step has no snapshots: ``subnet.audit.case.StateRef``, encoded."""
    data: str = ""
    """Blob of the data manifest."""
