"""The files under ``deploy/`` start what there is, with flags that there are."""

from __future__ import annotations

import configparser
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from neurons import miner, validator
from validator.ops.metrics import CODES

DEPLOY = Path(__file__).resolve().parent.parent / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))


def check_command(words: list[str]) -> None:
    """Parsed by the very parser that will get it; values of variables don't matter."""
    words = [re.sub(r"\$\{NETUID\}", "1", word) for word in words]
    if words[0] == "validator":
        settings = validator.settings_from(validator.build_parser().parse_args(words[1:]))
        assert settings.ops_port == 9109
    elif words[0] == "miner":
        miner.settings_from(miner.build_parser().parse_args(words[1:]))
    else:
        assert words[:2] == ["store", "serve"]
        assert words[2:] in ([], ["--dir", "/var/lib/iota/store"])


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_units_start_what_there_is_and_give_it_time_to_end(path: Path):
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(path.read_text())
    service = unit["Service"]
    words = shlex.split(service["ExecStart"])
    assert words[0] == "/opt/iota/.venv/bin/iota"
    check_command(words[1:])
    used = set(re.findall(r"\$\{(\w+)\}", service["ExecStart"]))
    assert used <= {pair.split("=")[0] for pair in service.get("Environment", "").split()}
    assert int(service["TimeoutStopSec"]) >= 30
    assert service["User"] == "iota"


def test_the_three_roles_have_a_unit():
    assert [path.name for path in UNITS] == ["iota-miner@.service", "iota-store.service", "iota-validator.service"]


def test_pm2_starts_what_there_is():
    text = (DEPLOY / "pm2" / "ecosystem.config.js").read_text()
    commands = re.findall(r'run\("[\w-]+", "([^"]+)"\)', text)
    assert len(commands) == 3
    for command in commands:
        check_command(shlex.split(command))


def test_compose_starts_what_there_is():
    compose: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    for service in compose["services"].values():
        check_command(list(service["command"]))
        assert service["restart"] == "unless-stopped"
    image = (DEPLOY / "Dockerfile").read_text()
    copied = set(re.findall(r"^COPY (\w+) \1$", image, re.MULTILINE))
    assert copied == {"iota", "subnet", "validator", "miner", "neurons"}


def test_alert_rules_name_problems_that_there_are():
    rules: dict[str, Any] = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())
    found = [rule for group in rules["groups"] for rule in group["rules"]]
    named = {
        code
        for rule in found
        for code in re.findall(r"[a-z_]+", " ".join(re.findall(r'code[!=]?~"([^"]+)"', rule["expr"])))
    }
    assert named
    assert named <= set(CODES)
    scrape: dict[str, Any] = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    assert scrape["scrape_configs"][0]["job_name"] == "iota-validator"
