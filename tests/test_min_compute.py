"""`min_compute.yml` has the keys that every subnet states for miner and validator, with values of their type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

FOUND = yaml.safe_load((Path(__file__).parent.parent / "min_compute.yml").read_text())
NUMBER = (int, float)
REQUIRED: dict[str, dict[str, Any]] = {
    "cpu": {"min_cores": int, "min_speed": NUMBER, "recommended_cores": int, "architecture": str},
    "gpu": {"required": bool},
    "memory": {"min_ram": int, "recommended_ram": int, "min_swap": int},
    "storage": {"min_space": int, "recommended_space": int, "type": str},
    "os": {"name": str, "version": (str, *NUMBER)},
}
OPTIONAL: dict[str, Any] = {
    "recommended_speed": NUMBER,
    "min_vram": NUMBER,
    "recommended_vram": NUMBER,
    "cuda_cores": int,
    "min_compute_capability": float,
    "recommended_compute_capability": float,
    "recommended_gpu": str,
    "min_amount": int,
    "recommended_amount": int,
    "recommended_swap": int,
    "ram_type": str,
    "min_iops": int,
    "recommended_iops": int,
}


def test_both_roles_are_there() -> None:
    assert isinstance(FOUND["version"], str)
    assert set(FOUND["compute_spec"]) == {"miner", "validator"}


@pytest.mark.parametrize("section", REQUIRED)
@pytest.mark.parametrize("role", ["miner", "validator"])
def test_sections_have_their_keys(role: str, section: str) -> None:
    values = FOUND["compute_spec"][role][section]
    assert set(REQUIRED[section]) <= set(values)
    for key, value in values.items():
        kind = REQUIRED[section].get(key) or OPTIONAL.get(key)
        if kind is not None:
            assert isinstance(value, kind), f"{role}.{section}.{key}"
            assert isinstance(value, bool) == (kind is bool), f"{role}.{section}.{key}"
        best = values.get("recommended_" + key.removeprefix("min_")) if key.startswith("min_") else None
        if best is not None:
            assert 0 <= value <= best, f"{role}.{section}.{key}"
