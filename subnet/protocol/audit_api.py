"""What a validator tells of its audits and cases, and what is said to it about them: every answer names its grounds.

Public reads: ``GET /v1/cases``, ``/v1/cases/N`` and ``/v1/cases/N/bundle`` (each with ``?run=NAME``; without it the active
run). Signed: ``POST /v1/appeals`` by the convicted hotkey, ``/v1/witness`` and ``/v1/audits`` by holders of a permit.
"""

from __future__ import annotations

import msgspec

LIMIT_AUDIT_REQUEST_BYTES = 64 << 10
MAX_HOTKEYS = 256
"""Hotkeys that one request for an audit may name."""


class CaseView(msgspec.Struct, frozen=True):
    """One accusation as the journal has it. ``state``: open, or its outcome (see ``CaseClosed``)."""

    case: int
    hotkey: str
    step: int
    stage: int
    charge: str
    """What it is of: ``partial``, ``merge`` or ``unopened`` (see ``CaseOpened``)."""
    state: str
    bundle: str
    """Hash of the evidence; empty where there is none (``unopened``)."""
    digest: str
    sealed: bool
    witnesses: tuple[tuple[str, str], ...] = ()
    """(hotkey, digest) of third parties that replayed it."""
    appeal: str = ""
    """upheld, overturned, or running; empty: none."""


class CaseDetail(msgspec.Struct, frozen=True):
    """``GET /v1/cases/N``: a case and the hashes and sizes of the blobs that its bundle has beside ``case.msgpack``; where
    they are to be had (URLs, in this order, the case itself first) says ``GET /v1/cases/N/bundle``."""

    run_id: str
    view: CaseView
    blobs: tuple[tuple[str, int], ...] = ()


class AppealRequest(msgspec.Struct, frozen=True):
    """``POST /v1/appeals``, signed by the hotkey that the case is about: the bundle is replayed in a fresh process."""

    case: int
    run: str = ""


class WitnessRequest(msgspec.Struct, frozen=True):
    """``POST /v1/witness``: what another validator's replay of the bundle gave."""

    case: int
    digest: str
    run: str = ""


class AuditsRequest(msgspec.Struct, frozen=True):
    """``POST /v1/audits``: another validator's seed draws these hotkeys' partials of (step, stage): have the evidence opened."""

    window: int
    step: int
    stage: int
    hotkeys: tuple[str, ...]
    run: str = ""


class Accepted(msgspec.Struct, frozen=True):
    """The request is in; what comes of it is in the journal (and in :class:`CaseView`)."""

    said: str


class AuditCosts(msgspec.Struct, frozen=True):
    """Audits of the run since this validator's process began, beside the work that was reported to it."""

    done: int
    """Audits whose replay is finished."""
    repeated: int
    """Of those, replayed a second time because something was wrong."""
    troubled: int
    """Attempts that failed for reasons of our own (the store, the worker)."""
    compute_s: float
    """Of forwards and backwards in replays."""
    state_s: float
    """To bring stages to the states."""
    receipted_s: float
    """Of forwards and backwards that members reported."""
    read_bytes: int
    """Fetched for audits from the store."""
    evidence_bytes: int
    """Of boundaries that audits asked for."""
    open: int = 0
    """Audits of the fold that aren't closed."""
    cases: int = 0
    convicted: int = 0
