"""``iota miner remove``: says what would be deleted, and deletes that and nothing else; the identity only where it is named too."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

import msgspec

from iota.home.places import Miner, all_miners
from iota.home.service import Unit
from miner.claim import running
from subnet.errors import ConfigError

STOP_S = 60.0
OURS = (
    "boundaries", "cache", "state", "witness", "miner.pid", "page-token", "status.json", "waiting.json", "miner.log",
)  # fmt: skip
"""What a miner makes in its directory; anything else there is somebody's and stays."""


class Removal(msgspec.Struct, frozen=True, kw_only=True):
    """What goes, what stays."""

    name: str
    delete: tuple[tuple[Path, int], ...]
    """(path, bytes)."""
    unit: bool
    keep: tuple[str, ...]


def plan_removal(miner: Miner, unit: Unit, *, identity: bool) -> Removal:
    directory, (wallet, hotkey, wallets) = miner.directory, miner.wallet
    key = wallets / wallet / "hotkeys" / hotkey
    delete = [miner.path]
    keep: list[str] = []
    if directory.is_dir():
        ours = [directory / name for name in OURS if (directory / name).exists()]
        others = sorted(path.name for path in directory.iterdir() if path.name not in OURS)
        delete += ours if others else [directory]
        if others:
            keep.append(f"{directory}: {', '.join(others[:8])} (not a miner's)")
    if identity:
        delete += [path for path in (key, key.with_name(f"{hotkey}pub.txt")) if path.exists()]
    elif key.exists():
        keep.append(f"the identity {wallet}/{hotkey} in {wallets} (--identity removes its hotkey)")
    if (wallets / wallet / "coldkey").exists():
        keep.append(f"the coldkey {wallets / wallet / 'coldkey'}: it is never removed here")
    return Removal(
        name=miner.name,
        delete=tuple((path, size_of(path)) for path in delete),
        unit=unit.installed(miner.name),
        keep=tuple(keep),
    )


def carry_out(miner: Miner, removal: Removal, unit: Unit) -> None:
    """Stop it where it runs, then delete; :class:`ConfigError` where it doesn't stop."""
    last = [one.name for one in all_miners()] == [miner.name]
    unit.remove(miner.name, last=last)
    stop(miner)
    for path, _ in removal.delete:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def stop(miner: Miner, within_s: float = STOP_S) -> bool:
    """SIGTERM, and wait until it has handed its leases back; False where it didn't run."""
    process = running(miner.directory)
    if process is None:
        return False
    if process:
        try:
            os.kill(process, signal.SIGTERM)
        except ProcessLookupError:
            return True
    until_s = time.monotonic() + within_s
    while running(miner.directory) is not None:
        if time.monotonic() > until_s:
            raise ConfigError(
                f"{miner.name} (process {process}) didn't end within {within_s:.0f} s", hint="end it, then try again"
            )
        time.sleep(0.1)
    return True


def size_of(path: Path) -> int:
    if not path.is_dir():
        return path.stat().st_size if path.exists() else 0
    return sum(one.lstat().st_size for one in path.rglob("*") if not one.is_dir())
