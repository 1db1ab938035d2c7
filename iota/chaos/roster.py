"""``swarm.json`` of a local swarm: which processes it consists of, so that another command can act on them.

It is written whole or not at all, whenever it changes. A process is named by its id and the time of its start, so that an
id that the kernel has given to somebody else by now is noticed.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from iota.processes import started_at
from iota.swarm import LocalSwarm
from subnet.errors import ConfigError
from subnet.store.disk import atomic_write

FILE = "swarm.json"
VERSION = 1


class RosterEntry(msgspec.Struct, frozen=True):
    name: str
    pid: int
    started: int
    """The kernel's ticks at its start (``/proc/PID/stat``)."""
    log: str
    hotkey: str = ""

    @property
    def runs(self) -> bool:
        return started_at(self.pid) == self.started


class Roster(msgspec.Struct, frozen=True, kw_only=True):
    version: int = VERSION
    pid: int
    """Of the command that the swarm ends with."""
    started: int
    validator_url: str
    chain_url: str
    store_url: str
    restart_s: float | None
    """Miners and the validator are started again so long after they ended; None: they aren't."""
    processes: tuple[RosterEntry, ...]

    @property
    def runs(self) -> bool:
        return started_at(self.pid) == self.started

    def entry(self, name: str) -> RosterEntry | None:
        return next((entry for entry in self.processes if entry.name == name), None)


def roster_of(swarm: LocalSwarm, restart_s: float | None) -> Roster:
    """The processes that run now."""
    entries: list[RosterEntry] = []
    for name, child in sorted(swarm.parent.children.items()):
        if not child.running or child.pid is None:
            continue
        started = started_at(child.pid)
        if started is not None:
            hotkey = swarm.miner_hotkey(int(name.removeprefix("miner-"))) if name.startswith("miner-") else ""
            entries.append(RosterEntry(name, child.pid, started, str(child.log), hotkey))
    own = os.getpid()
    return Roster(
        pid=own,
        started=started_at(own) or 0,
        validator_url=swarm.validator_url,
        chain_url=swarm.chain_url,
        store_url=swarm.store_url,
        restart_s=restart_s,
        processes=tuple(entries),
    )


def write_roster(directory: Path, roster: Roster) -> None:
    atomic_write(directory / FILE, msgspec.json.format(msgspec.json.encode(roster)) + b"\n", durable=False)


def read_roster(directory: Path) -> Roster:
    """The roster of a swarm that runs; else a :class:`ConfigError` that says what is missing."""
    path = directory / FILE
    try:
        roster = msgspec.json.decode(path.read_bytes(), type=Roster)
    except FileNotFoundError as error:
        raise ConfigError(f"{path} doesn't exist", hint=f"start a swarm with iota up --dir {directory}") from error
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path} can't be read: {error}", hint="start the swarm again") from error
    if roster.version != VERSION:
        raise ConfigError(f"{path} has version {roster.version}, known is {VERSION}", hint="use one version of iota")
    if not roster.runs:
        raise ConfigError(f"the swarm of {directory} has ended", hint=f"start it with iota up --dir {directory}")
    return roster
