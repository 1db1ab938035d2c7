"""``min_compute.yml``, read by machine: what a role needs at least, and what is recommended. GB, GHz and Mbit/s."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec
import yaml

from subnet.errors import ConfigError

PATH = Path(__file__).resolve().parent.parent / "assets" / "min_compute.yml"
Role = Literal["miner", "validator"]


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A misspelt key is an error."""


class Cpu(_Strict, frozen=True):
    min_cores: int
    min_speed: float
    recommended_cores: int
    recommended_speed: float
    architecture: str


class Gpu(_Strict, frozen=True):
    required: bool
    min_vram: float = 0.0
    recommended_vram: float = 0.0
    min_compute_capability: float = 0.0
    recommended_compute_capability: float = 0.0
    recommended_gpu: str = ""
    cuda: str = ""


class Memory(_Strict, frozen=True):
    min_ram: int
    recommended_ram: int
    min_swap: int
    recommended_swap: int
    ram_type: str


class Storage(_Strict, frozen=True):
    min_space: int
    recommended_space: int
    type: str
    min_iops: int
    recommended_iops: int


class System(_Strict, frozen=True):
    name: str
    version: str


class Network(_Strict, frozen=True):
    download_mbps: int
    upload_mbps: int
    inbound_port: bool


class RoleSpec(_Strict, frozen=True):
    cpu: Cpu
    gpu: Gpu
    memory: Memory
    storage: Storage
    os: System
    network: Network


class _Roles(_Strict, frozen=True):
    miner: RoleSpec
    validator: RoleSpec


class _Bandwidth(_Strict, frozen=True):
    download: int
    upload: int


class _NetworkSpec(_Strict, frozen=True):
    bandwidth: _Bandwidth


class MinCompute(_Strict, frozen=True):
    """The whole file."""

    version: str
    compute_spec: _Roles
    network_spec: _NetworkSpec

    def of(self, role: Role) -> RoleSpec:
        return self.compute_spec.miner if role == "miner" else self.compute_spec.validator


def load_spec(path: Path = PATH) -> MinCompute:
    """:class:`ConfigError` names the place that doesn't fit."""
    try:
        return msgspec.convert(yaml.safe_load(path.read_text(encoding="utf-8")), MinCompute)
    except (OSError, yaml.YAMLError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}", hint="see docs/doctor.md for its keys") from error
