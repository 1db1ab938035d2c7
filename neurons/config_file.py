"""``--config FILE``: a TOML file whose keys are flags. ``[wallet] name = "me"`` is ``--wallet.name me``; a flag beside it wins."""

from __future__ import annotations

import argparse
import difflib
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from subnet.errors import ConfigError

FLAG = "--config"
LIMIT_BYTES = 64 << 10


def parse_with_file(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """All flags; :class:`ConfigError` names the file where what it says isn't one."""
    words = list(arguments)
    path = _file_of(words)
    if path is None:
        return parser.parse_args(words)
    given = {word.partition("=")[0] for word in words if word.startswith("--")}
    flags = dict(read_flags(path))
    _check_names(path, flags, [name for action in parser._actions for name in action.option_strings])  # pyright: ignore[reportPrivateUsage]
    try:
        parser.parse_args(_words(flags))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.reason}", hint="its keys are the flags of iota miner --help") from error
    return parser.parse_args([*_words({flag: value for flag, value in flags.items() if flag not in given}), *words])


def _check_names(path: Path, flags: dict[str, Any], known: Sequence[str]) -> None:
    """On a command line a flag may be shortened; in a file that would be a misspelling."""
    for flag in flags:
        if flag not in known:
            near = difflib.get_close_matches(flag, known, 1)
            said = f"; meant is perhaps {near[0][2:]}" if near else ""
            raise ConfigError(
                f"{path}: there is no flag {flag}{said}", hint="its keys are the flags of iota miner --help"
            )


def read_flags(path: Path) -> Iterator[tuple[str, Any]]:
    """(flag, value) of each key; :class:`ConfigError` for what can't be read."""
    try:
        text = path.expanduser().read_bytes()
        if len(text) > LIMIT_BYTES:
            raise ConfigError(f"{path} has {len(text)} bytes, allowed are {LIMIT_BYTES}", hint="is it the right file?")
        found = tomllib.loads(text.decode("utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}", hint="iota miner setup writes one") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no TOML: {error}", hint="mend it, or have it made by iota miner setup") from error
    yield from _flat("", found)


def _flat(prefix: str, table: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _flat(f"{name}.", value)
        else:
            yield f"--{name}", value


def _words(flags: dict[str, Any]) -> list[str]:
    words: list[str] = []
    for flag, value in flags.items():
        if value is False:
            continue
        words.append(flag)
        if isinstance(value, list):
            words += [str(one) for one in value]
        elif value is not True:
            words.append(str(value))
    return words


def _file_of(words: list[str]) -> Path | None:
    for number, word in enumerate(words):
        name, _, value = word.partition("=")
        if name == FLAG:
            value = value or (words[number + 1] if number + 1 < len(words) else "")
            return Path(value) if value else None
    return None
