"""A swarm whose miners live in network namespaces of their own; chain, store, validator and submitter stay in the machine's.

Miners are started with the very entry of every swarm. Leaving the ``with`` block ends them all.
"""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import msgspec

from benchmarks.link_spaces import HOME, Spaces
from iota.entries import settings_of
from iota.swarm import LocalSwarm, SwarmOptions
from miner.settings import MinerSettings
from subnet.errors import ConfigError
from subnet.run.config import RunConfig

ROOT = Path(__file__).resolve().parent.parent
_END_S = 30.0
_START = "import json, sys; from iota.entries import run_entry; sys.exit(run_entry('miner', json.loads(sys.argv[1])))"


class SpacedSwarm(LocalSwarm):
    def __init__(
        self, directory: Path, config: RunConfig, spaces: Spaces, options: SwarmOptions, **miner: object
    ) -> None:
        super().__init__(directory, config, len(spaces.names), options)
        self._spaces, self._miner = spaces, miner
        self._processes: list[subprocess.Popen[bytes]] = []
        self._finished = False

    @property
    def chain_url(self) -> str:
        return f"http://{HOME}:{self.ports.chain}"

    @property
    def store_url(self) -> str:
        return f"http://{HOME}:{self.ports.store}"

    @property
    def validator_url(self) -> str:
        return f"http://{HOME}:{self.ports.validator}"

    def final_root(self) -> str:
        self._finished = True
        return super().final_root()

    def stop(self) -> None:
        """Once the run has finished its miners end by themselves, and say what they have done."""
        for process in self._processes if self._finished else ():
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
            process.kill()
            process.wait()
        self._processes.clear()
        super().stop()

    def check(self, *, validator: bool = True) -> None:
        super().check(validator=validator)
        for number, process in enumerate(self._processes):
            if process.poll():
                raise ConfigError(f"miner {number} ended with {process.returncode}", hint=f"see {self.log_of(number)}")

    def _request(self, name: str, entry: str, settings: msgspec.Struct) -> None:
        if entry in ("chain", "store", "validator"):
            settings = msgspec.structs.replace(settings, host="0.0.0.0")  # reached from the namespaces
        super()._request(name, entry, settings)

    def _request_miner(self) -> None:
        number = self.num_miners
        settings = self._spaced_settings(number)
        table = json.dumps({**settings_of(settings), "log_level": self.options.log_level})
        with self.log_of(number).open("wb") as log:
            self._processes.append(
                subprocess.Popen(
                    [*self._spaces.command(number), sys.executable, "-c", _START, table],
                    cwd=ROOT,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            )
        self.num_miners += 1

    def _spaced_settings(self, number: int) -> MinerSettings:
        settings = self._miner_settings(number)
        return msgspec.structs.replace(
            settings,
            host=self._spaces.address(number),
            validator_url=self.validator_url,
            exit_when_finished=True,
            **self._miner,
        )
