"""A chain, a store and one validator as real processes, the validator alone on one core, and a run that needs no model.

python -m benchmarks.coordinator_site chain|store SETTINGS.json     # what it starts as processes
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
from blake3 import blake3

from iota.entries import ChainSettings, StoreSettings, run_entry, settings_of
from iota.ports import HOST, SwarmPorts, answers
from subnet.chain.genesis import DEFAULT_LOCAL_GENESIS, GenesisNeuron
from subnet.net.client import SignedClient
from subnet.protocol.api import RunSubmission, RunSummary
from subnet.protocol.messages import Hello
from subnet.protocol.signing import Signer, create_wallet
from subnet.protocol.wire import encode
from subnet.run.config import (
    NO_AUDITS,
    DataSection,
    EvaluationSection,
    ModelSection,
    PipelineSection,
    RunConfig,
    RunSection,
    SnapshotSection,
)
from subnet.store.signed_urls import load_or_create_secret
from subnet.timing import Deadline
from subnet.words import PROTOCOL_VERSION, TensorSpec

ROOT = Path(__file__).resolve().parent.parent
HARDWARE = tuple(blake3(f"golden {stage}".encode()).hexdigest() for stage in range(2))
WIDTH = 1024
"""A stage is one matrix of WIDTH x WIDTH: 16 partitions, as many as a stage of any size has."""


def run_config(stages: int, microbatches: int) -> RunConfig:
    return RunConfig(
        audit=NO_AUDITS,
        run=RunSection(name="fleet", seed=1, steps=100_000),
        model=ModelSection(config={"model_type": "llama"}),
        data=DataSection(sequence_length=1024),
        pipeline=PipelineSection(stages=stages, microbatches=microbatches, microbatch_rows=1),
        snapshot=SnapshotSection(every_steps=100_000),
        evaluation=EvaluationSection(rows=0),
    )


def submission(stages: int, microbatches: int) -> RunSubmission:
    """One layer a stage, equally dear; nobody reads the blobs that it names."""
    layers = tuple((TensorSpec(f"layers.{stage}.weight", (WIDTH, WIDTH)),) for stage in range(stages))
    head = (TensorSpec("norm.weight", (WIDTH,)), TensorSpec("lm_head.weight", (64, WIDTH), row_blocked=True))
    units = ((TensorSpec("embed.weight", (64, WIDTH), row_blocked=True),), *layers, head)
    costs = (0.01, *(1.0 for _ in layers), 0.01)
    blob = blake3(b"nothing").hexdigest()
    return RunSubmission(
        version=PROTOCOL_VERSION,
        config=encode(run_config(stages, microbatches)),
        model_config={"model_type": "llama"},
        unit_tensors=units,
        unit_flops_per_token=costs,
        unit_costs=costs,
        tied=None,
        data=blob,
        snapshot=blob,
        tokenizer=blob,
        hardware_class=HARDWARE,
        cuts=tuple(range(stages)),
    )


@dataclass
class Usage:
    """Of one process: CPU seconds so far, resident bytes now."""

    cpu_s: float
    rss_bytes: int

    @staticmethod
    def of(pid: int) -> Usage:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        ticks = int(fields[11]) + int(fields[12])
        rss = int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
        return Usage(ticks / os.sysconf("SC_CLK_TCK"), rss)


@dataclass
class Site:
    """``with Site(...) as site``: everything runs, the run is submitted and active."""

    directory: Path
    hotkeys: tuple[str, ...]
    """URIs of the miners' hotkeys, registered from block 0 with a coldkey each."""
    stages: int
    microbatches: int
    validator_core: int
    other_core: int
    code: Path = ROOT
    """Checkout whose validator is measured."""
    ports: SwarmPorts = field(default_factory=lambda: SwarmPorts().taken())
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=lambda: {})
    run_id: str = ""
    receiver: str = ""

    def __enter__(self) -> Site:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def validator_pid(self) -> int:
        return self.processes["validator"].pid

    @property
    def journal_path(self) -> Path:
        return self.directory / "validator" / "runs" / "fleet" / "journal.db"

    @property
    def store_directory(self) -> Path:
        return self.directory / "store"

    def _start(self) -> None:
        self.directory.mkdir(parents=True)
        owner = create_wallet("validator", "default", self.directory / "wallets")
        self.receiver = owner.hotkey
        self._start_chain(owner)
        secret = self.directory / "store-secret"
        load_or_create_secret(secret)
        store = StoreSettings(directory=self.store_directory, port=self.ports.store, secret=secret)
        self._serve("store", settings_of(store), self.ports.store)
        self._start_validator(secret)
        self.run_id = asyncio.run(self._submit(owner))

    def _start_chain(self, owner: Signer) -> None:
        neurons = [GenesisNeuron(owner.hotkey, owner.coldkey, 10_000.0)]
        for uri in self.hotkeys:
            neurons.append(GenesisNeuron(Signer.from_uri(uri).hotkey, Signer.from_uri(f"{uri}//cold").hotkey))
        subnet = msgspec.structs.replace(
            DEFAULT_LOCAL_GENESIS.subnets[0],
            owner_hotkey=owner.hotkey,
            owner_coldkey=owner.coldkey,
            max_uids=len(neurons) + 16,
            neurons=tuple(neurons),
        )
        genesis = msgspec.structs.replace(DEFAULT_LOCAL_GENESIS, block_time_s=12.0, subnets=(subnet,))
        settings = ChainSettings(directory=self.directory / "chain", port=self.ports.chain, genesis=genesis)
        self._serve("chain", settings_of(settings), self.ports.chain)

    def _serve(self, entry: str, settings: dict[str, Any], port: int) -> None:
        path = self.directory / f"{entry}.json"
        path.write_bytes(msgspec.json.encode(settings))
        command = [sys.executable, "-m", "benchmarks.coordinator_site", entry, str(path)]
        self._process(entry, command, self.other_core)
        self._wait(entry, port)

    def _start_validator(self, secret: Path) -> None:
        flags = {
            "--subtensor.chain_endpoint": f"http://{HOST}:{self.ports.chain}",
            "--wallet.name": "validator",
            "--wallet.path": self.directory / "wallets",
            "--axon.port": self.ports.validator,
            "--dir": self.directory / "validator",
            "--store.url": f"http://{HOST}:{self.ports.store}",
            "--store.secret": secret,
        }
        words = [str(word) for pair in flags.items() for word in pair]
        command = [sys.executable, str(self.code / "neurons" / "validator.py"), *words]
        self._process("validator", command, self.validator_core)
        self._wait("validator", self.ports.validator)

    def _process(self, name: str, command: list[str], core: int) -> None:
        log = (self.directory / f"{name}.log").open("wb")
        with log:
            self.processes[name] = subprocess.Popen(
                command,
                cwd=self.code if name == "validator" else ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"},
                preexec_fn=lambda: os.sched_setaffinity(0, {core}),
            )

    def _wait(self, name: str, port: int) -> None:
        deadline = Deadline.after(60.0)
        while not answers(port):
            if self.processes[name].poll() is not None:
                raise RuntimeError(f"the {name} ended: {(self.directory / f'{name}.log').read_text()[-2000:]}")
            deadline.check(f"waiting for the {name}")
            time.sleep(0.1)

    async def _submit(self, owner: Signer) -> str:
        deadline = Deadline.after(60.0)
        async with SignedClient(f"http://{HOST}:{self.ports.validator}", owner, owner.hotkey) as client:
            value = submission(self.stages, self.microbatches)
            summary = await client.request("POST", "/v1/runs", value, RunSummary, deadline=deadline)
            while True:
                hello = await client.request("GET", "/v1/hello", None, Hello, deadline=deadline, signed=False)
                if hello.term:
                    return summary.run_id
                await asyncio.sleep(0.1)

    def stop(self) -> None:
        """The validator first, as a service would stop it; all of them at once where it doesn't end."""
        for name in ("validator", "store", "chain"):
            process = self.processes.pop(name, None)
            if process is None:
                continue
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def main(arguments: list[str]) -> int:
    entry, path = arguments
    return run_entry(entry, msgspec.json.decode(Path(path).read_bytes()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
