"""`min_compute.yml` has the keys that subnets state, with values of their type; `iota doctor` reads the very file."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import yaml

from iota.doctor.spec import PATH, Role, load_spec
from subnet.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent


def test_the_file_at_the_root_is_the_one_that_is_read() -> None:
    assert (ROOT / "min_compute.yml").resolve() == PATH
    assert yaml.safe_load(PATH.read_text())["network_spec"]["bandwidth"] == {"download": 100, "upload": 100}


@pytest.mark.parametrize("role", ["miner", "validator"])
def test_what_is_recommended_is_no_less_than_what_is_needed(role: Role) -> None:
    spec = load_spec().of(role)
    pairs = 0
    for section in (spec.cpu, spec.gpu, spec.memory, spec.storage):
        values = msgspec.structs.asdict(section)
        for key in [key for key in values if key.startswith("min_")]:
            best = values.get("recommended_" + key.removeprefix("min_"))
            if best is not None:
                assert 0 <= values[key] <= best, f"{role}.{key}"
                pairs += 1
    assert pairs >= 7


def test_a_misspelt_key_is_named(tmp_path: Path) -> None:
    path = tmp_path / "min_compute.yml"
    path.write_text(PATH.read_text().replace("min_cores", "min_core", 1))
    with pytest.raises(ConfigError, match="min_core"):
        load_spec(path)
    path.write_text(PATH.read_text().replace("min_ram: 8", "min_ram: much", 1))
    with pytest.raises(ConfigError, match=r"compute_spec\.miner\.memory\.min_ram"):
        load_spec(path)
