"""The miner process from its settings: wallet, heartbeat process, then (torch imported) the node. Returns the exit status.

The heartbeat is forked before any thread, event loop or torch import exists in this process.
"""

from __future__ import annotations

from miner.claim import claimed
from miner.heartbeat import start_heartbeat
from miner.idle import name_process
from miner.settings import MinerSettings
from subnet.allocator import bound_heap
from subnet.model.own_code import allow
from subnet.protocol.signing import load_wallet
from subnet.timing import check_nesting


def start_miner(settings: MinerSettings) -> int:
    check_nesting()
    allow(settings.allow_code, settings.private_code)
    bound_heap(computes=True)
    signer = load_wallet(settings.wallet_name, settings.wallet_hotkey, settings.wallet_path.expanduser())
    heartbeat = start_heartbeat(signer)
    name_process()
    try:
        with claimed(settings.directory.expanduser()):
            from miner.node import run_miner

            return run_miner(settings, signer, heartbeat)
    finally:
        heartbeat.stop()
