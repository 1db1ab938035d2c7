"""A process of its own that simulates its share of the worlds: jobs on stdin, what they came to on stdout, both msgpack."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress

import msgspec

from iota.incentives_rules import rules_of
from subnet.errors import IotaError
from subnet.incentives.outcome import Seed
from subnet.incentives.scenario import Scenario
from subnet.incentives.world import simulate
from subnet.policy.policy import SubnetPolicy

Job = tuple[SubnetPolicy, Scenario, int]
"""Policy, scenario, seed."""
JOB_LIMIT_S = 4 * 3600.0
"""A world that takes longer is given up."""


def run_job(job: Job) -> Seed:
    policy, scenario, seed = job
    return simulate(policy, scenario, seed, rules_of(policy))


class Worker:
    """Another process with some of the jobs; :meth:`results` waits for them, :meth:`stop` ends it in any case."""

    def __init__(self, jobs: list[Job]) -> None:
        self._limit_s = JOB_LIMIT_S * len(jobs)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "iota.incentives_worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # then it has said why on stderr, and results() finds its status
            self._process.stdin.write(msgspec.msgpack.encode(jobs))
            self._process.stdin.close()
        self._process.stdin = None

    def results(self) -> list[Seed]:
        try:
            data, _ = self._process.communicate(timeout=self._limit_s)
        except subprocess.TimeoutExpired as error:
            raise IotaError(
                f"a simulation took longer than {self._limit_s:.0f} s", hint="fewer machines or days"
            ) from error
        if self._process.returncode:
            raise IotaError(f"a simulating process ended with status {self._process.returncode}", hint="see above")
        return msgspec.msgpack.decode(data, type=list[Seed])

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


def main() -> int:
    jobs = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=list[Job])
    sys.stdout.buffer.write(msgspec.msgpack.encode([run_job(job) for job in jobs]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
