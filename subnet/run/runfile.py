"""``run.toml`` to a :class:`RunConfig` and back; each mistake is one line that names the key and the remedy.

Paths in a run file are relative to it; the config holds them as absolute paths.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import msgspec

from subnet.errors import ConfigError
from subnet.run.config import RunConfig

_BARE_KEY = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-")


def load_run_file(path: str | Path) -> RunConfig:
    """The run that a file describes, every value checked."""
    file = Path(path)
    try:
        text = file.read_bytes().decode("utf-8")
    except FileNotFoundError as error:
        raise ConfigError(f"{file} does not exist", hint="name a run file, for example examples/demo.toml") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not UTF-8 at byte {error.start}", hint="save it as UTF-8") from error
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}", hint="check the path and its rights") from error
    try:
        return parse_run(text, file.resolve().parent)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error.reason}", hint=error.hint) from error


def parse_run(text: str, directory: Path) -> RunConfig:
    """The run that TOML text describes; relative paths start at ``directory``."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        hint = 'texts need quotes: name = "demo"; sections are headed [run]'
        raise ConfigError(f"not TOML: {error}", hint=hint) from error
    return run_of_table(table, directory)


def run_of_table(table: Mapping[str, Any], directory: Path) -> RunConfig:
    """The run that nested tables describe, as TOML gives them; relative paths start at ``directory``."""
    sections = {field.name: field for field in msgspec.structs.fields(RunConfig)}
    for name, value in table.items():
        if name not in sections:
            raise _unknown_section(name, value, list(sections))
        if not isinstance(value, dict):
            raise ConfigError(f"{name} = {_shown(value)} is not allowed", hint=f"{name} is a section: write [{name}]")
    values: dict[str, Any] = {}
    for name, field in sections.items():
        given = table.get(name)
        if given is None and not field.required:
            continue
        if given is None:
            raise ConfigError(f"the section [{name}] is missing", hint=_example(name))
        values[name] = _section(name, field.type, _resolved(name, given, directory))
    return RunConfig(**values)


def _fields(section_type: Any) -> dict[str, msgspec.structs.FieldInfo]:
    return {field.name: field for field in msgspec.structs.fields(section_type)}


def _section(name: str, section_type: Any, given: dict[str, Any]) -> Any:
    fields = _fields(section_type)
    values: dict[str, Any] = {}
    for key, value in given.items():
        if key not in fields:
            raise _unknown_key(name, key)
        try:
            values[key] = msgspec.convert(value, fields[key].type)
        except msgspec.ValidationError as error:
            allowed = _TYPE_WORDS.get(str(fields[key].type).replace("typing.", ""), str(fields[key].type))
            raise ConfigError(f"{name}.{key} = {_shown(value)} is not allowed", hint=f"allowed: {allowed}") from error
    for key, field in fields.items():
        if field.required and key not in values:
            raise ConfigError(f"{name}.{key} is missing", hint=_example(name))
    if name == "model" and values.keys().isdisjoint({"config", "pretrained", "modules"}):
        raise ConfigError("model.config is missing", hint=_example(name))
    return section_type(**values)


_TYPE_WORDS = {
    "<class 'int'>": "a whole number",
    "<class 'float'>": "a number",
    "<class 'str'>": "a text in quotes",
    "str | None": "a text in quotes",
    "tuple[str, ...]": 'a list of texts, for example ["book.txt"]',
    "tuple[float, float]": "a list of two numbers, for example [0.9, 0.95]",
    "tuple[float, ...]": "a list of numbers, for example [0.7, 0.3]",
    "tuple[int, ...]": "a list of whole numbers, for example [0, 1]",
    "<class 'bool'>": "true, false",
    "dict[str, Any] | None": "a table [model.config], or the path of a config.json in quotes",
}


def _example(section: str) -> str:
    return {
        "run": 'add under [run]: name = "my-run"',
        "model": 'add under [model]: config = "config.json", or a table [model.config], or pretrained = "directory"',
    }.get(section, f"add [{section}]")


def _unknown_section(name: str, value: object, sections: list[str]) -> ConfigError:
    if not isinstance(value, dict):
        return _unknown_key(None, name)
    near = difflib.get_close_matches(name, sections, n=1, cutoff=0.5)
    if near:
        return ConfigError(f"unknown section [{name}]", hint=f"did you mean [{near[0]}]?")
    return ConfigError(f"unknown section [{name}]", hint=f"allowed: {', '.join(sections)}")


def _unknown_key(section: str | None, key: str) -> ConfigError:
    """Names the nearest right key: of this section if one is near, else of any."""
    what = f"unknown key {key}" if section is None else f"unknown key {section}.{key}"
    by_section = {field.name: list(_fields(field.type)) for field in msgspec.structs.fields(RunConfig)}
    own = by_section.get(section, []) if section is not None else []
    if near := difflib.get_close_matches(key, own, n=1, cutoff=0.6):
        return ConfigError(what, hint=f"did you mean {near[0]} in [{section}]?")
    homes = {name: home for home, names in reversed(by_section.items()) for name in names}
    if near := difflib.get_close_matches(key, list(homes), n=1, cutoff=0.6):
        return ConfigError(what, hint=f"did you mean {near[0]} in [{homes[near[0]]}]?")
    if own:
        return ConfigError(what, hint=f"keys of [{section}]: {', '.join(own)}")
    return ConfigError(what, hint=f"keys stand under a section: {', '.join(f'[{name}]' for name in by_section)}")


def _resolved(section: str, given: dict[str, Any], directory: Path) -> dict[str, Any]:
    """A section with its paths made absolute and a ``config.json`` read in; values of a wrong type pass untouched."""
    found = dict(given)
    if section == "model":
        config = found.get("config")
        if isinstance(config, str):
            found["config"] = (
                _inline_config(config) if config.lstrip().startswith("{") else _read_config(directory, config)
            )
        if isinstance(found.get("pretrained"), str):
            found["pretrained"] = str(_absolute(directory, found["pretrained"]))
        modules = found.get("modules")
        if isinstance(modules, str) and modules.rpartition(":")[0].endswith(".py"):
            where, _, function = modules.rpartition(":")
            found["modules"] = f"{_absolute(directory, where)}:{function}"
    if section == "data":
        sources = found.get("sources")
        if isinstance(sources, list):
            entries = cast("list[Any]", sources)
            found["sources"] = [str(_absolute(directory, s)) if isinstance(s, str) and s else s for s in entries]
        if isinstance(found.get("tokenizer"), str) and found["tokenizer"]:
            found["tokenizer"] = str(_absolute(directory, found["tokenizer"]))
    return found


def _absolute(directory: Path, path: str) -> Path:
    return (directory / Path(path).expanduser()).resolve()


def _inline_config(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise ConfigError(f"model.config is not JSON: {error}", hint="write it as a table [model.config]") from error


def _read_config(directory: Path, path: str) -> dict[str, Any]:
    file = _absolute(directory, path)
    file = file / "config.json" if file.is_dir() else file
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except FileNotFoundError as error:
        hint = "give the path of a config.json, relative to the run file, or a table [model.config]"
        raise ConfigError(f"model.config = {path!r}: no such file", hint=hint) from error
    except OSError as error:
        raise ConfigError(f"model.config = {path!r}: {error.strerror}", hint="check the path and its rights") from error
    except msgspec.MsgspecError as error:
        raise ConfigError(f"model.config = {path!r} is not a JSON table: {error}", hint="give a config.json") from error


def _shown(value: object) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "..."


def config_to_toml(config: RunConfig) -> str:
    """Every key of a run as TOML; loading it gives an equal config."""
    plain = cast("dict[str, dict[str, Any]]", msgspec.to_builtins(config))
    lines: list[str] = []
    for section, values in plain.items():
        lines.append(f"[{section}]")
        model = values.pop("config", None) if section == "model" else None
        if model is not None and not _fits_toml(model):
            lines.append(f"config = {_toml(json.dumps(model, ensure_ascii=False))}")  # TOML has no null
            model = None
        lines += [f"{_key(key)} = {_toml(value)}" for key, value in values.items() if value is not None]
        if model is not None:
            lines += ["", "[model.config]", *(f"{_key(key)} = {_toml(value)}" for key, value in model.items())]
        lines.append("")
    return "\n".join(lines)


def _fits_toml(value: object) -> bool:
    if isinstance(value, dict):
        return all(_fits_toml(entry) for entry in cast("dict[str, object]", value).values())
    if isinstance(value, list | tuple):
        return all(_fits_toml(entry) for entry in cast("list[object]", value))
    return value is not None


def _key(key: str) -> str:
    return key if key and set(key) <= _BARE_KEY else _toml(key)


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(entry) for entry in cast("list[object]", value)) + "]"
    if isinstance(value, dict):
        entries = cast("dict[str, object]", value).items()
        return "{ " + ", ".join(f"{_key(key)} = {_toml(entry)}" for key, entry in entries) + " }"
    raise ConfigError(f"{value!r} cannot be written as TOML", hint="use texts, numbers, lists and tables")
