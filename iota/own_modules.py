"""A run of a builder's own modules, on the builder's machine: the file is found, hashed, tried, and kept by a private swarm."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from blake3 import blake3

from subnet.errors import ConfigError
from subnet.model.own_code import CodeName, hash_of, parse_name, read_code, trust
from subnet.run.config import RunConfig
from subnet.store.disk import atomic_write

if TYPE_CHECKING:
    from subnet.model.registry import Architecture

CODE_FOLDER = "code"
"""Below a private swarm's directory: the files that its members may run, named by hash."""


def load_modules(config: RunConfig) -> Architecture:
    """The architecture of a run file's ``model.modules``, every module tried on a row; raises :class:`ConfigError`."""
    from subnet.model.sequence import check_behaviour, describe, load_sequence

    name = _name(config)
    trust(name.path)
    found, wanted = hash_of(name.path), config.model.modules_hash
    if wanted and wanted != found:
        raise ConfigError(
            f"{name.path} has hash {found}, the run file says model.modules_hash = {wanted}",
            hint="get the file it was made for, or leave the key out",
        )
    architecture = load_sequence(describe(name.short, found, config.model.config or {}))
    check_behaviour(architecture, config.data.sequence_length)
    return architecture


def for_others(config: RunConfig) -> RunConfig:
    """The config with the file's hash and without its folders."""
    if not config.model.modules:
        return config
    name = _name(config)
    model = msgspec.structs.replace(config.model, modules=name.short, modules_hash=hash_of(name.path))
    return msgspec.structs.replace(config, model=model)


def keep_code(config: RunConfig, directory: Path) -> None:
    """Give a private swarm in ``directory`` the file that the run names, if it names one."""
    if config.model.modules:
        keep(_name(config).path, directory / CODE_FOLDER)


def keep(path: Path, folder: Path) -> str:
    """Copy a builder's file into a private swarm's folder, named by its hash, which is returned."""
    data = read_code(path)
    found = blake3(data).hexdigest()
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / f"{found}.py").exists():
        atomic_write(folder / f"{found}.py", data)
    return found


def _name(config: RunConfig) -> CodeName:
    return parse_name(config.model.modules)
