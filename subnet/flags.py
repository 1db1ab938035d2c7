"""The one reader of command lines: dotted flags as every subnet has them, mapped onto plain namespaces.

``neurons/`` and ``iota miner`` / ``iota validator`` parse with these parsers; the typed settings they fill live next to the
classes they configure.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NoReturn

from subnet.errors import ConfigError

DEFAULT_WALLET_PATH = "~/.bittensor/wallets"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, hint=f"see {self.prog} --help")


def common_parser(prog: str, description: str) -> argparse.ArgumentParser:
    """``--netuid``, ``--subtensor.*``, ``--wallet.*``, ``--logging.*``."""
    parser = _Parser(prog=prog, description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--netuid", type=int, default=1, help="subnet number")
    chain = parser.add_argument_group("subtensor")
    chain.add_argument(
        "--subtensor.network", dest="network", default="local", help="chain: local, or a URL of a local chain"
    )
    chain.add_argument(
        "--subtensor.chain_endpoint", dest="chain_endpoint", default=None, help="endpoint, overrides the network"
    )
    wallet = parser.add_argument_group("wallet")
    wallet.add_argument("--wallet.name", dest="wallet_name", default="default", help="name of the coldkey's wallet")
    wallet.add_argument("--wallet.hotkey", dest="wallet_hotkey", default="default", help="name of the hotkey")
    wallet.add_argument("--wallet.path", dest="wallet_path", default=DEFAULT_WALLET_PATH, help="where wallets lie")
    logs = parser.add_argument_group("logging")
    logs.add_argument("--logging.debug", dest="log_debug", action="store_true", help="log decisions and their reasons")
    logs.add_argument("--logging.trace", dest="log_trace", action="store_true", help="log every message")
    logs.add_argument("--logging.info", dest="log_info", action="store_true", help="the default level")
    logs.add_argument("--logging.record_log", dest="log_record", action="store_true", help="also write a log file")
    logs.add_argument(
        "--logging.logging_dir", dest="log_dir", default="~/.bittensor/iota", help="where the log file goes"
    )
    return parser


def log_level(flags: argparse.Namespace) -> str:
    if flags.log_trace:
        return "TRACE"
    return "DEBUG" if flags.log_debug else "INFO"


def log_file(flags: argparse.Namespace, role: str) -> Path | None:
    return Path(flags.log_dir).expanduser() / f"{role}.log" if flags.log_record else None
