"""A validator left alone for 200 tempos of a local chain that often fails it: its weights are set, or it is said why not.

Three processes: ``iota chain serve`` with fast blocks; the chain side of a validator (:class:`validator.chain_side.ChainSide`,
as in ``neurons/validator.py``); and this one, which stands between the two as a proxy and breaks things by chance, from a
seed: connections reset before or after the chain was asked, answers held back or cut to garbage, internal errors, refusals by
the runtime's names. What the chain holds is read past the proxy. Asserted at the end:

- each tempo ends with weights that are no older than a tempo and 3 blocks, or with the logged reason of a try
  that had begun by its end (a few may end with a try under way, since a tempo is short here);
- no hot loop: about one try a tempo at most, and a bounded number of requests;
- memory and descriptors of the validator's process stay flat after the first third.

    python -m benchmarks.tempos                        # 200 tempos of 1.5 s
    python -m benchmarks.tempos --tempos 400 --block 0.1
    python -m benchmarks.tempos --quick                # 12 tempos

The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.tempos_link import BadLink
from iota.ports import HOST, SwarmPorts
from subnet.chain.local_client import LocalChain
from subnet.errors import Unreachable
from subnet.protocol.signing import Signer
from subnet.timing import Deadline

TEMPO_BLOCKS = 10
OWNER, VALIDATOR, *MINERS = (Signer.from_uri(f"//{name}") for name in ("Own", "Val", "Min", "Other"))
SLACK_BLOCKS = 3
"""Tries fall due once a tempo; how long one takes differs by so much."""
GROWTH_MIB, NEW_DESCRIPTORS = 8.0, 4


class Line(msgspec.Struct, frozen=True):
    """What the validator's process prints of each try."""

    begun_s: float
    wall_s: float
    """When it ended."""
    status: str
    code: str
    reason: str


# ---- the validator's process


def run_validator(url: str) -> None:
    """Until it is told to end; a line of JSON for each try on standard output, its log on standard error."""
    from subnet.logs import setup
    from validator.chain_side import ChainSide
    from validator.scoring import Score
    from validator.settings import ValidatorSettings
    from validator.weights import WeightsReport

    setup(sys.stderr, "INFO")

    class Side(ChainSide):
        begun_s = 0.0

        def time_tries(self) -> None:
            attempt = self._setter.attempt

            async def timed() -> WeightsReport:
                self.begun_s = time.time()
                return await attempt()

            self._setter.attempt = timed

        def _note_weights(self, report: WeightsReport) -> None:
            super()._note_weights(report)
            line = Line(self.begun_s, time.time(), report.status, report.code, report.reason)
            sys.stdout.write(msgspec.json.encode(line).decode() + "\n")
            sys.stdout.flush()

    def scores() -> dict[str, Score]:
        return {
            miner.hotkey: Score(
                hotkey=miner.hotkey,
                registered_at_block=0,
                total=total,
                work=total,
                sealed_work=total,
                last_sealed_s=0.0,
            )
            for miner, total in zip(MINERS, (0.25, 0.75), strict=True)
        }

    async def work() -> None:
        chain = LocalChain(url, VALIDATOR)
        side = Side(ValidatorSettings(chain_endpoint=url), VALIDATOR, chain, scores)
        side.time_tries()
        async with asyncio.TaskGroup() as group:
            group.create_task(side.watch())
            group.create_task(side.set_weights())

    asyncio.run(work())


# ---- measuring


class Seen(msgspec.Struct):
    """What was seen from outside, once a block or so."""

    set_blocks: list[int] = []
    """Blocks in which the chain took weights."""
    genesis_s: float = float("inf")
    """When block 0 began, by the wall: the earliest that any answer allows."""
    memory_mib: list[float] = []
    descriptors: list[int] = []


def of_process(pid: int) -> tuple[float, int]:
    """(resident MiB, open descriptors)."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20, sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def genesis_text(block_s: float) -> str:
    neurons = "".join(
        f'[[subnets.neurons]]\nhotkey = "{signer.hotkey}"\ncoldkey = "{signer.hotkey}"\nstake = {stake}\n'
        for signer, stake in ((OWNER, 0.0), (VALIDATOR, 1000.0), *((miner, 0.0) for miner in MINERS))
    )
    return (
        f"block_time_s = {block_s}\n[[subnets]]\ntempo = {TEMPO_BLOCKS - 1}\nweights_rate_limit = {TEMPO_BLOCKS // 2}\n"
        f'owner_hotkey = "{OWNER.hotkey}"\nowner_coldkey = "{OWNER.hotkey}"\n{neurons}'
    )


def _spawn(arguments: list[str], out: Path, err: Path) -> subprocess.Popen[bytes]:
    with out.open("wb") as stdout, err.open("wb") as stderr:
        return subprocess.Popen([sys.executable, *arguments], stdout=stdout, stderr=stderr)


async def _answers(chain: LocalChain, deadline: Deadline) -> None:
    while True:
        try:
            await chain.info(timeout_s=1.0)
            return
        except Unreachable:
            deadline.check("waiting for the chain")
            await asyncio.sleep(0.05)


async def _look(chain: LocalChain, pid: int, block_s: float, until: int, seen: Seen) -> None:
    """Read the chain past the proxy, more often than weights can be set, up to a block."""
    sampled = 0
    while True:
        graph = await chain.metagraph(1)
        seen.genesis_s = min(seen.genesis_s, time.time() - graph.block * block_s)
        neuron = graph.neuron(VALIDATOR.hotkey)
        assert neuron is not None
        stored = await chain.weights(1, neuron.uid)
        if stored is not None and stored.block not in seen.set_blocks[-1:]:
            seen.set_blocks.append(stored.block)
        if graph.block // TEMPO_BLOCKS > sampled:
            sampled = graph.block // TEMPO_BLOCKS
            memory, descriptors = of_process(pid)
            seen.memory_mib.append(memory)
            seen.descriptors.append(descriptors)
        if graph.block >= until:
            return
        await asyncio.sleep(2 * block_s)


async def measure(tempos: int, block_s: float, seed: int, directory: Path) -> dict[str, Any]:
    ports = SwarmPorts().taken()
    genesis = directory / "genesis.toml"
    genesis.write_text(genesis_text(block_s), encoding="utf-8")
    chain_url = f"http://{HOST}:{ports.chain}"
    serve = ["-m", "iota.cli.main", "chain", "serve", "--dir", str(directory / "chain"), "--port", str(ports.chain)]
    log, lines = directory / "validator.log", directory / "tries.ndjson"
    running: list[subprocess.Popen[bytes]] = []
    chain, link, seen = LocalChain(chain_url), BadLink(chain_url, seed), Seen()
    try:
        running.append(_spawn([*serve, "--genesis", str(genesis)], directory / "chain.out", directory / "chain.log"))
        await _answers(chain, Deadline.after(60))
        await link.start(ports.validator)
        running.append(_spawn(["-m", "benchmarks.tempos", "--validator", link.url], lines, log))
        pid = running[-1].pid
        while not lines.read_bytes():
            assert running[-1].poll() is None, log.read_text()
            await asyncio.sleep(0.1)
        first, began, cpu_before_s = await chain.block(), time.time(), cpu_s(pid)
        last = (first // TEMPO_BLOCKS + 1 + tempos) * TEMPO_BLOCKS
        await _look(chain, pid, block_s, last, seen)
        assert running[-1].poll() is None, log.read_text()
        used_s, took_s = cpu_s(pid) - cpu_before_s, time.time() - began
    finally:
        for process in reversed(running):
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()
        await link.close()
        await chain.close()
    tries = [msgspec.json.decode(line, type=Line) for line in lines.read_bytes().splitlines()]
    span = range(first // TEMPO_BLOCKS + 1, last // TEMPO_BLOCKS)
    ends = {tempo: seen.genesis_s + (tempo + 1) * TEMPO_BLOCKS * block_s for tempo in span}
    return judged(tries, ends, seen, link, log.read_text(), took_s, used_s, block_s)


def judged(
    tries: list[Line],
    ends_s: dict[int, float],
    seen: Seen,
    link: BadLink,
    log: str,
    took_s: float,
    used_s: float,
    block_s: float,
) -> dict[str, Any]:
    """``ends_s``: when each tempo ended, by the wall."""
    unset = [tempo for tempo in ends_s if not _fresh(seen.set_blocks, (tempo + 1) * TEMPO_BLOCKS)]
    silent = [tempo for tempo in unset if not _explained(tries, ends_s[tempo], TEMPO_BLOCKS * block_s)]
    unexplained = [tempo for tempo in silent if not _under_way(tries, ends_s[tempo])]
    third = len(seen.memory_mib) // 3
    late = seen.memory_mib[third:]
    slope = float(np.polyfit(range(len(late)), late, 1)[0]) * 100 if len(late) > 2 else 0.0
    statuses = Counter(line.status for line in tries)
    return {
        "tempos": len(ends_s),
        "tempo_s": TEMPO_BLOCKS * block_s,
        "seconds": round(took_s, 1),
        "tempos_set": len(ends_s) - len(unset),
        "tempos_not_set_reason_logged": len(unset) - len(silent),
        "tempos_try_under_way": len(silent) - len(unexplained),
        "tempos_unexplained": {tempo: _around(tries, ends_s[tempo], TEMPO_BLOCKS * block_s) for tempo in unexplained},
        "tries": len(tries),
        "tries_by_outcome": dict(statuses),
        "reasons": dict(Counter(line.code for line in tries if line.code)),
        "without_reason": sum(line.status != "set" and not (line.code and line.reason) for line in tries),
        "faults": dict(link.faults),
        "requests": link.num_requests,
        "requests_per_tempo": round(link.num_requests / max(1, len(ends_s)), 1),
        "cpu_s": round(used_s, 2),
        "log_lines": len(log.splitlines()),
        "weights_set": len(seen.set_blocks),
        "longest_gap_blocks": max((b - a for a, b in pairwise(seen.set_blocks)), default=0),
        "memory_mib": {"start": round(seen.memory_mib[0], 1), "third": round(late[0], 1), "end": round(late[-1], 1)},
        "memory_mib_per_100_tempos": round(slope, 3),
        "descriptors": {"third": seen.descriptors[third], "most": max(seen.descriptors), "end": seen.descriptors[-1]},
    }


def _fresh(set_blocks: list[int], end: int) -> bool:
    """Weights were set in the tempo that ends there, or in the last blocks of the one before.

    What is sent during a block is in the next one.
    """
    return any(end - TEMPO_BLOCKS - SLACK_BLOCKS <= block <= end for block in set_blocks)


def _explained(tries: list[Line], end_s: float, tempo_s: float) -> bool:
    """The newest try that ended before the tempo did failed with a reason (it waits then), or one begun in it did."""
    before = [line for line in tries if line.wall_s <= end_s]
    own = [line for line in tries if end_s - tempo_s < line.wall_s and line.begun_s <= end_s]
    return any(line.status != "set" and line.code and line.reason for line in [*own, *before[-1:]])


def _around(tries: list[Line], end_s: float, tempo_s: float) -> list[tuple[float, float, str, str]]:
    """Tries near a tempo's end: begin and end in tempos from it, outcome, code."""
    near = [line for line in tries if abs(line.wall_s - end_s) < 3 * tempo_s]
    return [((t.begun_s - end_s) / tempo_s, (t.wall_s - end_s) / tempo_s, t.status, t.code) for t in near]


def _under_way(tries: list[Line], end_s: float) -> bool:
    """A try that had begun when the tempo ended set the weights afterwards."""
    return any(line.begun_s <= end_s < line.wall_s and line.status == "set" for line in tries)


def check(found: dict[str, Any], *, quick: bool) -> None:
    assert not found["tempos_unexplained"], f"neither set nor explained: {found['tempos_unexplained']}: {found}"
    assert found["tempos_try_under_way"] <= found["tempos"] / 20
    assert found["without_reason"] == 0
    assert found["tempos_set"] > found["tempos"] / 2
    assert found["tries"] <= 1.5 * found["tempos"] + 5, "a hot loop of tries"
    assert found["requests_per_tempo"] <= 40, "a hot loop of requests"
    if not quick:
        assert sum(found["faults"].values()) > found["tempos"] / 4, "the link was bad indeed"
        assert found["memory_mib"]["end"] - found["memory_mib"]["third"] < GROWTH_MIB
        assert found["descriptors"]["end"] <= found["descriptors"]["third"] + NEW_DESCRIPTORS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tempos", type=int, default=200)
    parser.add_argument("--block", type=float, default=0.15, help="seconds of a block; a tempo has 10")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--validator", metavar="URL", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.validator:
        run_validator(flags.validator)
        return
    with tempfile.TemporaryDirectory() as directory:
        tempos = 12 if flags.quick else flags.tempos
        found = asyncio.run(measure(tempos, flags.block, flags.seed, Path(directory)))
        check(found, quick=flags.quick)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
