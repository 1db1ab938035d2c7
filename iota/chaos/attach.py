"""The swarm of an ``iota up`` that runs elsewhere, as the faults see it: its processes by id, never a stranger's.

Who was ended is started again by that ``iota up`` (``--restart``); connections can't be disturbed from here.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from iota.chaos.faults import NoEffect
from iota.chaos.plan import NETWORK_KINDS, RESTARTED_KINDS, Kind
from iota.chaos.proxy import Policy
from iota.chaos.roster import RosterEntry, read_roster
from iota.processes import ProcessFailed
from subnet.errors import ConfigError

ATTACHED_KINDS = (Kind.KILL, Kind.PREEMPT, Kind.PAUSE, Kind.SLOW, Kind.REJOIN, Kind.VALIDATOR_KILL, Kind.STORE_OUTAGE)


class AttachedGround:
    """Implements :class:`iota.chaos.run.PolledGround`."""

    ends_with_run = True
    restarts_itself = True

    def __init__(self, directory: Path) -> None:
        self._directory = directory.expanduser().absolute()
        self.roster = read_roster(self._directory)
        self._expected: set[str] = set()
        self._known = {entry.name: entry for entry in self.roster.processes}
        self._reported: set[tuple[int, int]] = set()

    def check_kinds(self, kinds: Sequence[Kind]) -> None:
        """Raise where a kind can't be done from outside, or would leave somebody dead for good."""
        for kind in kinds:
            if kind not in ATTACHED_KINDS:
                why = "needs a swarm behind proxies" if kind in NETWORK_KINDS else "needs a swarm of its own"
                raise ConfigError(f"{kind.value} {why}", hint="leave out --attach, or that fault")
            if kind in RESTARTED_KINDS and self.roster.restart_s is None:
                raise ConfigError(
                    f"{kind.value} would leave its target dead", hint="start the swarm with iota up --restart 5"
                )

    def poll(self) -> list[str]:
        """Reads the roster again; a process that nobody here ended, and that isn't there any more, is told of."""
        try:
            self.roster = read_roster(self._directory)
        except ConfigError as error:
            raise ProcessFailed(
                "the swarm ended meanwhile", hint="iota up --stay keeps it up after its run has finished"
            ) from error
        for entry in self.roster.processes:
            self._known[entry.name] = entry
        died: list[str] = []
        for entry in self._known.values():
            if not _may_be_target(entry) or entry.runs or (entry.pid, entry.started) in self._reported:
                continue
            self._reported.add((entry.pid, entry.started))
            if entry.name in self._expected:
                self._expected.discard(entry.name)
            else:
                died.append(f"{entry.name} ended (see {entry.log})")
        return died

    def miners(self) -> tuple[str, ...]:
        names = [entry.name for entry in self.roster.processes if entry.name.startswith("miner-") and entry.runs]
        return tuple(sorted(names, key=lambda name: int(name.removeprefix("miner-"))))

    def running(self, name: str) -> bool:
        entry = self.roster.entry(name)
        return entry is not None and entry.runs

    def pid(self, name: str) -> int | None:
        entry = self.roster.entry(name)
        return entry.pid if entry is not None else None

    def hotkey(self, name: str) -> str:
        entry = self.roster.entry(name)
        return entry.hotkey if entry is not None else ""

    def signal(self, name: str, number: int, *, group: bool = False) -> int:
        entry = self.roster.entry(name)
        if entry is None or not entry.runs:
            raise NoEffect(f"{name} isn't running")
        try:
            (os.killpg if group else os.kill)(entry.pid, number)
        except ProcessLookupError as error:
            raise NoEffect(f"{name} has just ended") from error
        except PermissionError as error:
            raise ConfigError(f"no permission to signal {name}", hint="run as the user of the swarm") from error
        return entry.pid

    def expect_end(self, name: str) -> None:
        self._expected.add(name)

    def restart(self, name: str) -> None:
        """The roster's command does it; the script waits until it has."""

    def add_miner(self) -> str:
        raise ConfigError("a miner can't join from outside", hint="leave out --attach")

    def set_link(self, name: str, policy: Policy) -> None:
        raise ConfigError(f"the link {name} can't be disturbed from outside", hint="leave out --attach")

    def num_flipped(self, name: str) -> int:
        return 0


def _may_be_target(entry: RosterEntry) -> bool:
    return entry.name == "validator" or entry.name.startswith("miner-")
