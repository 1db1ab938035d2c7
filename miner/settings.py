"""What an operator sets for a miner; checked when it is made."""

from __future__ import annotations

from pathlib import Path

import msgspec

from subnet.errors import ConfigError


class MinerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """``validator_url`` None: the permit holder with most stake and a served address, from the metagraph."""

    netuid: int = 1
    chain: str = "local"
    chain_endpoint: str | None = None
    wallet_name: str = "default"
    wallet_hotkey: str = "default"
    wallet_path: Path = Path("~/.bittensor/wallets")
    validator_url: str | None = None
    validator_hotkey: str | None = None
    host: str = "127.0.0.1"
    """Address other miners reach this one at."""
    port: int = 0
    """Peer port; 0 takes any free one and announces it."""
    directory: Path = Path("~/.iota/miner")
    """Caches of this miner: tokens, boundary blobs, snapshots."""
    device: str = "auto"
    """``auto``: CUDA where there is one, else the CPU."""
    graph_memory_bytes: int = 4 << 30
    """Retained autograd graphs; beyond it forwards are recomputed (the same bits, more time)."""
    boundary_memory_bytes: int = 512 << 20
    boundary_disk_bytes: int = 4 << 30
    cache_disk_bytes: int = 8 << 30
    exit_when_finished: bool = False
    """End the process when the run has finished, instead of waiting for the next one."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--peer.port = {self.port} is not allowed", hint="allowed: 0 (any) to 65535")
        for name in ("graph_memory_bytes", "boundary_memory_bytes", "boundary_disk_bytes", "cache_disk_bytes"):
            if getattr(self, name) < 1 << 20:
                raise ConfigError(f"{name} = {getattr(self, name)} is not allowed", hint="allowed: 1 MiB or more")
