"""What a run has been through, for people: a projection of the journal that the state machine does not need.

Folds the same records as everyone; bounded: at most ``MAX_STEPS`` steps, ``MAX_LINES`` lines and ``MAX_MARKS`` marks of
disruptions are kept. It goes with each copy of the fold (``dump``, ``load``), so that it stays whole where records are no
longer kept.
"""

from __future__ import annotations

import struct
import time
from collections import deque
from itertools import islice

import msgspec

from subnet.protocol.api import StepView
from subnet.run.alarms import AlarmsSection, spike
from subnet.run.events import (
    Appealed,
    AuditClosed,
    Backwarded,
    CaseClosed,
    CaseOpened,
    Checked,
    Committed,
    Fingerprinted,
    Forwarded,
    Gone,
    HardwareClassSet,
    Joined,
    Leased,
    MicrobatchSkipped,
    OwnerFailed,
    PartitionMerged,
    PolicyChanged,
    Record,
    ReduceOrdered,
    Rewound,
    RunControlled,
    RunFinished,
    RunPlanned,
    SnapshotStored,
    StageSealed,
    StepPlanned,
    StepSealed,
    StoreRouted,
    TermStarted,
    TraceStarted,
    Updated,
    Voided,
    WitnessAsked,
    WitnessSaid,
)
from subnet.words import CALIBRATION_STEP, short
from validator.marks import MAX_MARKS, Mark, mark_of

MAX_STEPS = 100_000
MAX_LINES = 400
_EVERYDAY = frozenset({Leased, Forwarded, Backwarded, Updated, Committed, PartitionMerged, Fingerprinted, Checked})
"""Nothing is kept of these: most records are."""


def bits_fp64(bits: int) -> float:
    return struct.unpack("<d", struct.pack("<Q", bits))[0]


def bits_fp32(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def mean_loss(bits: tuple[int, ...]) -> float | None:
    """Mean of hold-out losses given as fp32 bits; None if there are none."""
    return sum(bits_fp32(b) for b in bits) / len(bits) if bits else None


class _Dump(msgspec.Struct, frozen=True, array_like=True):
    steps: list[StepView]
    lines: list[str]
    num_merges: int
    num_voids: int
    num_gone: int
    num_joined: int
    final_holdout: float | None
    root: str | None
    since_ns: int
    marks: list[Mark] = []
    num_marks: int = 0
    open_step: int = CALIBRATION_STEP
    rates: dict[int, float | None] = {}
    alarms: AlarmsSection = AlarmsSection()
    final_items: tuple[float, ...] = ()


_dump_decoder = msgspec.msgpack.Decoder(_Dump)


class History:
    def __init__(self) -> None:
        self.steps: deque[StepView] = deque(maxlen=MAX_STEPS)
        self.lines: deque[str] = deque(maxlen=MAX_LINES)
        self.num_merges = self.num_voids = self.num_gone = self.num_joined = 0
        self.final_holdout: float | None = None
        self.final_items: tuple[float, ...] = ()
        self.root: str | None = None
        self.marks: deque[Mark] = deque(maxlen=MAX_MARKS)
        self.num_marks = 0
        """Of all that ever were; the deque has the last of them."""
        self._since_ns = 0
        self._open_step = CALIBRATION_STEP
        self._rates: dict[int, float | None] = {}
        """Learning rates of the steps that are planned, and of the one before."""
        self._alarms = AlarmsSection()

    def dump(self) -> bytes:
        """Everything, for :meth:`load`."""
        return msgspec.msgpack.encode(
            _Dump(
                list(self.steps),
                list(self.lines),
                self.num_merges,
                self.num_voids,
                self.num_gone,
                self.num_joined,
                self.final_holdout,
                self.root,
                self._since_ns,
                list(self.marks),
                self.num_marks,
                self._open_step,
                self._rates,
                self._alarms,
                self.final_items,
            )
        )

    @staticmethod
    def load(data: bytes) -> History:
        history, found = History(), _dump_decoder.decode(data)
        history.steps.extend(found.steps)
        history.lines.extend(found.lines)
        history.num_merges, history.num_voids = found.num_merges, found.num_voids
        history.num_gone, history.num_joined = found.num_gone, found.num_joined
        history.final_holdout, history.root = found.final_holdout, found.root
        history._since_ns = found.since_ns
        history.marks.extend(found.marks)
        history.num_marks, history._open_step = found.num_marks, found.open_step
        history._rates, history._alarms = found.rates, found.alarms
        history.final_items = found.final_items
        return history

    def fold(self, record: Record) -> None:
        event = record.event
        if type(event) in _EVERYDAY:
            return
        match event:
            case RunPlanned():
                self._alarms = event.config.alarms
            case StepPlanned():
                self._since_ns = self._since_ns or record.time_ns
                self._open_step = event.step
                self._rates = {event.step - 1: self._rates.get(event.step - 1)}
                self._rates[event.step] = bits_fp32(event.scalars.lr) if event.scalars is not None else None
            case StepSealed():
                seconds = (record.time_ns - self._since_ns) / 1e9
                self._since_ns = record.time_ns
                loss, norm = bits_fp64(event.loss_bits), bits_fp64(event.norm_bits)
                if event.step >= 0:
                    self._sealed(event, loss, norm, seconds, record.time_ns)
            case StageSealed():
                self.num_merges += 1
            case Rewound():
                while self.steps and self.steps[-1].step >= event.step:
                    self.steps.pop()
            case Voided():
                self.num_voids += 1
            case Joined():
                self.num_joined += 1
            case Gone():
                self.num_gone += 1
            case RunFinished():
                self.root, self.final_holdout = event.root, mean_loss(event.evaluation)
                self.final_items = tuple(map(bits_fp32, event.evaluation))
            case _:
                pass
        self._mark(record)
        line = describe(record)
        if line:
            stamp = time.strftime("%H:%M:%S", time.localtime(record.time_ns / 1e9))
            self.lines.append(f"{stamp} {line}")

    def _sealed(self, event: StepSealed, loss: float, norm: float, seconds: float, time_ns: int) -> None:
        """Notes a step, and sounds the alarm where it is far off those before it."""
        before = list(islice(reversed(self.steps), self._alarms.window_steps))
        alarm = spike(self._alarms, [s.loss for s in before], [s.norm for s in before], loss, norm)
        holdout, rate = mean_loss(event.evaluation), self._rates.get(event.step)
        items = tuple(map(bits_fp32, event.evaluation))
        self.steps.append(StepView(event.step, loss, norm, event.tokens, seconds, holdout, rate, alarm, items))
        if alarm:
            self._note(Mark(event.step, time_ns, "alarm", "", alarm))
            stamp = time.strftime("%H:%M:%S", time.localtime(time_ns / 1e9))
            self.lines.append(f"{stamp} alarm at step {event.step}: {alarm}")

    def _note(self, mark: Mark) -> None:
        self.marks.append(mark)
        self.num_marks += 1

    def _mark(self, record: Record) -> None:
        """Those who leave at the end disturb nothing."""
        mark = None if self.root is not None else mark_of(record.event, self._open_step, record.time_ns)
        if mark is not None:
            self._note(mark)

    def tokens_per_s(self, last: int = 10) -> float:
        """Over the last steps, from seal to seal."""
        recent = list(self.steps)[-last:]
        seconds = sum(step.seconds for step in recent)
        return sum(step.tokens for step in recent) / seconds if seconds > 0 else 0.0


def describe(record: Record) -> str:
    """One line for a person, or "" for an event that isn't worth one."""
    event = record.event
    match event:
        case RunPlanned():
            return f"run planned: {event.config.run.name}, cuts {list(event.cuts)}"
        case TermStarted():
            return f"term {event.number} led by {short(event.hotkey)}"
        case HardwareClassSet():
            return f"hardware class set by {event.by}"
        case Joined():
            return f"{event.member} joined stage {event.stage} from {event.host}:{event.port}"
        case Gone():
            return f"{event.member} is gone: {event.why}"
        case Voided():
            return f"step {event.step} stage {event.stage}: work of {event.member} void: {event.why}"
        case MicrobatchSkipped():
            return f"step {event.step}: microbatch {event.microbatch} skipped (failure {short(event.failure)})"
        case ReduceOrdered():
            return (
                f"step {event.step} group {event.group}: manifest version {event.version}" if event.version > 1 else ""
            )
        case StepSealed() if event.step >= 0 and bits_fp64(event.norm_bits) == 0.0:
            return f"step {event.step}: the gradient's norm is 0, nothing is learnt"
        case StoreRouted():
            return f"step {event.step} group {event.group}: an owner is late, slices go through the store"
        case OwnerFailed():
            return f"step {event.step} group {event.group}: {event.member} no longer owns partitions"
        case TraceStarted():
            return f"step {event.step} group {event.group}: a check failed, tracing"
        case SnapshotStored():
            return f"snapshot after {event.step} updates, stage {event.stage}, by {event.member}"
        case RunFinished():
            return f"run finished: root {event.root}"
        case RunControlled():
            return f"{' '.join(filter(None, (event.action, event.argument)))} by the run's owner {short(event.by)}"
        case PolicyChanged():
            when = f" from block {event.effective_block} on" if event.effective_block else ""
            return f"scores are counted with policy {short(event.digest)}{when}, by {short(event.by)}"
        case _:
            return _describe_audits(record)


_OUTCOMES = {
    "convicted": "convicted: the third party's run agrees, the hotkey is out",
    "fault": "a fault, the first of its kind: unpaid, on probation again",
    "cleared": "cleared: the third party's run says that the work was right",
    "unconfirmed": "unconfirmed: nobody else could say; unpaid, on probation again",
}
_CHARGES = {
    "partial": "its sum isn't that of its items",
    "merge": "a partition it merged isn't the sum",
    "unopened": "it doesn't open what it has receipted",
    "root": "it reported another state root than snapshot and log lead to",
    "unusable": "a boundary that it has receipted is no numbers",
    "equivocation": "it signed something else when it sent a boundary than it has receipted",
}


def _describe_audits(record: Record) -> str:
    event = record.event
    match event:
        case AuditClosed() if event.unopened:
            return f"audit {event.audit}: {', '.join(map(str, event.unopened))} didn't open what was receipted"
        case CaseOpened():
            what = _CHARGES.get(event.charge, event.charge)
            sealed = "sealed" if event.sealed else "not sealed"
            return f"case {event.case}: {event.member} stands accused (step {event.step} stage {event.stage}, {sealed}): {what}"
        case WitnessAsked():
            return f"case {event.case}: {event.member} is asked to do the work again"
        case WitnessSaid():
            return f"case {event.case}: {short(event.hotkey)} got {short(event.digest) or 'nothing'}"
        case CaseClosed():
            return f"case {event.case}: {_OUTCOMES.get(event.outcome, event.outcome)}"
        case Appealed():
            return f"case {event.case}: appeal {'rejected' if event.upheld else 'granted, the penalty ends'}"
        case Rewound() if event.owner:
            return f"rewound to step {event.step}, branch {event.branch}: by the run's owner"
        case Rewound():
            return f"rewound to step {event.step}, branch {event.branch}: a sealed lie is undone (case {event.case})"
        case _:
            return ""
