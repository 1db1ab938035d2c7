"""A swarm's processes by name: each entry takes its settings as a plain table and runs until it is told to stop."""

from __future__ import annotations

import asyncio
import faulthandler
import importlib
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from subnet.allocator import bound_heap
from subnet.chain.genesis import DEFAULT_LOCAL_GENESIS, Genesis, load_genesis
from subnet.logs import setup


class ChainSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rules: ``genesis``, else ``genesis_file``, else those of a local swarm, with funds for the asking."""

    directory: Path
    host: str = "127.0.0.1"
    port: int = 9944
    genesis: Genesis | None = None
    genesis_file: Path | None = None


class StoreSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    directory: Path
    host: str = "127.0.0.1"
    port: int = 9945
    secret: Path
    """File shared with the validator; made on first use."""
    budget_bytes: int = 64 << 30


class Before(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a process does before its entry: how experiments change one that is otherwise as in production."""

    function: str
    """``module:function``, found in the process itself."""
    arguments: dict[str, Any] = {}
    """By name; of what JSON has."""

    def resolve(self) -> Callable[..., Any]:
        module, _, name = self.function.partition(":")
        return getattr(importlib.import_module(module), name)


def serve_chain_here(settings: ChainSettings) -> int:
    """Serve a local chain until SIGTERM or SIGINT."""
    from subnet.chain.local_server import serve_chain

    bound_heap()
    genesis = settings.genesis or DEFAULT_LOCAL_GENESIS
    if settings.genesis is None and settings.genesis_file is not None:
        genesis = load_genesis(settings.genesis_file)

    async def serve() -> int:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, task.cancel)
        try:
            await serve_chain(settings.directory, settings.host, settings.port, genesis)
        except asyncio.CancelledError:
            return 0
        return 0

    return asyncio.run(serve())


def serve_store_here(settings: StoreSettings) -> int:
    """Serve a store until SIGTERM or SIGINT."""
    from subnet.store.server import serve_store

    serve_store(settings.directory, settings.host, settings.port, settings.secret, settings.budget_bytes)
    return 0


def _chain(settings: dict[str, Any]) -> int:
    return serve_chain_here(msgspec.convert(settings, ChainSettings, dec_hook=_path))


def _store(settings: dict[str, Any]) -> int:
    return serve_store_here(msgspec.convert(settings, StoreSettings, dec_hook=_path))


def _validator(settings: dict[str, Any]) -> int:
    from validator.serve import run_validator
    from validator.settings import ValidatorSettings

    return run_validator(msgspec.convert(settings, ValidatorSettings, dec_hook=_path))


def _miner(settings: dict[str, Any]) -> int:
    from miner.settings import MinerSettings
    from miner.start import start_miner

    return start_miner(msgspec.convert(settings, MinerSettings, dec_hook=_path))


def _submit(settings: dict[str, Any]) -> int:
    from iota.submit import run_submit
    from iota.submit_settings import SubmitSettings

    return run_submit(msgspec.convert(settings, SubmitSettings, dec_hook=_path))


ENTRIES: dict[str, Callable[[dict[str, Any]], int]] = {
    "chain": _chain,
    "store": _store,
    "validator": _validator,
    "miner": _miner,
    "submit": _submit,
}


def run_entry(entry: str, settings: dict[str, Any]) -> int:
    """Run one entry in this process; errors of ours become one line on stderr and an exit status."""
    from neurons.entry import guarded

    setup(sys.stderr, settings.pop("log_level", "INFO"))
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # kill -USR1: stacks into the log
    before = msgspec.convert(settings.pop("before", None), Before | None)
    if before is not None:
        before.resolve()(**before.arguments)
    return guarded(lambda: ENTRIES[entry](settings))


def settings_of(value: msgspec.Struct) -> dict[str, Any]:
    """A settings struct as the table ``run_entry`` takes."""
    return msgspec.to_builtins(value, enc_hook=lambda item: str(item) if isinstance(item, Path) else item)


def _path(kind: Any, value: Any) -> Any:
    if kind is Path and isinstance(value, str):
        return Path(value)
    raise TypeError(f"{value!r} is no {kind}")
