"""The validator's entry point: the dotted flags every subnet has, onto the validator's settings."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if not __package__:  # run as a script: the repository's root instead of this folder, whose names shadow packages
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

if TYPE_CHECKING:
    from validator.settings import ValidatorSettings


def build_parser() -> argparse.ArgumentParser:
    from subnet.flags import common_parser
    from validator.settings import ValidatorSettings

    default = ValidatorSettings()
    parser = common_parser("neurons/validator.py", "Orchestrate runs: stages, leases, merges, scores and weights.")
    axon = parser.add_argument_group("axon")
    axon.add_argument("--axon.ip", dest="host", default=default.host, help="address to listen on and to announce")
    axon.add_argument("--axon.port", dest="port", type=int, default=default.port, help="port to listen on")
    own = parser.add_argument_group("this validator")
    own.add_argument("--dir", dest="directory", type=Path, default=default.directory, help="journals and run files")
    own.add_argument(
        "--journal",
        dest="journal_url",
        default="",
        metavar="URL",
        help="postgresql://USER@HOST/DATABASE: keep journals there; without it a file in each run's directory "
        "(docs/operations.md; the password from ~/.pgpass or PGPASSFILE)",
    )
    own.add_argument(
        "--store.url",
        dest="store_url",
        default=None,
        help=f"object store: of iota store serve, or s3://BUCKET[/PREFIX]; without it {default.store_url}",
    )
    own.add_argument(
        "--store.endpoint", dest="store_endpoint", default="", metavar="URL", help="of an S3 server; without it AWS's"
    )
    own.add_argument("--store.region", dest="store_region", default="", help="of the bucket")
    own.add_argument(
        "--store.credentials",
        dest="store_credentials",
        type=Path,
        default=None,
        metavar="FILE",
        help="for S3, in the form of ~/.aws/credentials, readable by its owner only; "
        "without it AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or wherever AWS's tools look",
    )
    own.add_argument(
        "--store.secret", dest="store_secret", type=Path, default=default.store_secret, help="file shared with it"
    )
    own.add_argument(
        "--lead-from",
        dest="lead_from",
        default=None,
        metavar="URL",
        help="for one start: go on with the unfinished runs of this store, whose validator is gone with its disk; "
        "implies --store.url",
    )
    own.add_argument(
        "--lead-run",
        dest="lead_runs",
        action="append",
        default=[],
        metavar="NAME",
        help="with --lead-from: only the run of this name or id (may be repeated)",
    )
    own.add_argument(
        "--follow",
        dest="follow",
        default=None,
        metavar="URL",
        help="lead nothing: follow the runs whose journals are in this store, check and audit them, set own weights; "
        "implies --store.url",
    )
    own.add_argument(
        "--follow.run",
        dest="follow_runs",
        action="append",
        default=[],
        metavar="NAME",
        help="with --follow: only the run of this name or id (may be repeated)",
    )
    own.add_argument("--ops.ip", dest="ops_host", default=default.ops_host, help="address of health and metrics")
    own.add_argument(
        "--ops.port",
        dest="ops_port",
        type=int,
        default=default.ops_port,
        help="serve /healthz, /readyz and /metrics (Prometheus) there; without it nowhere",
    )
    own.add_argument(
        "--alert.webhooks",
        dest="alert_webhooks",
        type=Path,
        default=None,
        metavar="FILE",
        help="post alerts (stall, low disk, weights not set, chain away, ...) to the URLs in this file, one a line",
    )
    own.add_argument(
        "--policy",
        dest="policy",
        type=Path,
        default=None,
        metavar="FILE",
        help="policy.toml to begin with, at the first start: scores, audits, weights, admission (docs/policy.md); "
        "later iota policy apply changes it",
    )
    own.add_argument(
        "--audit.memory",
        dest="audit_memory",
        default=None,
        metavar="SIZE",
        help="4GiB: of the audit worker, for states of stages and the work on one; "
        f"without it {default.audit_memory_bytes >> 30}GiB",
    )
    own.add_argument(
        "--audit.disk",
        dest="audit_disk",
        default=None,
        metavar="SIZE",
        help=f"blobs and bundles of a run's audits on this disk; without it {default.audit_disk_bytes >> 30}GiB",
    )
    own.add_argument(
        "--audit.keep_cases",
        dest="audit_keep_cases",
        type=float,
        default=default.audit_keep_cases_s / 86400,
        metavar="DAYS",
        help="after a run's end its cases can be fetched and run again for so long",
    )
    own.add_argument("--submitters", nargs="*", default=[], metavar="HOTKEY", help="hotkeys that may submit runs")
    own.add_argument(
        "--allow-code",
        dest="allow_code",
        action="append",
        default=[],
        metavar="FILE@HASH",
        help="a Python file with modules that runs may name; it is run here, so read it first",
    )
    own.add_argument("--weights.off", dest="weights_off", action="store_true", help="never set weights on the chain")
    return parser


def settings_from(flags: argparse.Namespace) -> ValidatorSettings:
    from subnet.errors import ConfigError
    from subnet.net.rate import num_bytes
    from subnet.policy.text import load_policy
    from validator.settings import ValidatorSettings

    default = ValidatorSettings()
    memory, disk = flags.audit_memory, flags.audit_disk
    for flag, url in (("--lead-from", flags.lead_from), ("--follow", flags.follow)):
        if url and flags.store_url and url.rstrip("/") != flags.store_url.rstrip("/"):
            raise ConfigError(
                f"{flag} {url} and --store.url {flags.store_url} differ",
                hint=f"a run is in the store that it goes on in: give {flag} alone",
            )
    return ValidatorSettings(
        netuid=flags.netuid,
        chain=flags.network,
        chain_endpoint=flags.chain_endpoint,
        wallet_name=flags.wallet_name,
        wallet_hotkey=flags.wallet_hotkey,
        wallet_path=Path(flags.wallet_path).expanduser(),
        host=flags.host,
        port=flags.port,
        directory=Path(flags.directory).expanduser(),
        journal_url=flags.journal_url,
        store_url=flags.lead_from or flags.follow or flags.store_url or ValidatorSettings().store_url,
        lead_from=flags.lead_from is not None,
        lead_runs=tuple(flags.lead_runs),
        follow=flags.follow is not None,
        follow_runs=tuple(flags.follow_runs),
        store_endpoint=flags.store_endpoint,
        store_region=flags.store_region,
        store_credentials=flags.store_credentials,
        store_secret=Path(flags.store_secret).expanduser(),
        submitters=tuple(flags.submitters),
        allow_code=tuple(flags.allow_code),
        set_weights=not flags.weights_off,
        policy=load_policy(flags.policy) if flags.policy is not None else None,
        ops_host=flags.ops_host,
        ops_port=flags.ops_port,
        alert_webhooks=flags.alert_webhooks,
        audit_memory_bytes=num_bytes(memory, "--audit.memory") if memory is not None else default.audit_memory_bytes,
        audit_keep_cases_s=86400 * flags.audit_keep_cases,
        audit_disk_bytes=num_bytes(disk, "--audit.disk") if disk is not None else default.audit_disk_bytes,
    )


def main(argv: Sequence[str] | None = None) -> int:
    from neurons.entry import guarded, start_logging

    def work() -> int:
        flags = build_parser().parse_args(argv)
        settings = settings_from(flags)
        start_logging(flags, "validator")
        from validator.serve import run_validator

        return run_validator(settings)

    return guarded(work)


if __name__ == "__main__":
    sys.exit(main())
