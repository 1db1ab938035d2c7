"""One cell of the butterfly benchmark: forks its miners from this warm process, lets them start together, and prints rounds.

    python -m benchmarks.butterfly_cell '{"size_mib": 64, "microbatches": 16, "miners": 4, "kind": "straight", "rounds": 5}'

Threads of BLAS and OpenMP are set by who starts it. A store, where there is one, is a process of its own.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import secrets
import shutil
import socket
import sys
import tempfile
import time
from collections import defaultdict
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import torch
import torch.distributed as distributed

from benchmarks.butterfly_frames import Cell, Measured
from benchmarks.butterfly_peer import Peer
from subnet.allocator import bound_heap
from subnet.protocol.signing import Signer
from subnet.store.server import run_store

WARMUP = 1
READY_S = 300.0
STORE_BUDGET = 64 << 30


class Ours:
    """A child's side of our own cells: an event loop that is told when to begin."""

    def __init__(self, cell: Cell, rank: int) -> None:
        self._cell, self._rank = cell, rank

    def run(self, pipe: Connection) -> None:
        bound_heap()
        asyncio.run(self._serve(pipe))

    async def _serve(self, pipe: Connection) -> None:
        signers = [Signer.from_uri(f"//Butterfly{i}") for i in range(self._cell.miners)]
        peer = Peer(self._cell, self._rank, signers)
        try:
            pipe.send(await peer.start())
            peer.meet(await asyncio.to_thread(pipe.recv))
            while (number := await asyncio.to_thread(pipe.recv)) is not None:
                peer.prepare(number)
                pipe.send("ready")
                await asyncio.to_thread(pipe.recv)
                pipe.send(await peer.work())
        finally:
            await peer.close()


class Gloo:
    """A child's side of the yardstick: the same bytes, summed by ``torch.distributed``."""

    def __init__(self, cell: Cell, rank: int, rendezvous: Path) -> None:
        self._cell, self._rank, self._rendezvous = cell, rank, rendezvous

    def run(self, pipe: Connection) -> None:
        pipe.send(0)
        pipe.recv()
        torch.set_num_threads(1)
        world = self._cell.miners
        distributed.init_process_group(
            "gloo", init_method=f"file://{self._rendezvous}", rank=self._rank, world_size=world
        )
        size_bytes = 4 * self._cell.num_elements
        values = torch.empty(self._cell.num_elements)
        while pipe.recv() is not None:
            values.fill_(1.0 + self._rank)
            pipe.send("ready")
            pipe.recv()
            began = time.process_time()
            distributed.all_reduce(values)
            ended, spent = time.perf_counter(), time.process_time() - began
            if values[0].item() != world * (world + 1) / 2:
                raise RuntimeError("gloo's sum is wrong")
            moved = 2 * (world - 1) * size_bytes // world
            pipe.send(Measured(ended, moved, moved, {"all_reduce": spent}))
        distributed.destroy_process_group()


def run_cell(cell: Cell) -> dict[str, Any]:
    """Seconds of each round, bytes and CPU seconds of a miner, in the middle."""
    context = multiprocessing.get_context("fork")
    folder = Path(tempfile.mkdtemp(prefix="butterfly-"))
    store: ForkProcess | None = None
    children: list[tuple[ForkProcess, Connection]] = []
    try:
        if cell.kind == "store":
            cell, store = _with_store(context, cell, folder)
        for rank in range(cell.miners):
            ours, theirs = context.Pipe()
            side = Gloo(cell, rank, folder / "rendezvous") if cell.kind == "gloo" else Ours(cell, rank)
            child = context.Process(target=side.run, args=(theirs,), name=f"miner {rank}", daemon=True)
            child.start()
            theirs.close()
            children.append((child, ours))
        return _rounds(cell, [pipe for _, pipe in children])
    finally:
        for child, pipe in children:
            pipe.close()
            child.kill()
            child.join()
        if store is not None:
            store.kill()
            store.join()
        shutil.rmtree(folder, ignore_errors=True)


def _with_store(context: Any, cell: Cell, folder: Path) -> tuple[Cell, ForkProcess]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    secret = secrets.token_bytes(32)

    def serve() -> None:
        asyncio.run(run_store(folder / "store", "127.0.0.1", port, secret, STORE_BUDGET))

    process = context.Process(target=serve, name="store", daemon=True)
    process.start()
    until = time.monotonic() + 30
    while time.monotonic() < until:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.02)
    url = f"http://127.0.0.1:{port}"
    return msgspec.structs.replace(cell, store_url=url, store_secret=secret.hex()), process


def _receive(pipe: Connection) -> Any:
    if not pipe.poll(READY_S):
        raise RuntimeError("a miner was not ready in time")
    return pipe.recv()


def _rounds(cell: Cell, pipes: list[Connection]) -> dict[str, Any]:
    ports = [_receive(pipe) for pipe in pipes]
    for pipe in pipes:
        pipe.send(ports)
    seconds: list[float] = []
    measured: list[Measured] = []
    for number in range(cell.rounds + WARMUP):
        for pipe in pipes:
            pipe.send(number)
        for pipe in pipes:
            _receive(pipe)
        began = time.perf_counter()
        for pipe in pipes:
            pipe.send("go")
        found: list[Measured] = [_receive(pipe) for pipe in pipes]
        if number >= WARMUP:
            seconds.append(max(one.ended_s for one in found) - began)
            measured += found
    for pipe in pipes:
        pipe.send(None)
    split: defaultdict[str, float] = defaultdict(float)
    for one in measured:
        for kind, spent in one.split_s.items():
            split[kind] += spent / len(measured)
    return {
        "seconds": median(seconds),
        "rounds": [round(one, 4) for one in seconds],
        "bytes_up": sum(one.bytes_up for one in measured) / len(measured),
        "bytes_down": sum(one.bytes_down for one in measured) / len(measured),
        "bytes_up_per_parameter": sum(one.bytes_up for one in measured) / len(measured) / cell.num_elements,
        "cpu_s": {kind: round(spent, 4) for kind, spent in sorted(split.items())},
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(run_cell(msgspec.json.decode(sys.argv[1], type=Cell))))
