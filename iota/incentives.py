"""A policy tried out: simulated worlds, seed by seed, in at most two processes; their result, and two policies' difference."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from iota.incentives_worker import Job, Worker, run_job
from subnet.errors import ConfigError
from subnet.incentives.outcome import Seed
from subnet.incentives.scenario import Scenario, load_scenario
from subnet.incentives.summary import Comparison, Result, compare, result_of
from subnet.policy.policy import SubnetPolicy

MAX_PROCESSES = 2
MAX_SEEDS = 64
PRESETS = Path(__file__).parent / "assets" / "incentives"


def scenario_named(name: str) -> Scenario:
    """A preset's name, or a file's path."""
    preset = PRESETS / f"{name}.toml"
    if preset.is_file():
        return load_scenario(preset)
    if not Path(name).expanduser().exists():
        known = ", ".join(sorted(path.stem for path in PRESETS.glob("*.toml")))
        raise ConfigError(f"there is no scenario {name!r}", hint=f"name a file, or one of: {known}")
    return load_scenario(Path(name))


def run_jobs(jobs: Sequence[Job], processes: int = MAX_PROCESSES) -> list[Seed]:
    """In the order of the jobs; every other one in a second process, unless ``processes`` is 1."""
    if processes < 2 or len(jobs) < 2:
        return [run_job(job) for job in jobs]
    worker = Worker(list(jobs[1::2]))
    try:
        own = [run_job(job) for job in jobs[::2]]
        others = worker.results()
    finally:
        worker.stop()
    found = [*own, *others]
    found[::2], found[1::2] = own, others
    return found


def check_seeds(num_seeds: int) -> None:
    if not 1 <= num_seeds <= MAX_SEEDS:
        raise ConfigError(f"seeds = {num_seeds} is not allowed", hint=f"allowed: 1 to {MAX_SEEDS}")


def simulate_policy(
    policy: SubnetPolicy, scenario: Scenario, num_seeds: int, *, first_seed: int = 1, processes: int = MAX_PROCESSES
) -> Result:
    """``num_seeds`` worlds, from ``first_seed`` on. :class:`ConfigError` for numbers out of range."""
    check_seeds(num_seeds)
    jobs = [(policy, scenario, first_seed + k) for k in range(num_seeds)]
    return result_of(policy, scenario, run_jobs(jobs, processes))


def compare_policies(
    a: SubnetPolicy,
    b: SubnetPolicy,
    scenario: Scenario,
    num_seeds: int,
    *,
    first_seed: int = 1,
    processes: int = MAX_PROCESSES,
) -> Comparison:
    """Both over the same seeds."""
    check_seeds(num_seeds)
    seeds = range(first_seed, first_seed + num_seeds)
    found = run_jobs([(policy, scenario, seed) for policy in (a, b) for seed in seeds], processes)
    of_a, of_b = found[:num_seeds], found[num_seeds:]
    return compare(result_of(a, scenario, of_a), result_of(b, scenario, of_b), of_a, of_b)
