"""Where a miner's things lie, all of it outside of a checkout: settings by XDG, its directory under ``~/.iota``."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from neurons.config_file import read_flags
from subnet.errors import ConfigError
from subnet.store.disk import atomic_write

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,40}")
HEAD = """\
# Settings of a miner. Each key is a flag of `iota miner --help`; flags on the command line come first.
# Start it with: iota miner start {name}
"""


def settings_folder() -> Path:
    base = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(base).expanduser() / "iota" / "miners"


def data_folder(name: str) -> Path:
    """Caches, state and logs of one miner; the folder of the miner called ``miner`` is that of ``iota miner`` itself."""
    return Path("~/.iota").expanduser() / name


def checked_name(name: str) -> str:
    if NAME.fullmatch(name) is None:
        raise ConfigError(f"--name {name!r} is not allowed", hint="letters, digits, - and _, 41 characters at most")
    return name


class Miner(msgspec.Struct, frozen=True):
    """One that was set up: its settings file and what that says."""

    name: str
    path: Path
    flags: dict[str, Any]

    @property
    def directory(self) -> Path:
        return Path(str(self.flags.get("--dir", "~/.iota/miner"))).expanduser()

    @property
    def device(self) -> str:
        return str(self.flags.get("--device", "auto"))

    @property
    def page_port(self) -> int:
        return int(self.flags.get("--page.port", 0))

    @property
    def wallet(self) -> tuple[str, str, Path]:
        """(name, hotkey, path)."""
        path = Path(str(self.flags.get("--wallet.path", "~/.bittensor/wallets"))).expanduser()
        return str(self.flags.get("--wallet.name", "default")), str(self.flags.get("--wallet.hotkey", "default")), path

    @property
    def validator_urls(self) -> list[str]:
        found = self.flags.get("--validator.url", [])
        return [str(url) for url in found] if isinstance(found, list) else [str(found)]


def all_miners() -> list[Miner]:
    """Those that were set up, by name."""
    folder = settings_folder()
    return [read_miner(path) for path in sorted(folder.glob("*.toml"))] if folder.is_dir() else []


def read_miner(path: Path) -> Miner:
    return Miner(path.stem, path, dict(read_flags(path)))


def find_miners(names: list[str]) -> list[Miner]:
    """These, or all where none is named; :class:`ConfigError` where one isn't there."""
    there = all_miners()
    known = {miner.name: miner for miner in there}
    for name in names:
        if name not in known:
            raise ConfigError(
                f"no miner called {name!r} was set up",
                hint=f"there are: {', '.join(known) or 'none'}; iota miner setup makes one",
            )
    if not there:
        raise ConfigError("no miner was set up on this machine", hint="iota miner setup")
    return [known[name] for name in names] if names else there


def write_settings(path: Path, values: Mapping[str, Any]) -> None:
    """``values`` by dotted key; what is None is left out. The file appears whole."""
    lines = [HEAD.format(name=path.stem).rstrip()]
    tables: dict[str, list[str]] = {"": []}
    for key, value in values.items():
        if value is None:
            continue
        table, _, name = key.rpartition(".")
        tables.setdefault(table, []).append(f"{name} = {_toml(value)}")
    for table, entries in tables.items():
        if entries:
            lines += ["", *([f"[{table}]"] if table else []), *entries]
    atomic_write(path, ("\n".join(lines) + "\n").encode(), mode=0o600)


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(one) for one in value) + "]"
    text = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'
