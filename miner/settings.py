"""What an operator sets for a miner; checked when it is made."""

from __future__ import annotations

from pathlib import Path

import msgspec

from miner.idle_rule import IdleRule
from subnet.errors import ConfigError
from subnet.net.tls import Security, TlsMode


class MinerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """``validator_url`` None: permit holders with a served address, from the metagraph, most stake first."""

    netuid: int = 1
    chain: str = "local"
    chain_endpoint: str | None = None
    wallet_name: str = "default"
    wallet_hotkey: str = "default"
    wallet_path: Path = Path("~/.bittensor/wallets")
    validator_url: str | None = None
    more_validator_urls: tuple[str, ...] = ()
    """Asked in this order where the first doesn't lead a run (any more)."""
    validator_hotkey: str | None = None
    """The only hotkey to work for; None: any that holds a permit."""
    host: str = "127.0.0.1"
    """Address other miners reach this one at."""
    listen_host: str = ""
    """Address to listen on for them, where it is another one (behind a router, in a container)."""
    port: int = 0
    """Peer port to listen on; 0 takes any free one."""
    announce_port: int = 0
    """Port other miners reach this one at, where it is another one (a forwarded port); 0: the one it listens on."""
    directory: Path = Path("~/.iota/miner")
    """Caches of this miner: tokens, boundary blobs, snapshots."""
    device: str = "auto"
    """``auto``: CUDA where there is one, else the CPU."""
    graph_memory_bytes: int = 4 << 30
    """Retained autograd graphs; beyond it forwards are recomputed (the same bits, more time)."""
    lane_memory_bytes: int = 8 << 30
    """Weights, moments and gradients of lanes under way (docs/lanes.md); one is worked on in any case."""
    boundary_memory_bytes: int = 512 << 20
    boundary_disk_bytes: int = 32 << 30
    """At most; what a run's audits may want of this miner (`iota plan` prints it) and no more is kept."""
    cache_disk_bytes: int = 8 << 30
    state_every_steps: int = 10
    """After so many steps the stage's state goes to this machine's disk, so that a restart begins there."""
    state_disk_bytes: int = 8 << 30
    """A larger state isn't kept."""
    witness_memory_bytes: int = 8 << 30
    """What the replay of somebody else's case may take in a process of its own; a larger stage is left to other witnesses."""
    witness_disk_bytes: int = 4 << 30
    """What the evidence of a case may take on disk while it is replayed; 0: this miner is no witness."""
    page_port: int = 0
    """Of this miner's page, on this machine alone; 0: no page."""
    disk_reserve_bytes: int = 256 << 20
    """Bytes that caches leave free on the disk."""
    tls: TlsMode = "auto"
    """Connections with other miners are encrypted: ``auto``: except with those on this machine and in ``trusted``."""
    trusted: tuple[str, ...] = ()
    """Private networks (CIDR) in which connections need not be encrypted."""
    upload_bytes_per_s: float | None = None
    """To peers and store together; None: no limit."""
    download_bytes_per_s: float | None = None
    vram_bytes: int | None = None
    """Of the device's memory: what PyTorch may take of a CUDA device, what graphs may take on the CPU; None: no limit."""
    idle: IdleRule = IdleRule()
    """Whether it works only while the machine is otherwise idle, and what that means."""
    allow_code: tuple[str, ...] = ()
    """Files of builders' own modules that runs may name, each as FILE@HASH; nothing else of a builder's is ever run."""
    private_code: Path | None = None
    """Of a private swarm: a folder of such files, named by hash."""
    exit_when_finished: bool = False
    """End the process when the run has finished, instead of waiting for the next one."""

    @property
    def urls(self) -> tuple[str, ...]:
        """Validators to ask, in order; empty: those of the chain."""
        first = (self.validator_url,) if self.validator_url else ()
        return tuple(dict.fromkeys((*first, *self.more_validator_urls)))

    @property
    def graph_budget_bytes(self) -> int:
        """What retained graphs may take."""
        return self.graph_memory_bytes if self.vram_bytes is None else min(self.graph_memory_bytes, self.vram_bytes)

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--peer.port = {self.port} is not allowed", hint="allowed: 0 (any) to 65535")
        if not 0 <= self.page_port <= 65535 or (self.page_port and self.page_port == self.port):
            raise ConfigError(
                f"--page.port = {self.page_port} is not allowed", hint="allowed: 0 (no page) to 65535, not --peer.port"
            )
        if not 0 <= self.announce_port <= 65535:
            raise ConfigError(
                f"--peer.announce_port = {self.announce_port} is not allowed",
                hint="allowed: 0 (the one it listens on) to 65535",
            )
        for name in (
            "graph_memory_bytes",
            "lane_memory_bytes",
            "boundary_memory_bytes",
            "boundary_disk_bytes",
            "cache_disk_bytes",
        ):
            if getattr(self, name) < 1 << 20:
                raise ConfigError(f"{name} = {getattr(self, name)} is not allowed", hint="allowed: 1 MiB or more")
        if min(self.witness_memory_bytes, self.witness_disk_bytes) < 0:
            raise ConfigError("a witness' budget below 0 is not allowed", hint="0: this miner is no witness")
        for flag, limit in (
            ("upload", self.upload_bytes_per_s),
            ("download", self.download_bytes_per_s),
            ("vram", self.vram_bytes),
        ):
            if limit is not None and not limit >= 1000:
                raise ConfigError(
                    f"--limit.{flag} = {limit:g} is not allowed", hint="allowed: 1 kB (each second) or more"
                )
        if self.trusted and self.tls != "auto":
            raise ConfigError(f"--peer.trusted has no effect with --peer.tls {self.tls}", hint="leave one of them out")
        Security(self.tls, self.trusted)  # raises where they can't be used
