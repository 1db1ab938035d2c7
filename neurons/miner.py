"""The miner's entry point: the dotted flags every subnet has, onto the miner's settings.

Nothing here imports torch: the miner forks its heartbeat process before any thread exists.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if not __package__:  # run as a script: the repository's root instead of this folder, whose names shadow packages
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

if TYPE_CHECKING:
    from miner.settings import MinerSettings

GIB = 1 << 30


def build_parser() -> argparse.ArgumentParser:
    from miner.settings import MinerSettings
    from subnet.flags import common_parser

    default = MinerSettings()
    parser = common_parser(
        "neurons/miner.py",
        "Serve one pipeline stage of a run, and be paid for verified work. Beside it: "
        "iota miner setup, start, stop, status, remove, estimate (each with --help).",
    )
    network = parser.add_argument_group("validator and peers")
    network.add_argument(
        "--validator.url",
        dest="validator_urls",
        metavar="URL",
        action="extend",
        nargs="+",
        default=[],
        help="base URLs, the first that leads a run is taken; without any, permit holders with a served address are taken "
        "from the chain, most stake first",
    )
    network.add_argument(
        "--validator.hotkey", dest="validator_hotkey", default=None, help="hotkey that must answer there"
    )
    network.add_argument("--peer.host", dest="host", default=default.host, help="address other miners reach us at")
    network.add_argument("--peer.port", dest="port", type=int, default=default.port, help="peer port; 0 = any free one")
    network.add_argument(
        "--peer.listen_host",
        dest="listen_host",
        default=default.listen_host,
        help="address to listen on, where it isn't --peer.host (behind a router: 0.0.0.0)",
    )
    network.add_argument(
        "--peer.announce_port",
        dest="announce_port",
        type=int,
        default=default.announce_port,
        help="port other miners reach us at, where it isn't --peer.port (a forwarded one); 0 = the same",
    )
    network.add_argument(
        "--peer.tls",
        dest="tls",
        choices=["auto", "always", "never"],
        default=default.tls,
        help="encrypt connections with other miners; auto: except on this machine and in trusted networks",
    )
    network.add_argument(
        "--peer.trusted",
        dest="trusted",
        metavar="NETWORK",
        action="extend",
        nargs="+",
        default=[],
        help="private networks in which connections need not be encrypted, such as 10.0.0.0/8",
    )
    own = parser.add_argument_group("this machine")
    own.add_argument(
        "--config",
        metavar="FILE",
        type=Path,
        default=None,
        help="TOML whose keys are these flags (iota miner setup writes one); flags beside it come first",
    )
    own.add_argument("--dir", dest="directory", type=Path, default=default.directory, help="caches of this miner")
    own.add_argument("--device", dest="device", default=default.device, help="auto, cpu, cuda or cuda:N")
    for flag, what in (
        ("graph_memory", "retained autograd graphs; beyond it forwards are recomputed"),
        ("lane_memory", "weights and moments of lanes under way; the others wait"),
        ("boundary_memory", "boundary blobs in memory"),
        ("boundary_disk", "boundary blobs on disk"),
        ("cache_disk", "tokens, snapshots and merged gradients on disk"),
        (
            "witness_memory",
            "the process that does an accused's work again, where this miner is asked to; larger is refused",
        ),
        ("witness_disk", "the evidence of such a case, while it is replayed; 0: this miner is no witness"),
    ):
        gib: float = getattr(default, f"{flag}_bytes") / GIB
        own.add_argument(f"--limit.{flag}_gib", dest=f"{flag}_gib", type=float, default=gib, help=what)
    own.add_argument(
        "--limit.upload",
        dest="upload",
        default=None,
        metavar="RATE",
        help="12.5MB or 100Mbit each second; peers and store",
    )
    own.add_argument("--limit.download", dest="download", default=None, metavar="RATE", help="the same, the other way")
    own.add_argument(
        "--limit.vram",
        dest="vram",
        default=None,
        metavar="SIZE",
        help="6GiB: of the GPU; on the CPU of retained graphs",
    )
    own.add_argument(
        "--page.port",
        dest="page_port",
        type=int,
        default=default.page_port,
        help="port of this miner's page, on this machine alone, such as 8192; 0 = no page",
    )
    own.add_argument(
        "--idle.only", dest="idle_only", action="store_true", help="work only while the machine is otherwise idle"
    )
    own.add_argument(
        "--idle.after",
        dest="idle_after_s",
        type=float,
        default=default.idle.after_s,
        metavar="SECONDS",
        help="with --idle.only: how long it must have been quiet",
    )
    own.add_argument(
        "--idle.load",
        dest="idle_load",
        type=float,
        default=default.idle.load,
        metavar="SHARE",
        help="with --idle.only: of all processors, what others may use before this miner leaves",
    )
    own.add_argument(
        "--allow-code",
        dest="allow_code",
        action="append",
        default=[],
        metavar="FILE@HASH",
        help="a Python file with modules that runs may name; it is run here, so read it first",
    )
    own.add_argument("--exit_when_finished", action="store_true", help="end when the run has finished")
    return parser


def settings_from(flags: argparse.Namespace) -> MinerSettings:
    from miner.idle_rule import IdleRule
    from miner.settings import MinerSettings
    from subnet.net.rate import bytes_per_s, num_bytes

    upload, download, vram = flags.upload, flags.download, flags.vram
    return MinerSettings(
        netuid=flags.netuid,
        chain=flags.network,
        chain_endpoint=flags.chain_endpoint,
        wallet_name=flags.wallet_name,
        wallet_hotkey=flags.wallet_hotkey,
        wallet_path=Path(flags.wallet_path).expanduser(),
        validator_url=flags.validator_urls[0] if flags.validator_urls else None,
        more_validator_urls=tuple(flags.validator_urls[1:]),
        validator_hotkey=flags.validator_hotkey,
        host=flags.host,
        listen_host=flags.listen_host,
        port=flags.port,
        announce_port=flags.announce_port,
        directory=Path(flags.directory).expanduser(),
        device=flags.device,
        graph_memory_bytes=round(flags.graph_memory_gib * GIB),
        lane_memory_bytes=round(flags.lane_memory_gib * GIB),
        boundary_memory_bytes=round(flags.boundary_memory_gib * GIB),
        boundary_disk_bytes=round(flags.boundary_disk_gib * GIB),
        cache_disk_bytes=round(flags.cache_disk_gib * GIB),
        witness_memory_bytes=round(flags.witness_memory_gib * GIB),
        witness_disk_bytes=round(flags.witness_disk_gib * GIB),
        tls=flags.tls,
        trusted=tuple(flags.trusted),
        upload_bytes_per_s=bytes_per_s(upload, "--limit.upload") if upload is not None else None,
        download_bytes_per_s=bytes_per_s(download, "--limit.download") if download is not None else None,
        vram_bytes=num_bytes(vram, "--limit.vram") if vram is not None else None,
        page_port=flags.page_port,
        idle=IdleRule(flags.idle_only, flags.idle_after_s, flags.idle_load),
        allow_code=tuple(flags.allow_code),
        exit_when_finished=flags.exit_when_finished,
    )


def main(argv: Sequence[str] | None = None) -> int:
    from neurons.entry import guarded, start_logging

    def work() -> int:
        from neurons.config_file import parse_with_file

        flags = parse_with_file(build_parser(), sys.argv[1:] if argv is None else argv)
        settings = settings_from(flags)
        start_logging(flags, "miner")
        from iota.doctor.at_start import look_before_start
        from miner.start import start_miner
        from subnet.protocol.signing import load_wallet

        load_wallet(
            settings.wallet_name, settings.wallet_hotkey, settings.wallet_path
        )  # without it nothing is worth saying
        look_before_start(settings.directory)
        return start_miner(settings)

    return guarded(work)


if __name__ == "__main__":
    from subnet.allocator import restart_with_huge_pages

    restart_with_huge_pages()
    sys.exit(main())
