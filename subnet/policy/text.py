"""``policy.toml`` to a :class:`SubnetPolicy` and back: each mistake is one line; what is written says what each value is for."""

from __future__ import annotations

import difflib
import json
import textwrap
import tomllib
from pathlib import Path
from typing import Any, cast

import msgspec

from subnet.errors import ConfigError, VersionUnsupported
from subnet.policy.policy import FORMAT, SECTIONS, SubnetPolicy, short
from subnet.policy.values import Plain, is_allowed, type_of, values_of

LIMIT_POLICY_BYTES = 64 << 10
_TYPE_WORDS: dict[Any, str] = {int: "a whole number", float: "a number"}
_TEMPLATE = "iota policy show --default > policy.toml makes one"


def load_policy(path: str | Path) -> SubnetPolicy:
    """The policy that a file describes, every value checked; what isn't in it has its default. :class:`ConfigError`, or
    :class:`VersionUnsupported` where the file is of another format."""
    file = Path(path).expanduser()
    try:
        data = file.read_bytes()
    except FileNotFoundError as error:
        raise ConfigError(f"{file} does not exist", hint=_TEMPLATE) from error
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}", hint="check the path and its rights") from error
    try:
        return parse_policy(data)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error.reason}", hint=error.hint) from error
    except VersionUnsupported as error:
        raise VersionUnsupported(f"{file}: {error.reason}", hint=error.hint) from error


def parse_policy(data: bytes) -> SubnetPolicy:
    """TOML text in UTF-8."""
    if len(data) > LIMIT_POLICY_BYTES:
        raise ConfigError(f"{len(data)} bytes are no policy", hint=f"at most {LIMIT_POLICY_BYTES}")
    try:
        text = data.decode("utf-8")
        table = tomllib.loads(text)
    except UnicodeDecodeError as error:
        raise ConfigError(f"not UTF-8 at byte {error.start}", hint="save it as UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"not TOML: {error}", hint=_TEMPLATE) from error
    return policy_from(table)


def policy_from(table: dict[str, Any]) -> SubnetPolicy:
    """From nested tables, as TOML or JSON gives them."""
    given_format = table.get("format", FORMAT)
    if given_format != FORMAT or isinstance(given_format, bool):
        raise VersionUnsupported(
            f"format = {_shown(given_format)}: this version reads policies of format {FORMAT}", hint="update iota"
        )
    sections: dict[str, Any] = {}
    for name, value in table.items():
        if name == "format":
            continue
        if name not in SECTIONS:
            raise _unknown_section(name, is_table=isinstance(value, dict))
        if not isinstance(value, dict):
            raise ConfigError(f"{name} = {_shown(value)} is not allowed", hint=f"{name} is a section: write [{name}]")
        sections[name] = _section(name, cast("dict[str, Any]", value))
    return SubnetPolicy(**sections)


def _section(heading: str, table: dict[str, Any]) -> Any:
    section, known = SECTIONS[heading], values_of(SECTIONS[heading])
    values: dict[str, Any] = {}
    for name, given in table.items():
        if name not in known:
            raise _unknown_key(heading, name)
        kind = type_of(section, name)
        allowed = known[name].allowed
        try:
            values[name] = msgspec.convert(given, kind)
        except msgspec.ValidationError as error:
            words = f"{_TYPE_WORDS[kind]}, {allowed}" if kind in _TYPE_WORDS else f"one of {allowed}, in quotes"
            raise ConfigError(f"{heading}.{name} = {_shown(given)} is not allowed", hint=f"allowed: {words}") from error
        if not is_allowed(known[name], values[name]):
            raise ConfigError(f"{heading}.{name} = {_shown(given)} is not allowed", hint=f"allowed: {allowed}")
    return section(**values)


def _unknown_section(name: str, *, is_table: bool) -> ConfigError:
    if not is_table:
        home = next((heading for heading, section in SECTIONS.items() if name in values_of(section)), "")
        return ConfigError(f"unknown key {name}", hint=f"it belongs under [{home}]" if home else "see docs/policy.md")
    near = difflib.get_close_matches(name, list(SECTIONS), n=1, cutoff=0.5)
    hint = f"did you mean [{near[0]}]?" if near else f"allowed: {', '.join(SECTIONS)}"
    return ConfigError(f"unknown section [{name}]", hint=hint)


def _unknown_key(heading: str, name: str) -> ConfigError:
    what, own = f"unknown key {heading}.{name}", list(values_of(SECTIONS[heading]))
    home = next((other for other, section in SECTIONS.items() if name in values_of(section)), "")
    if home:
        return ConfigError(what, hint=f"it belongs under [{home}]")
    near = difflib.get_close_matches(name, own, n=1, cutoff=0.6)
    return ConfigError(what, hint=f"did you mean {near[0]}?" if near else f"[{heading}] has {', '.join(own)}")


def _shown(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


# --- back ----------------------------------------------------------------------------------------------------------


def dump_policy(policy: SubnetPolicy) -> str:
    """TOML with a comment for each value; :func:`parse_policy` of it gives the same policy."""
    default, lines = SubnetPolicy().values(), [f"# Policy {short(policy.digest)}", f"format = {FORMAT}"]
    given = policy.values()
    for heading, section in SECTIONS.items():
        lines += ["", *_comment(section.__doc__ or ""), f"[{heading}]"]
        for name, value in values_of(section).items():
            key = f"{heading}.{name}"
            unit = "" if value.unit == "-" else f"; in {value.unit}"
            lines += ["", *_comment(value.why)]
            lines += _comment(
                f"Allowed: {value.allowed}{unit}; default: {toml_of(default[key])}. A change: {value.pace}."
            )
            lines.append(f"{name} = {toml_of(given[key])}")
    return "\n".join(lines) + "\n"


def toml_of(value: Plain) -> str:
    """As TOML has it, to the last bit."""
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value)


def _comment(text: str) -> list[str]:
    return [f"# {line}" for line in textwrap.wrap(" ".join(text.split()), 100)]
