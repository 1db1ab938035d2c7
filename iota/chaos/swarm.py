"""A local swarm that can be disrupted: each miner behind proxies of its own where connections are to be disturbed.

Proxied, a miner reaches the validator through one link and announces another as its peer address; everybody reaches the
store through a third. A connection between two miners obeys the links of both, whoever opened it.
"""

from __future__ import annotations

import random
import socket
from pathlib import Path

import msgspec

from iota.chaos.faults import STORE, VALIDATOR, NoEffect
from iota.chaos.proxy import Policy, Proxy
from iota.ports import HOST
from iota.processes import Child, failure_of
from iota.swarm import LocalSwarm, SwarmOptions
from miner.settings import MinerSettings
from subnet.errors import ConfigError
from subnet.run.config import RunConfig

_LOW_PORT, _HIGH_PORT = 18_000, 30_000
"""Below the range from which the kernel takes ports of its own, so that none is taken while its miner is away."""


class ChaosSwarm(LocalSwarm):
    def __init__(
        self,
        directory: Path,
        run: Path | RunConfig | None,
        num_miners: int,
        options: SwarmOptions = SwarmOptions(),
        *,
        proxied: bool = True,
    ) -> None:
        super().__init__(directory, run, num_miners, options)
        self.proxy = Proxy() if proxied else None
        self._listen_ports: dict[int, int] = {}
        self._by_hotkey: dict[bytes, int] = {}

    def start(self) -> None:
        if self.proxy is not None:
            self.proxy.start()
        super().start()

    def stop(self) -> None:
        try:
            super().stop()
        finally:
            if self.proxy is not None:
                self.proxy.close()

    @property
    def store_url(self) -> str:
        if self.proxy is None or not self.ports.store:
            return super().store_url
        if STORE not in self.proxy.links:
            self.proxy.add(STORE, self.ports.store)
        return self.proxy.links[STORE].url

    def _miner_settings(self, number: int) -> MinerSettings:
        settings = super()._miner_settings(number)
        if self.proxy is None:
            return settings
        if number not in self._listen_ports:
            self._add_links(self.proxy, number)
        return msgspec.structs.replace(
            settings,
            validator_url=self.proxy.links[f"miner-{number}/validator"].url,
            port=self._listen_ports[number],
            announce_port=self.proxy.links[f"miner-{number}/peers"].port,
        )

    def _add_links(self, proxy: Proxy, number: int) -> None:
        port = free_low_port(set(self._listen_ports.values()))
        own = self.miner_hotkey(number).encode()

        def opener(first: bytes) -> str | None:
            """The handshake's first frame names the hotkeys of both sides in the clear."""
            for hotkey, other in self._by_hotkey.items():
                if hotkey != own and hotkey in first:
                    return f"miner-{other}/peers"
            return None

        proxy.add(f"miner-{number}/validator", self.ports.validator)
        proxy.add(f"miner-{number}/peers", port, identify=opener)
        self._listen_ports[number] = port
        self._by_hotkey[own] = number


def free_low_port(taken: set[int]) -> int:
    """A port that nobody listens on and that no outgoing connection will get."""
    candidates = list(range(_LOW_PORT, _HIGH_PORT))
    random.shuffle(candidates)
    for port in candidates:
        if port in taken:
            continue
        with socket.socket() as probe:
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
            return port
    raise ConfigError(f"no free port from {_LOW_PORT} to {_HIGH_PORT} on {HOST}")


class OwnGround:
    """Implements :class:`iota.chaos.run.PolledGround` on a swarm of this process."""

    ends_with_run = False
    restarts_itself = False

    def __init__(self, swarm: ChaosSwarm) -> None:
        self._swarm = swarm
        self._expected: set[str] = set()
        self._ended: dict[int, Child] = {}

    def poll(self) -> list[str]:
        """Who has ended unexpectedly since the last call, in its own words. Raises where the swarm can't go on."""
        self._swarm.check(validator=False)
        died: list[str] = []
        for name, child in self._swarm.parent.children.items():
            if child.status is None or id(child) in self._ended or not _may_end(name):
                continue
            self._ended[id(child)] = child
            if name in self._expected:
                self._expected.discard(name)
            elif name == VALIDATOR:
                raise failure_of(child)
            else:
                died.append(str(failure_of(child)))
        return died

    def miners(self) -> tuple[str, ...]:
        names = (f"miner-{number}" for number in range(self._swarm.num_miners))
        return tuple(name for name in names if self.running(name))

    def running(self, name: str) -> bool:
        child = self._swarm.parent.children.get(name)
        return child is not None and child.running

    def pid(self, name: str) -> int | None:
        child = self._swarm.parent.children.get(name)
        return child.pid if child is not None else None

    def hotkey(self, name: str) -> str:
        if name.startswith("miner-"):
            return self._swarm.miner_hotkey(int(name.removeprefix("miner-")))
        return ""

    def signal(self, name: str, number: int, *, group: bool = False) -> int:
        pid = self._swarm.parent.send(name, number, group=group)
        if pid is None:
            raise NoEffect(f"{name} isn't running")
        return pid

    def expect_end(self, name: str) -> None:
        self._expected.add(name)

    def restart(self, name: str) -> None:
        self._expected.discard(name)
        if name == VALIDATOR:
            self._swarm.start_validator()
        else:
            self._swarm.restart_miner(int(name.removeprefix("miner-")))

    def add_miner(self) -> str:
        return f"miner-{self._swarm.add_miner()}"

    def set_link(self, name: str, policy: Policy) -> None:
        self._proxy.set(name, policy)

    def num_flipped(self, name: str) -> int:
        return self._proxy.links[name].num_flipped

    @property
    def _proxy(self) -> Proxy:
        if self._swarm.proxy is None:
            raise ConfigError("this swarm isn't behind proxies", hint="ChaosSwarm(..., proxied=True)")
        return self._swarm.proxy


def _may_end(name: str) -> bool:
    return name == VALIDATOR or name.startswith("miner-")
