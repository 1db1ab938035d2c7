"""``iota chaos`` from its settings: on a swarm of its own or on one that runs already; the exit status is the verdict's."""

from __future__ import annotations

import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

import iota
from iota.chaos.attach import AttachedGround
from iota.chaos.journal import ChaosJournal, Entry
from iota.chaos.plan import Disruption, Kind, make_plan
from iota.chaos.run import ChaosOptions, run_chaos, run_reference, storm, write_plan
from iota.chaos.runner import Rules
from iota.chaos.verdict import ChaosResult, Demands, Verdict, judge, lines
from iota.chaos.watcher import ask_status
from iota.live import LiveView
from iota.swarm import SwarmOptions
from subnet.errors import ConfigError
from subnet.protocol.api import RunStatus
from subnet.run.runfile import load_run_file

RUN_FILE = "examples/demo.toml"
JOURNAL = "chaos.ndjson"
_UNITS_S = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class ChaosSettings:
    mtbf_s: float
    faults: tuple[Kind, ...]
    duration_s: float
    seed: int = 0
    run_file: Path | None = None
    num_miners: int = 12
    directory: Path = Path("iota-chaos")
    attach: Path | None = None
    until_finished: bool = False
    expect: str | None = None
    reference: bool = False
    limit_s: float = 7200.0
    keep_last_replica: bool = False
    device: str = "auto"
    as_json: bool = False
    plain: bool | None = None

    @property
    def to_the_end(self) -> bool:
        return self.until_finished or self.reference or self.expect is not None


def parse_seconds(text: str, flag: str) -> float:
    """``20s``, ``10m``, ``1.5h``, ``300ms``, ``20``."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|)", text.strip())
    if found is None or not float(found[1]) > 0:
        raise ConfigError(f"{flag} {text} is no time", hint="such as 20s, 10m or 1h")
    return float(found[1]) * _UNITS_S[found[2]]


def run_command(settings: ChaosSettings) -> int:
    if settings.expect is not None and not re.fullmatch("[0-9a-f]{64}", settings.expect):
        raise ConfigError(f"--expect {settings.expect} is no run root", hint="64 lower-case hex digits")
    stream = sys.stderr if settings.as_json else sys.stdout
    with LiveView(stream, plain=settings.plain) as view:
        verdict = _attached(settings, view) if settings.attach is not None else _own(settings, view)
    for line in lines(verdict):
        print(line, file=stream)
    if settings.as_json:
        print(msgspec.json.encode(verdict).decode())
    return 0 if verdict.ok else 1


def _own(settings: ChaosSettings, view: LiveView) -> Verdict:
    directory = settings.directory.expanduser().absolute()
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"{directory} exists already", hint="delete it, or choose another --dir")
    run_file = settings.run_file or Path(iota.__file__).resolve().parent.parent / RUN_FILE
    config = load_run_file(run_file)
    plan = make_plan(settings.seed, settings.duration_s, settings.mtbf_s, settings.faults)
    options = ChaosOptions(
        swarm=SwarmOptions(device=settings.device),
        rules=Rules(keep_last_replica=settings.keep_last_replica, min_miners=config.pipeline.stages),
        until_finished=settings.to_the_end,
    )
    _announce(view, settings, plan, directory / JOURNAL)
    view.say(f"{settings.num_miners} miners, {config.pipeline.stages} stages; logs in {directory / 'swarm' / 'logs'}")
    result = run_chaos(
        directory,
        config,
        settings.num_miners,
        plan,
        options=options,
        limit_s=settings.limit_s,
        on_status=view.show,
        say=view.say,
    )
    expected = settings.expect
    if settings.reference and result.finished:
        view.say(f"the same run undisturbed, on {config.pipeline.stages} miners")
        expected = run_reference(
            directory, config, config.pipeline.stages, options=options.swarm, limit_s=settings.limit_s
        )
    return _judged(settings, result, directory / JOURNAL, expected)


def _attached(settings: ChaosSettings, view: LiveView) -> Verdict:
    for given, flag in ((settings.run_file, "--run"), (settings.reference or None, "--reference")):
        if given is not None:
            raise ConfigError(f"{flag} is for a swarm of its own", hint="leave out --attach, or that flag")
    directory = Path(settings.attach or ".").expanduser().absolute()
    ground = AttachedGround(directory)
    ground.check_kinds(settings.faults)
    plan = make_plan(settings.seed, settings.duration_s, settings.mtbf_s, settings.faults, network=False)

    def fetch() -> RunStatus | None:
        return ask_status(ground.roster.validator_url)

    options = ChaosOptions(
        rules=Rules(keep_last_replica=settings.keep_last_replica), until_finished=settings.to_the_end
    )
    _announce(view, settings, plan, directory / JOURNAL)
    with ChaosJournal(directory / JOURNAL) as journal:
        write_plan(journal, plan)
        result = storm(ground, plan, journal, fetch, options, settings.limit_s, on_status=view.show, say=view.say)
    return _judged(settings, result, directory / JOURNAL, settings.expect)


def _announce(view: LiveView, settings: ChaosSettings, plan: tuple[Disruption, ...], journal: Path) -> None:
    view.say(f"{len(plan)} disruptions within {settings.duration_s:g} s, seed {settings.seed}; journal {journal}")


def _judged(settings: ChaosSettings, result: ChaosResult, journal: Path, expected: str | None) -> Verdict:
    verdict = judge(result, Demands(finished=settings.to_the_end, root=expected))
    with ChaosJournal(journal) as file:
        more = msgspec.to_builtins(verdict)
        file.write(Entry(time=time.time(), what="verdict", outcome="ok" if verdict.ok else "failed", more=more))
    return verdict
