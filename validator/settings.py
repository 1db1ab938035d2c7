"""What an operator sets for a validator; checked when it is made."""

from __future__ import annotations

from pathlib import Path

import msgspec

from subnet.errors import ConfigError
from subnet.policy.policy import SubnetPolicy
from validator.journals import Journals


class ValidatorSettings(msgspec.Struct, frozen=True, kw_only=True):
    netuid: int = 1
    chain: str = "local"
    chain_endpoint: str | None = None
    wallet_name: str = "default"
    wallet_hotkey: str = "default"
    wallet_path: Path = Path("~/.bittensor/wallets")
    host: str = "127.0.0.1"
    """Address to listen on and to announce on the chain."""
    port: int = 8091
    directory: Path = Path("~/.iota/validator")
    """Journals and run files."""
    journal_url: str = ""
    """``postgresql://USER@HOST/DATABASE``: journals lie there, not in the directory."""
    store_url: str = "http://127.0.0.1:9945"
    """Of ``iota store serve``, or ``s3://BUCKET[/PREFIX]``: one prefix for one validator."""
    store_endpoint: str = ""
    """Of an S3 server; empty: AWS's."""
    store_region: str = ""
    store_credentials: Path | None = None
    """File like ``~/.aws/credentials`` that only its owner can read; None: the environment, or wherever AWS's tools look."""
    store_secret: Path = Path("~/.iota/store/secret")
    """File with the secret shared with the store; presigned URLs are signed with it."""
    lead_from: bool = False
    """Take over the unfinished runs of the log store at ``store_url`` before serving: their validator is gone."""
    lead_runs: tuple[str, ...] = ()
    """Names or ids of the runs to take over; empty: all of them."""
    follow: bool = False
    """Lead nothing: follow the runs in the log store at ``store_url``, check, audit and score them, and set weights."""
    follow_runs: tuple[str, ...] = ()
    """Names or ids of the runs to follow; empty: all of them."""
    submitters: tuple[str, ...] = ()
    """Hotkeys (ss58) that may submit runs; the validator's own always may."""
    allow_code: tuple[str, ...] = ()
    """Files of builders' own modules that runs may name, each as FILE@HASH; nothing else of a builder's is ever run."""
    private_code: Path | None = None
    """Of a private swarm: a folder of such files, named by hash."""
    set_weights: bool = True
    policy: SubnetPolicy | None = None
    """What the validator begins with at its first start; ``iota policy apply`` changes it. None: the default, or what there is."""

    ops_host: str = "127.0.0.1"
    ops_port: int = 0
    """Where health and metrics are served, unsigned; 0: nowhere."""
    alert_webhooks: Path | None = None
    """File with the addresses that alerts are posted to."""
    audit_memory_bytes: int = 4 << 30
    """Of stages' states that the audit worker keeps from one audit to the next."""
    audit_disk_bytes: int = 16 << 30
    """Of a run's audits: blobs that bundles share, and the bundles in work."""
    audit_keep_cases_s: float = 90 * 86400.0
    """Since a run's end: until then its cases can be fetched and run again."""

    def __post_init__(self) -> None:
        Journals(self.journal_url)
        if min(self.audit_memory_bytes, self.audit_disk_bytes) <= 0:
            raise ConfigError("--audit.memory and --audit.disk must be above 0", hint="such as 4GiB")
        if not 0 <= self.audit_keep_cases_s <= 1e9:
            raise ConfigError("--audit.keep_cases is not allowed", hint="allowed: 0 to 10000 days")
        if not 0 < self.port <= 65535:
            raise ConfigError(f"--axon.port = {self.port} is not allowed", hint="allowed: 1 to 65535")
        if not 0 <= self.ops_port <= 65535 or self.ops_port == self.port:
            raise ConfigError(
                f"--ops.port = {self.ops_port} is not allowed", hint="0 (off) to 65535, and not the one of --axon.port"
            )
        for flag, value in (
            ("--store.endpoint", self.store_endpoint),
            ("--store.region", self.store_region),
            ("--store.credentials", self.store_credentials),
        ):
            if value and not self.store_url.startswith("s3://"):
                raise ConfigError(f"{flag} has no effect with --store.url {self.store_url}", hint="s3://BUCKET/PREFIX")
        if self.lead_runs and not self.lead_from:
            raise ConfigError("--lead-run has no effect without --lead-from", hint="add --lead-from URL of the store")
        if self.follow_runs and not self.follow:
            raise ConfigError("--follow.run has no effect without --follow", hint="add --follow URL of the store")
        if self.follow and self.lead_from:
            raise ConfigError("--follow and --lead-from exclude each other", hint="who follows leads nothing")
