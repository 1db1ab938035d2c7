"""A whole swarm on this machine as an object: chain, store, validator, miners and a submitter, each its own process.

Every wait has a deadline; a process that ends by itself is an error that says what it said; leaving the ``with`` block
(or the death of this process) ends them all. Plain synchronous code without global state; not thread-safe.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import msgspec

from iota.entries import Before, ChainSettings, StoreSettings, settings_of
from iota.onchain import metagraph_and_weights
from iota.own_modules import CODE_FOLDER, keep_code
from iota.ports import HOST, SwarmPorts, answers
from iota.processes import ForkServer, ProcessFailed, failure_of
from iota.remote import Remote
from iota.submit_settings import SubmitSettings
from iota.swarm_wallets import NETUID, SwarmWallets
from miner.settings import MinerSettings
from subnet.chain.base import Metagraph, WeightsReceipt
from subnet.chain.genesis import DEFAULT_LOCAL_GENESIS, Genesis
from subnet.errors import ConfigError, NotFound, Refused, Unreachable
from subnet.policy.policy import SubnetPolicy
from subnet.protocol.api import RunStatus, RunSummary
from subnet.protocol.signing import Signer
from subnet.run.config import RunConfig
from subnet.run.runfile import config_to_toml, load_run_file
from subnet.store.signed_urls import load_or_create_secret
from subnet.timing import Deadline
from validator.settings import ValidatorSettings

_POLL_S = 0.1
_CALL_S = 10.0
_METAGRAPH_S = 6.0
_REAP_S = 30.0
ESSENTIAL = ("chain", "store", "validator")


@dataclass(frozen=True)
class SwarmOptions:
    """What may differ between swarms; the defaults are those of ``iota up``."""

    ports: SwarmPorts = field(default_factory=SwarmPorts)
    device: str = "auto"
    genesis: Genesis = DEFAULT_LOCAL_GENESIS
    """Its first subnet gets the swarm's owner, validator and miners."""
    private: bool = False
    """Its members run the builder's own modules (docs/models.md): the files that are submitted from this machine."""
    measure_costs: bool = True
    hardware_class: bool = True
    """The submitter reports the class of this machine, so that the first miner need not wait for a second's."""
    log_level: str = "INFO"
    start_s: float = 120.0
    spare_miners: int = 4
    """Miners that may be added later and are registered from block 0; others register when they are added."""
    spare_validators: int = 0
    """Validators named validator-1, ... that are registered with stake from block 0, to follow, or lead when the first is gone."""
    graph_memory_bytes: int = 4 << 30
    audit_memory_bytes: int = 4 << 30
    audit_disk_bytes: int = 16 << 30
    policy: SubnetPolicy | None = None
    """See :class:`validator.settings.ValidatorSettings`, of every validator of the swarm."""
    temporary: bool = False
    """The directory is removed when all has ended, also where this process was killed; its name begins with ``iota-swarm-``."""
    before_miners: Mapping[int, Before] = field(default_factory=dict[int, Before])
    """By number of the miner, what its process does before it begins, also when it is started again."""


class LocalSwarm:
    """``run``: a run file, a config, or None for a swarm that waits for submissions."""

    def __init__(
        self, directory: Path, run: Path | RunConfig | None, num_miners: int, options: SwarmOptions = SwarmOptions()
    ) -> None:
        if not 1 <= num_miners <= 200:
            raise ConfigError(f"{num_miners} miners are not allowed", hint="allowed: 1 to 200")
        self.directory = directory.expanduser().absolute()
        self.options = options
        self.num_miners = 0
        """Miners started so far, dead ones included; their numbers are 0 to this less one."""
        self._run, self._first_miners = run, num_miners
        self._parent: ForkServer | None = None
        self.ports = options.ports
        self.leader = "validator"
        """The validator's process that leads, and answers at :attr:`validator_url`."""
        self._validator_ports: dict[str, int] = {}
        self.run_name: str | None = None
        self._keys = SwarmWallets(self.directory)

    # ---- life

    def __enter__(self) -> LocalSwarm:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Returns when the validator answers; miners and the submission follow on their own (see ``wait_until``)."""
        deadline = Deadline.after(self.options.start_s)
        self.ports = self.options.ports.taken()
        self._parent = ForkServer(self.directory / "logs", remove=self.directory if self.options.temporary else None)
        genesis = self._keys.genesis(self.options.genesis, self._validator_names, self._miner_names)
        secret = self.directory / "store-secret"
        load_or_create_secret(secret)
        chain = ChainSettings(directory=self.directory / "chain", port=self.ports.chain, genesis=genesis)
        self._request("chain", "chain", chain)
        store = StoreSettings(directory=self.directory / "store", port=self.ports.store, secret=secret)
        self._request("store", "store", store)
        self._wait_port("chain", self.ports.chain, deadline)
        self._wait_port("store", self.ports.store, deadline)
        self._keys.register(self._miner_names[: self._first_miners], self.chain_url, deadline)
        self.start_validator()
        self.parent.wait_pid(self.leader, deadline)  # forked before the parent is busy warming up
        for _ in range(self._first_miners):
            self._request_miner()
        if self._run is not None:
            self.submit(self._run)
        self._wait_port(self.leader, self._validator_port(self.leader), deadline)

    def stop(self) -> None:
        """End every process; safe to call twice."""
        if self._parent is not None:
            parent, self._parent = self._parent, None
            parent.close()

    # ---- doing

    def start_validator(
        self, name: str = "validator", *, lead_from: bool = False, directory: Path | None = None
    ) -> None:
        """A validator's process; also after a :meth:`kill` of it (same directory, same journal).

        ``lead_from``: it goes on with the runs of the store. Whichever was started last is the swarm's :attr:`leader`.
        """
        self._reap(name)
        self.leader = name
        settings = self._validator_settings(name, directory)
        if lead_from:
            settings = msgspec.structs.replace(settings, lead_from=True)
        self._request(name, "validator", settings)

    def start_follower(self, name: str = "validator-1", *, runs: tuple[str, ...] = ()) -> str:
        """A validator that follows the journals in the store, also after a :meth:`kill` of it; the URL it answers at.

        ``runs``: names of those to follow, all where it is empty.
        """
        self._reap(name)
        settings = self._validator_settings(name, None)
        self._request(name, "validator", msgspec.structs.replace(settings, follow=True, follow_runs=runs))
        return f"http://{HOST}:{settings.port}"

    def submit(self, run: Path | RunConfig) -> None:
        """Start a submission; its end shows in :meth:`wait_until` and :meth:`wait_submitted`."""
        if isinstance(run, RunConfig):
            path = self.directory / "runs" / f"{run.run.name}.toml"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(config_to_toml(run), encoding="utf-8")
        else:
            path = run.expanduser().absolute()
        if self.options.private:
            keep_code(load_run_file(path), self.directory)
        settings = SubmitSettings(
            run_file=path,
            work_dir=self.directory / "submissions",
            validator_url=self.validator_url,
            wallet_name="owner",
            wallet_path=self._keys.path,
            device=self.options.device,
            measure_costs=self.options.measure_costs,
            hardware_class=self.options.hardware_class,
        )
        self._request("submit", "submit", settings)

    def add_miner(self) -> int:
        """Register and start one more miner; its number."""
        number = self.num_miners
        if self._keys.register([f"miner-{number}"], self.chain_url, Deadline.after(_CALL_S)):
            time.sleep(_METAGRAPH_S)  # until the validator has read the chain again
        self._request_miner()
        return number

    def restart_miner(self, number: int) -> None:
        """Start a miner again that has ended or was killed: same hotkey, same directory, a new boot."""
        self._reap(f"miner-{number}")
        self._request(f"miner-{number}", "miner", self._miner_settings(number), self.options.before_miners.get(number))

    def kill(self, process: int | str, number: int = signal.SIGKILL) -> None:
        """Send a signal to a miner (by number) or to a process by name; SIGSTOP and SIGCONT reach its whole group."""
        self.parent.kill(process if isinstance(process, str) else f"miner-{process}", number)

    def wait_end(self, process: int | str, deadline: Deadline) -> int:
        """The exit status of a process once it has ended (negative: the signal)."""
        return self.parent.wait_end(process if isinstance(process, str) else f"miner-{process}", deadline)

    # ---- looking

    @property
    def parent(self) -> ForkServer:
        if self._parent is None:
            raise ProcessFailed("the swarm isn't running")
        return self._parent

    @property
    def chain_url(self) -> str:
        return f"http://{HOST}:{self.ports.chain}"

    @property
    def store_url(self) -> str:
        return f"http://{HOST}:{self.ports.store}"

    @property
    def validator_url(self) -> str:
        return f"http://{HOST}:{self._validator_port(self.leader)}"

    @property
    def page_url(self) -> str:
        """What a browser shows of the runs."""
        return f"{self.validator_url}/"

    def owner(self) -> Signer:
        """The subnet owner's hotkey, which submits runs and exports them."""
        return self._keys.signer("owner")

    def remote(self) -> Remote:
        return Remote(self.validator_url, self.owner())

    def miner_hotkey(self, number: int) -> str:
        return self._keys.signer(f"miner-{number}").hotkey

    def log_of(self, process: int | str) -> Path:
        return self.directory / "logs" / f"{process if isinstance(process, str) else f'miner-{process}'}.log"

    def check(self, *, validator: bool = True) -> None:
        """Raise when the chain, the store, the validator or (failing) the submission has ended."""
        names = (self.leader if name == "validator" else name for name in ESSENTIAL)
        self.parent.check(*(name for name in names if validator or name != self.leader))
        submit = self.parent.children.get("submit")
        if submit is not None and submit.status not in (None, 0):
            raise failure_of(submit)

    def submitted(self) -> bool:
        """Whether the last submission is in."""
        self.check()
        submit = self.parent.children.get("submit")
        return submit is not None and submit.status == 0

    def runs(self) -> tuple[RunSummary, ...]:
        return Remote(self.validator_url).runs(Deadline.after(_CALL_S))

    def status(self, steps: int = 20, run: str | None = None) -> RunStatus | None:
        """What the validator says of the run, None while it has none."""
        if run is None and not self.runs():
            return None
        try:
            return Remote(self.validator_url).status(Deadline.after(_CALL_S), run=run, steps=steps)
        except Refused as refused:
            if refused.code != NotFound.code:
                raise
            return None  # queued, not yet active

    def wait_until(
        self,
        predicate: Callable[[RunStatus], bool],
        deadline: Deadline,
        *,
        steps: int = 20,
        poll_s: float = 0.25,
        seen: Callable[[RunStatus], None] = lambda status: None,
    ) -> RunStatus:
        """Poll until ``predicate`` holds; raises at the deadline, or when the swarm can't go on."""
        last: RunStatus | None = None
        while True:
            self.check()
            try:
                status = self.status(steps)
            except Unreachable:
                status = None  # the validator starts again; whether it has ended is checked above
            if status is not None:
                last = status
                seen(status)
                if predicate(status):
                    return status
            deadline.check(f"waiting for the run ({_describe(last)}; logs in {self.directory / 'logs'})")
            time.sleep(min(poll_s, deadline.remaining_s() + 0.001))

    def wait_finished(self, deadline: Deadline) -> str:
        """The run root once the run has finished."""
        status = self.wait_until(lambda status: status.summary.state == "finished", deadline)
        return _root(status)

    def final_root(self) -> str:
        """The finished run's root."""
        status = self.status()
        if status is None or status.summary.state != "finished":
            raise ProcessFailed(f"the run hasn't finished: {_describe(status)}")
        return _root(status)

    def chain_state(self) -> tuple[Metagraph, dict[int, WeightsReceipt]]:
        """The metagraph, and the weights of each permit holder as the chain has them."""
        return metagraph_and_weights("local", self.chain_url, NETUID, deadline=Deadline.after(_CALL_S))

    # ---- how

    @property
    def _validator_names(self) -> tuple[str, ...]:
        return ("validator", *(f"validator-{number + 1}" for number in range(self.options.spare_validators)))

    def _validator_settings(self, name: str, directory: Path | None) -> ValidatorSettings:
        options = self.options
        return ValidatorSettings(
            netuid=NETUID,
            chain_endpoint=self.chain_url,
            wallet_name=name,
            wallet_path=self._keys.path,
            port=self._validator_port(name),
            directory=directory or self.directory / name,
            store_url=self.store_url,
            store_secret=self.directory / "store-secret",
            submitters=(self.owner().hotkey,),
            policy=options.policy,
            private_code=self.directory / CODE_FOLDER if options.private else None,
            audit_memory_bytes=options.audit_memory_bytes,
            audit_disk_bytes=options.audit_disk_bytes,
        )

    def _validator_port(self, name: str) -> int:
        if name == "validator":
            return self.ports.validator
        if name not in self._validator_ports:
            self._validator_ports[name] = SwarmPorts().taken().validator
        return self._validator_ports[name]

    @property
    def _miner_names(self) -> tuple[str, ...]:
        """Miners that are registered from block 0."""
        return tuple(f"miner-{number}" for number in range(self._first_miners + self.options.spare_miners))

    def _miner_settings(self, number: int) -> MinerSettings:
        return MinerSettings(
            netuid=NETUID,
            chain_endpoint=self.chain_url,
            wallet_name=f"miner-{number}",
            wallet_path=self._keys.path,
            validator_url=f"http://{HOST}:{self.ports.validator}",
            more_validator_urls=tuple(f"http://{HOST}:{port}" for port in self._validator_ports.values()),
            directory=self.directory / "miners" / str(number),
            device=self.options.device,
            graph_memory_bytes=self.options.graph_memory_bytes,
            private_code=self.directory / CODE_FOLDER if self.options.private else None,
        )

    def _request_miner(self) -> None:
        number = self.num_miners
        self._request(f"miner-{number}", "miner", self._miner_settings(number), self.options.before_miners.get(number))
        self.num_miners += 1

    def _reap(self, name: str) -> None:
        """Wait until a process that was killed has ended: only then its ports and files are free."""
        if name in self.parent.children:
            self.parent.wait_end(name, Deadline.after(_REAP_S))

    def _request(self, name: str, entry: str, settings: msgspec.Struct, before: Before | None = None) -> None:
        more = {} if before is None else {"before": settings_of(before)}
        self.parent.request(name, entry, {**settings_of(settings), "log_level": self.options.log_level, **more})

    def _wait_port(self, name: str, port: int, deadline: Deadline) -> None:
        while not answers(port):
            self.check()
            deadline.check(f"waiting for the {name} (see {self.log_of(name)})")
            self.parent.poll(_POLL_S)


def _root(status: RunStatus) -> str:
    if not status.summary.root:
        raise ProcessFailed(f"run {status.summary.name} has finished without a root")
    return status.summary.root


def _describe(status: RunStatus | None) -> str:
    if status is None:
        return "nothing submitted yet"
    summary = status.summary
    waits = f", waiting for {summary.waiting_for}" if summary.waiting_for else ""
    return f"{summary.state} at step {summary.step} of {summary.steps}{waits}"
