"""``iota up``: a local swarm with its live view, until the run has finished or a person stops it."""

from __future__ import annotations

import time
from pathlib import Path

from iota.chaos.keeper import Keeper
from iota.chaos.watcher import StatusWatcher, ask_status
from iota.live import LiveView
from iota.swarm import LocalSwarm, SwarmOptions
from subnet.errors import ConfigError, Unreachable
from subnet.protocol.api import RunStatus
from subnet.run.runfile import load_run_file
from subnet.timing import Deadline

MARKER = ".iota-swarm"
_POLL_S = 0.5
_EXPORT_S = 600.0
_PATIENCE_S = 60.0
_NUM_STEPS = 400


def claim_directory(directory: Path) -> Path:
    """An empty directory, or one that an earlier swarm made; never a foreign one."""
    path = directory.expanduser().absolute()
    if path.exists() and not path.is_dir():
        raise ConfigError(f"{path} is a file", hint="choose another --dir")
    if path.is_dir() and any(path.iterdir()) and not (path / MARKER).exists():
        raise ConfigError(f"{path} isn't empty and isn't a swarm's", hint="choose another --dir")
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / MARKER).touch()
    except OSError as error:
        raise ConfigError(f"{path} can't be written: {error.strerror}", hint="choose another --dir") from error
    return path


def run_up(
    directory: Path,
    run_file: Path | None,
    num_miners: int,
    options: SwarmOptions,
    *,
    stay: bool,
    export: Path | None,
    plain: bool | None,
    restart_s: float | None = None,
    followers: int = 0,
) -> int:
    if run_file is not None:
        load_run_file(run_file)  # a typo is said before anything starts
    if restart_s is not None and not 0 <= restart_s <= 3600:
        raise ConfigError(f"--restart {restart_s:g} is not allowed", hint="allowed: 0 to 3600 seconds")
    swarm = LocalSwarm(claim_directory(directory), run_file, num_miners, options)
    with swarm, LiveView(plain=plain) as view:
        view.say(f"the run's page: {swarm.page_url}")
        view.say(f"validator {swarm.validator_url} · chain {swarm.chain_url} · store {swarm.store_url}")
        for number in range(followers):
            name = f"validator-{number + 1}"
            view.say(f"{name} follows, audits and scores at {swarm.start_follower(name)}")
        view.say(f"wallets {swarm.directory / 'wallets'} (submit with owner) · logs {swarm.directory / 'logs'}")
        keeper = Keeper(swarm, restart_s)
        try:
            status = _follow(swarm, keeper, view, wait_for_runs=run_file is None)
            root = status.summary.root or ""
            view.say(f"{status.summary.name} has finished: run root {root}")
            if export is not None:
                from iota.export import export_run

                done = export_run(
                    swarm.remote(), status.summary.name, export, deadline=Deadline.after(_EXPORT_S), say=view.say
                )
                view.say(f"exported to {done.directory}")
            while stay:
                keeper.tick()
                time.sleep(_POLL_S)
        except KeyboardInterrupt:
            view.say("stopping")
        finally:
            keeper.close()
    return 0


def _follow(swarm: LocalSwarm, keeper: Keeper, view: LiveView, *, wait_for_runs: bool) -> RunStatus:
    """Show the active run until one has finished (never, where runs are waited for)."""
    patience, shown = Deadline.after(_PATIENCE_S), None
    with StatusWatcher(lambda: ask_status(swarm.validator_url, steps=_NUM_STEPS), _POLL_S) as watcher:
        while True:
            for name in keeper.tick():
                view.say(f"{name} had ended and was started again")
            status = watcher.latest()
            if not watcher.unanswered:
                patience = Deadline.after(_PATIENCE_S)
            elif patience.expired:
                raise Unreachable(watcher.unanswered)
            if status is not None and status is not shown:
                view.show(status)
                shown = status
                if status.summary.state == "finished" and not wait_for_runs:
                    return status
            time.sleep(_POLL_S / 5)
