"""The fleet file: groups of machines with their GPUs, links and troubles; each mistake is one line that names the key.

[store]                    # the object store; its link is shared by everybody
[validator]                # where the coordinator is, and how often it is away
[[group]]                  # count machines of one kind
kind = "rtx4090"           # a preset, or "custom" with memory_gb and tflops
"""

from __future__ import annotations

import math
import tomllib
from pathlib import Path

import msgspec

from subnet.errors import ConfigError
from subnet.simulate.presets import PRESETS, Preset

CUSTOM = "custom"
MAX_GPUS = 20_000


def _check(ok: bool, key: str, value: object, allowed: str) -> None:
    if not ok:
        raise ConfigError(f"{key} = {value!r} is not allowed", hint=f"allowed: {allowed}")


def _positive(owner: msgspec.Struct, where: str, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        ok = value is None or (math.isfinite(value) and value > 0)
        _check(ok, f"{where}.{name}", value, "a number above 0")


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class StorePart(_Part, frozen=True):
    """Rates are of the whole store. ``outage_hours`` 0: it never fails."""

    up_mbit: float = 10_000.0
    down_mbit: float = 10_000.0
    rtt_ms: float = 40.0
    mtbf_hours: float = 0.0
    outage_s: float = 60.0

    def __post_init__(self) -> None:
        _positive(self, "store", "up_mbit", "down_mbit", "outage_s")
        _check(0 <= self.rtt_ms <= 60_000, "store.rtt_ms", self.rtt_ms, "0 to 60000")
        _check(0 <= self.mtbf_hours < math.inf, "store.mtbf_hours", self.mtbf_hours, "0 (never) or more")


class ValidatorPart(_Part, frozen=True):
    """``mtbf_hours`` 0: it never fails. It comes back with its journal."""

    rtt_ms: float = 0.0
    """Added to every member's own round trip."""
    commit_ms: float = 3.0
    """One fsync of the journal."""
    mtbf_hours: float = 0.0
    outage_s: float = 20.0

    def __post_init__(self) -> None:
        _positive(self, "validator", "outage_s")
        _check(0 <= self.rtt_ms <= 60_000, "validator.rtt_ms", self.rtt_ms, "0 to 60000")
        _check(0 <= self.commit_ms <= 60_000, "validator.commit_ms", self.commit_ms, "0 to 60000")
        _check(0 <= self.mtbf_hours < math.inf, "validator.mtbf_hours", self.mtbf_hours, "0 (never) or more")


class GroupPart(_Part, frozen=True):
    """``count`` GPUs, each with a process of its own; ``per_link`` of them share one link."""

    kind: str
    count: int = 1
    name: str = ""
    memory_gb: float | None = None
    tflops: float | None = None
    bandwidth_gb_s: float | None = None
    mfu: float | None = None
    usd_per_hour: float | None = None
    up_mbit: float = 1000.0
    down_mbit: float = 1000.0
    rtt_ms: float = 20.0
    """To the validator and to other members, there and back."""
    per_link: int = 1
    reachable: bool = True
    """Whether others can connect to it; else what it moves goes through the store."""
    mtbf_hours: float = 0.0
    """Mean time between failures of one machine, exponential; 0: never."""
    outage_s: float = 300.0
    """Mean length of an outage, exponential."""
    kill_share: float = 0.5
    """Of the failures: the process dies and the machine says so at once. The rest is silence (power, link),"""
    leave_share: float = 0.0
    """or a farewell before it goes (a pre-emption with notice)."""
    item_overhead_ms: float = 5.0
    """Of each forward and each backward: dispatch, framing, hashing of the boundary."""
    graph_memory_gb: float = 4.0
    """As ``iota miner --limit.graph_memory_gib``: beyond it a forward is done again before its backward."""

    def __post_init__(self) -> None:
        where = f"group {self.name or self.kind!r}"
        known = ", ".join(sorted(PRESETS))
        _check(self.kind == CUSTOM or self.kind in PRESETS, f"{where}.kind", self.kind, f"custom, {known}")
        _check(1 <= self.count <= MAX_GPUS, f"{where}.count", self.count, f"1 to {MAX_GPUS}")
        _check(1 <= self.per_link <= 1024, f"{where}.per_link", self.per_link, "1 to 1024")
        _positive(self, where, "memory_gb", "tflops", "bandwidth_gb_s", "mfu", "up_mbit", "down_mbit", "outage_s")
        _positive(self, where, "graph_memory_gb")
        if self.kind == CUSTOM:
            lacking = [name for name in ("memory_gb", "tflops") if getattr(self, name) is None]
            _check(not lacking, f"{where}.{'/'.join(lacking)}", None, "numbers, since the kind is custom")
        _check(self.mfu is None or self.mfu <= 1, f"{where}.mfu", self.mfu, "above 0, at most 1")
        price_ok = self.usd_per_hour is None or 0 <= self.usd_per_hour < 1e4
        _check(price_ok, f"{where}.usd_per_hour", self.usd_per_hour, "0 to 10000")
        _check(0 <= self.rtt_ms <= 60_000, f"{where}.rtt_ms", self.rtt_ms, "0 to 60000")
        _check(0 <= self.item_overhead_ms <= 1e6, f"{where}.item_overhead_ms", self.item_overhead_ms, "0 to 1e6")
        _check(0 <= self.mtbf_hours < math.inf, f"{where}.mtbf_hours", self.mtbf_hours, "0 (never) or more")
        shares = self.kill_share + self.leave_share
        ok = 0 <= self.kill_share <= 1 and 0 <= self.leave_share <= 1 and shares <= 1
        _check(ok, f"{where}.kill_share + leave_share", shares, "shares from 0, together at most 1")

    @property
    def gpu(self) -> Preset:
        """Its kind with what the file says otherwise."""
        base = PRESETS.get(self.kind, Preset(0, 0, 100, 0.0, 1.0))
        given = {
            name: value
            for name in ("memory_gb", "tflops", "bandwidth_gb_s", "mfu", "usd_per_hour")
            if (value := getattr(self, name)) is not None
        }
        return msgspec.structs.replace(base, **given)

    @property
    def label(self) -> str:
        return self.name or self.kind


class Fleet(_Part, frozen=True):
    group: tuple[GroupPart, ...]
    store: StorePart = StorePart()
    validator: ValidatorPart = ValidatorPart()

    def __post_init__(self) -> None:
        _check(bool(self.group), "group", [], "at least one [[group]]")
        _check(self.num_gpus <= MAX_GPUS, "the number of GPUs", self.num_gpus, f"at most {MAX_GPUS}")

    @property
    def num_gpus(self) -> int:
        return sum(group.count for group in self.group)

    @property
    def peak_flops(self) -> float:
        """Of the whole fleet, a second: the denominator of MFU."""
        return sum(group.count * group.gpu.tflops * 1e12 for group in self.group)

    @property
    def usd_per_hour(self) -> float:
        return sum(group.count * group.gpu.usd_per_hour for group in self.group)

    @property
    def has_faults(self) -> bool:
        parts = (*self.group, self.store, self.validator)
        return any(part.mtbf_hours > 0 for part in parts)

    def calm(self) -> Fleet:
        """The same fleet where nothing ever fails."""
        return Fleet(
            tuple(msgspec.structs.replace(group, mtbf_hours=0.0) for group in self.group),
            msgspec.structs.replace(self.store, mtbf_hours=0.0),
            msgspec.structs.replace(self.validator, mtbf_hours=0.0),
        )


def load_fleet(path: str | Path) -> Fleet:
    """The fleet that a file describes; raises :class:`ConfigError` with one line."""
    file = Path(path)
    try:
        text = file.read_bytes().decode("utf-8")
    except FileNotFoundError as error:
        raise ConfigError(f"{file} does not exist", hint="name a fleet file, as in examples/fleets") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not UTF-8 at byte {error.start}", hint="save it as UTF-8") from error
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}", hint="check the path and its rights") from error
    try:
        return parse_fleet(text)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error.reason}", hint=error.hint) from error


def parse_fleet(text: str) -> Fleet:
    """The fleet that TOML text describes."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"not TOML: {error}", hint="sections are [store], [validator] and [[group]]") from error
    if not isinstance(table.get("group", []), list):
        raise ConfigError("group is one table", hint="write [[group]] with two brackets, once for each kind")
    try:
        return msgspec.convert(table, Fleet)
    except msgspec.ValidationError as error:
        raise ConfigError(
            str(error).replace("`", ""), hint="docs/simulate.md lists the keys of a fleet file"
        ) from error
