"""hivemind's averager on the butterfly benchmark's sizes: run by the interpreter of an environment that has hivemind.

    PYTHON butterfly_hivemind.py SIZE_MIB MINERS ROUNDS

Prints one JSON line. Nothing of this repository is imported. Every miner is a process with a DHT node and an averager of its
own; a round is one ``step()`` of all, from the moment they are let go to the last one's end. What crosses the loopback device
meanwhile is counted as a whole: on a machine that is busy otherwise it says too much.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

READY_S = 300.0
ROUND_S = 120.0
MATCHMAKING_S = 1.0
WARMUP = 1


def loopback_bytes() -> int:
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[0])
    return 0


def miner(pipe: Connection, rank: int, size_mib: int, miners: int) -> None:
    import hivemind
    import torch
    from hivemind.averaging import DecentralizedAverager

    torch.set_num_threads(1)
    peers = pipe.recv()
    dht = hivemind.DHT(initial_peers=peers, host_maddrs=["/ip4/127.0.0.1/tcp/0"], start=True)
    pipe.send([str(address) for address in dht.get_visible_maddrs()])
    averager = DecentralizedAverager(
        averaged_tensors=[torch.full((size_mib << 18,), float(rank))],
        dht=dht,
        prefix="butterfly",
        target_group_size=miners,
        min_group_size=miners,
        min_matchmaking_time=MATCHMAKING_S,
        start=True,
    )
    pipe.recv()
    while (number := pipe.recv()) is not None:
        with averager.get_tensors() as tensors:
            tensors[0].fill_(float(rank + number))
        pipe.send("ready")
        pipe.recv()
        done = averager.step(timeout=ROUND_S)
        ended = time.perf_counter()
        with averager.get_tensors() as tensors:
            mean = float(tensors[0][0])
        right = done is not None and abs(mean - ((miners - 1) / 2 + number)) < 1e-3
        pipe.send((ended, right))
    averager.shutdown()
    dht.shutdown()


def receive(pipe: Connection) -> Any:
    if not pipe.poll(READY_S):
        raise RuntimeError("a miner was not ready in time")
    return pipe.recv()


def run(size_mib: int, miners: int, rounds: int) -> dict[str, Any]:
    context = multiprocessing.get_context("fork")
    pipes: list[Connection] = []
    children: list[Any] = []
    addresses: list[str] = []
    seconds: list[float] = []
    moved: list[float] = []
    try:
        for rank in range(miners):
            ours, theirs = context.Pipe()
            child = context.Process(target=miner, args=(theirs, rank, size_mib, miners))
            child.start()
            theirs.close()
            children.append(child)
            pipes.append(ours)
            ours.send(addresses)
            addresses += receive(ours)
        for pipe in pipes:
            pipe.send("begin")
        failed = 0
        number = 0
        while len(seconds) < rounds + WARMUP and failed < rounds:
            for pipe in pipes:
                pipe.send(number)
            for pipe in pipes:
                receive(pipe)
            before, began = loopback_bytes(), time.perf_counter()
            for pipe in pipes:
                pipe.send("go")
            found = [receive(pipe) for pipe in pipes]
            number += 1
            if not all(right for _, right in found):
                failed += 1
                continue
            seconds.append(max(ended for ended, _ in found) - began)
            moved.append((loopback_bytes() - before) / miners)
        for pipe in pipes:
            pipe.send(None)
        for child in children:
            child.join(10)
    finally:
        for child in children:
            child.kill()
    seconds, moved = seconds[WARMUP:], moved[WARMUP:]
    if len(seconds) < rounds:
        raise RuntimeError(f"{failed} of {number} rounds of hivemind didn't come to the mean of all")
    return {
        "seconds": median(seconds),
        "rounds": [round(one, 4) for one in seconds],
        "failed_rounds": failed,
        "loopback_bytes": median(moved),
        "version": version("hivemind"),
    }


if __name__ == "__main__":
    print(json.dumps(run(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
