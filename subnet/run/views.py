"""What of a journal a member of one stage needs, and the fold of only that: what it owes is the same as from the whole.

A *view* leaves out what happens to single items of stages that aren't neighbours, and the progress of other groups' merges.
Who is a member, at which state, what is void, and every seal (of other groups without their manifests) is in all views. So
of S stages a member is sent about 3 / S of a step's records.

Everything here follows from the event and the run's plan, so whoever has the journal can make the same view of it again.
"""

from __future__ import annotations

from typing import Any

import msgspec
from blake3 import blake3

from subnet.run import events as ev
from subnet.run.apply import apply, finish_run, seal_step
from subnet.run.audit_folds import note_audit_opened
from subnet.run.invariants import require
from subnet.run.parts import Item
from subnet.run.state import SEALED, GroupSeal, RunState, group_of
from subnet.run.state_codec import canonical, canonical_bytes
from subnet.run.work import open_work
from subnet.words import Cursor, Member

VIEWS_FROM_STAGES = 6
"""With fewer stages everybody takes the whole stream: a view would leave out little. A leader's choice, no rule."""

NO_STAGE = -1
"""The view of who serves no stage (yet): what is in all views."""

EVERYONE = 0
_MERGE, _SEAL = 1_000, 2_000
"""Scopes: 0, 1 + stage of an item, 1000 + group of a merge's progress, 2000 + group of a seal."""

_ITEM_EVENTS = (
    ev.Leased,
    ev.ReplayLeased,
    ev.Revoking,
    ev.NotAccumulated,
    ev.Forwarded,
    ev.Backwarded,
    ev.PartsMade,
    ev.ItemFailed,
)
_MERGE_EVENTS = (
    ev.Frozen,
    ev.Committed,
    ev.ReduceOrdered,
    ev.StoreRouted,
    ev.OwnerFailed,
    ev.PartitionMerged,
    ev.SeedRevealed,
    ev.Fingerprinted,
    ev.Checked,
    ev.TraceStarted,
)

_SCOPES: dict[type, tuple[int, str]] = {
    **{kind: (1, "stage") for kind in _ITEM_EVENTS},
    **{kind: (_MERGE, "group") for kind in _MERGE_EVENTS},
    ev.StageSealed: (_SEAL, "group"),
}
"""By kind of event: what is added to which of its fields."""


def scope_of(event: ev.AnyEvent) -> int:
    """Whom the event concerns: a number to look up in :attr:`View.scopes`."""
    scope = _SCOPES.get(type(event))
    return EVERYONE if scope is None else scope[0] + getattr(event, scope[1])


def is_seal(scope: int) -> bool:
    """Whether the event is in every view, in those of other groups without its manifest (:func:`short_seal`)."""
    return scope >= _SEAL


def short_seal(event: ev.StageSealed) -> ev.StageSealed:
    """A group's seal as others need it: what the merged partitions are, not who contributed what."""
    return msgspec.structs.replace(event, entries=())


class View(msgspec.Struct, frozen=True):
    """``stages``: whose items it has; ``groups``: whose merges."""

    stage: int
    stages: frozenset[int]
    groups: frozenset[int]
    scopes: frozenset[int]


def view_of(plan: ev.RunPlanned, stage: int) -> View:
    """Of a member of ``stage``: its neighbours, and the stages that share its group."""
    stages, groups = set[int](), set[int]()
    if stage != NO_STAGE:
        group = next(index for index, shape in enumerate(plan.groups) if stage in shape.stages)
        groups.add(group)
        near = {stage - 1, stage, stage + 1}.intersection(range(len(plan.cuts)))
        stages |= near.union(plan.groups[group].stages)
    scopes = {EVERYONE, *(1 + s for s in stages), *(_MERGE + g for g in groups), *(_SEAL + g for g in groups)}
    return View(stage, frozenset(stages), frozenset(groups), frozenset(scopes))


# --- on the wire --------------------------------------------------------------------------------------------------

PURPOSE_VIEW = "directives/view/1"
_VIEW_TAG = b"\xa4view"


class ViewBatch(msgspec.Struct, frozen=True, array_like=True, tag_field="kind", tag="view"):
    """A stretch of the journal in the view of a stage: ``records`` are those of ``[first_number, cursor.number)`` it has.

    ``head`` is the whole journal's chain value at the end, so a member can name what it has seen as others do; the
    leader's signature is over it and over these very records (:func:`view_statement`).
    """

    cursor: Cursor
    first_number: int
    stage: int
    records: tuple[msgspec.Raw, ...]
    head: str
    signature: bytes


def view_statement(term: int, first: int, end: int, head: str, stage: int, records: bytes) -> bytes:
    return f"{term}.{first}.{end}.{head}.{stage}.{blake3(records).hexdigest()}".encode()


def is_view_batch(frame: bytes) -> bool:
    """Whether a frame of the directive stream is a :class:`ViewBatch`."""
    return frame[1 : 1 + len(_VIEW_TAG)] == _VIEW_TAG


# --- the fold ----------------------------------------------------------------------------------------------------


def apply_seen(state: RunState, event: ev.AnyEvent, view: View) -> None:
    """Applies an event of the view, in place. What can't be checked without the rest is taken on its leader's word."""
    match event:
        case ev.StageSealed() if event.group not in view.groups:
            require(state.finished is None, "StageSealed after RunFinished")
            merge = open_work(state, event.step).merges[event.group]
            require(event.group not in state.seals, f"group {event.group} is sealed twice")
            merge.phase = SEALED
            state.seals[event.group] = GroupSeal(event.hashes, event.blobs, event.squares)
            state.number += 1
        case ev.StepSealed():
            require(state.finished is None, "StepSealed after RunFinished")
            seal_step(state, event)
            state.number += 1
        case ev.RunFinished():
            finish_run(state, event)
            state.number += 1
        case ev.AuditOpened() if group_of(state, event.stage) not in view.groups:
            require(state.finished is None, "AuditOpened after RunFinished")
            note_audit_opened(state, event)
            state.number += 1
        case _:
            apply(state, event)


def apply_seen_record(state: RunState, record: ev.Record, view: View) -> None:
    """Applies the next record of the view; records between it and the last one aren't in the view."""
    require(record.number >= state.number, f"record {record.number} where {state.number} or later is due")
    state.number = record.number
    apply_seen(state, record.event, view)


# --- to compare ---------------------------------------------------------------------------------------------------


def _items(items: dict[int, Item]) -> Any:
    """Without what is noted of an item's inputs: they may be of a stage that isn't in the view."""
    known = {
        m: msgspec.structs.replace(found, forward_by=None, backward_by=None, contradictions=0)
        for m, found in items.items()
    }
    return canonical(known)


def seen_bytes(state: RunState, view: View) -> bytes:
    """Canonical bytes of what the view has of a state: equal for the fold of the whole and the fold of the view."""
    parts: dict[str, Any] = {
        name: canonical(getattr(state, name))
        for name in state.__struct_fields__
        if name not in ("work", "ahead", "number")
    }
    for name, work in (("work", state.work), ("ahead", state.ahead)):
        if work is None:
            continue
        stages = sorted(view.stages)
        near = {member for member, info in state.members.items() if info.stage in view.stages}

        def mine(found: dict[Member, Any], near: set[Member] = near) -> Any:
            return canonical({member: entry for member, entry in found.items() if member in near})

        parts[name] = [
            [work.step, work.num_training, work.num_evaluation, canonical(work.scalars), canonical(work.skipped)],
            [[_items(work.items[s]), canonical(work.undealt[s]), canonical(work.live[s])] for s in stages],
            [[work.done[s], work.evaluated[s]] for s in stages],
            [canonical(work.merges[group]) for group in sorted(view.groups)],
            [mine(work.held), mine(work.epochs), mine(work.silences)],
            canonical({key: replay for key, replay in work.replays.items() if key[0] in view.stages}),
        ]
    return canonical_bytes(parts)
