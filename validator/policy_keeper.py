"""The policies of one validator, the one in force and the one to come, in one file that survives whatever happens to the process.

``DIR/policy.json`` is the place of record (written temp, fsync, rename): a change counts from the moment it is there. Journals of
runs are told of it afterwards; what a crash kept from them is told when the run is led again (:meth:`PolicyKeeper.untold`).
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from subnet.errors import ConfigError, Corrupt, VersionUnsupported
from subnet.policy.api import PolicyLine, PolicyView
from subnet.policy.policy import FORMAT, SubnetPolicy, short
from subnet.run.events import PolicyChanged
from subnet.score.book import Told
from subnet.score.timeline import Counting, Timeline
from subnet.store.disk import atomic_write

NAME = "policy.json"
SHOWN = 64
"""Newest policies that are told."""
DEFAULT_DIGEST = SubnetPolicy().digest


class _Kept(msgspec.Struct, frozen=True):
    format: int
    lines: tuple[PolicyLine, ...]


class PolicyKeeper:
    """``begins``: the operator's ``--policy FILE``, for the first start; None: the default, or what there is already."""

    def __init__(self, directory: Path, begins: SubnetPolicy | None, hotkey: str, now_s: float) -> None:
        self.path, self._hotkey = directory / NAME, hotkey
        self.lines: tuple[PolicyLine, ...] = self._load()
        if not self.lines:
            first = begins or SubnetPolicy()
            self.lines = (PolicyLine(first, first.digest, 0.0, 0, hotkey, now_s),)
            self._save()
        elif begins is not None and begins.digest not in (self.lines[0].digest, self.lines[-1].digest):
            raise ConfigError(
                f"--policy is policy {short(begins.digest)}; this validator began with {short(self.lines[0].digest)} and has "
                f"{short(self.lines[-1].digest)} ({self.path})",
                hint="start it without --policy, then: iota policy apply FILE",
            )

    def _load(self) -> tuple[PolicyLine, ...]:
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise ConfigError(f"cannot read {self.path}: {error.strerror or error}", hint="check --dir") from error
        hint = "move it away to begin with --policy FILE or the default; journals keep what was in force"
        try:
            kept = msgspec.json.decode(data, type=_Kept)
        except (msgspec.MsgspecError, ConfigError) as error:
            raise Corrupt(f"{self.path} can't be read: {error}", hint=hint) from error
        if kept.format != FORMAT:
            raise VersionUnsupported(f"{self.path} is of format {kept.format}, not {FORMAT}", hint="update iota")
        if not kept.lines or any(line.digest != line.policy.digest for line in kept.lines):
            raise Corrupt(f"{self.path}: a policy doesn't fit its digest", hint=hint)
        return kept.lines

    def _save(self) -> None:
        atomic_write(self.path, msgspec.json.format(msgspec.json.encode(_Kept(FORMAT, self.lines)), indent=1))

    def add(self, line: PolicyLine) -> None:
        """On disk when this returns; nothing has changed if it raises."""
        before, self.lines = self.lines, (*self.lines, line)
        try:
            self._save()
        except BaseException:
            self.lines = before
            raise

    # --- what is asked of it -------------------------------------------------------------------------------------

    def in_force(self, now_s: float) -> PolicyLine:
        return next((line for line in reversed(self.lines) if line.since_s <= now_s), self.lines[0])

    def policy(self, now_s: float) -> SubnetPolicy:
        return self.in_force(now_s).policy

    def pending(self, now_s: float) -> PolicyLine | None:
        return self.lines[-1] if self.lines[-1].since_s > now_s else None

    def view(self, now_s: float) -> PolicyView:
        return PolicyView(now_s, self.in_force(now_s), self.pending(now_s), self.lines[-SHOWN:])

    def timeline(self) -> Timeline:
        return Timeline(counting_of(line) for line in self.lines)

    def untold(self, told: Told | None, now_s: float) -> tuple[PolicyChanged, ...]:
        """What a run's journal has to be told, whose last word on it is ``told``."""
        in_force = self.lines.index(self.in_force(now_s))
        if told is None:
            begin = in_force + (self.lines[in_force].digest == DEFAULT_DIGEST)
        else:
            known = [
                n for n, line in enumerate(self.lines) if (line.digest, line.since_s) == (told.digest, told.effective_s)
            ]
            begin = max(known[-1] + 1, in_force) if known else in_force + (self.lines[in_force].digest == told.digest)
        return tuple(changed_of(line) for line in self.lines[begin:])


def counting_of(line: PolicyLine) -> Counting:
    return Counting(line.since_s, line.policy.score, line.policy.work)


def changed_of(line: PolicyLine) -> PolicyChanged:
    return PolicyChanged(line.policy, line.digest, line.since_s, line.since_block, line.by)
