"""A fork from Python: the settings of a run with some changed, submitted as ``iota run fork`` does it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from iota.sdk.settings import Section
from subnet.errors import ConfigError, NotFound
from subnet.run.config import RunConfig
from subnet.run.runfile import config_to_toml, run_of_table
from subnet.store.disk import atomic_write
from subnet.timing import Deadline

if TYPE_CHECKING:
    from iota.sdk.swarm import Swarm


def forked_config(settings: Mapping[str, Mapping[str, Any]], name: str, sections: Mapping[str, Section]) -> RunConfig:
    """The run file of a fork called ``name``; raises ConfigError as for a run file, NotFound where there are no settings."""
    if not settings:
        raise NotFound("the run hasn't begun", hint="a fork begins with a state of it")
    table: dict[str, dict[str, Any]] = {
        section: {key: value for key, value in values.items() if value is not None}
        for section, values in settings.items()
    }
    for section, values in sections.items():
        if not isinstance(values, Mapping):
            hint = f"{section} takes a section's keys: {section}={{...}}"
            raise ConfigError(f"{section} = {values!r} is not allowed", hint=hint)
        table.setdefault(section, {}).update(values)
    table["run"] = {**table["run"], "name": name, "first_step": 0}
    return run_of_table(table, Path.cwd())


def submit_fork(
    swarm: Swarm,
    parent: str,
    config: RunConfig,
    step: int | None,
    weights_only: bool,
    timeout_s: float,
) -> None:
    """Raises as :meth:`iota.Swarm.submit`, NotFound where the state isn't kept."""
    path = swarm.cache / "runs" / f"{config.run.name}.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, config_to_toml(config).encode())
    more = [*(["--step", str(step)] if step is not None else []), *(["--weights-only"] if weights_only else [])]
    swarm.submit_fork(parent, path, more, Deadline.after(timeout_s), lambda text: None)
