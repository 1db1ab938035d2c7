"""How many members one validator process on one core holds: real HTTP, real signatures, a real journal, simulated miners.

Each member sends one signed message a second with the receipts of that second, follows the directive stream, and takes part
in the merges; 5 % of the members are killed and come back each minute. A number of members is *held* when 99 of 100 messages
are answered within 100 ms and 95 % of those due were sent. The validator has a core of its own; the simulated miners, the
chain and the store share the other one. Afterwards journal and log store are replayed: both must give the live fold's state.

    python -m benchmarks.coordinator            # rungs of 5 minutes, kept in benchmarks/out/coordinator
    python -m benchmarks.coordinator --quick    # one rung of 20 s with 48 members
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from blake3 import blake3

from benchmarks.coordinator_site import HARDWARE, ROOT, Site, Usage
from benchmarks.corpus import OUT
from benchmarks.fleet_settings import FleetSettings
from benchmarks.run_log import run_records
from iota.ports import HOST
from subnet.run.apply import apply_record
from subnet.run.events import Record
from subnet.run.state import new_state
from subnet.run.state_codec import state_bytes
from validator.journal_store import JournalStore

DIRECTORY = OUT / "coordinator"
_record = msgspec.msgpack.Decoder(Record)
LIMIT_P99_MS = 100.0
LIMIT_SENT = 0.95
LIMIT_MEMBERS = 1000
STEP_S = 80.0
"""A step has so many seconds of work for everybody."""


@dataclass(frozen=True)
class Rung:
    members: int
    items_per_s: float
    seconds: float
    stages: int = 16
    flood: bool = False
    warm_s: float = 25.0
    step_s: float = STEP_S

    @property
    def name(self) -> str:
        flood = "-flood" if self.flood else ""
        return f"{self.members}x{self.items_per_s:g}-{self.seconds:g}s-{self.stages}{flood}"

    @property
    def microbatches(self) -> int:
        return max(8, min(2**14, round(self.members / self.stages * self.items_per_s * self.step_s)))


def run_rung(rung: Rung, code: Path, view: str) -> dict[str, Any]:
    directory = DIRECTORY / "site"
    shutil.rmtree(directory, ignore_errors=True)
    cores = sorted(os.sched_getaffinity(0))
    hotkeys = tuple(f"//fleet//{number}" for number in range(rung.members))
    flooders = ("//flood//0",) if rung.flood else ()
    site = Site(directory, (*hotkeys, *flooders), rung.stages, rung.microbatches, cores[0], cores[-1], code)
    with site:
        before = Usage.of(site.validator_pid)
        settings = FleetSettings(
            host=HOST,
            port=site.ports.validator,
            receiver=site.receiver,
            run=site.run_id,
            hotkeys=hotkeys,
            hardware_class=HARDWARE,
            item_s=0.75 / rung.items_per_s,
            warm_s=rung.warm_s,
            measure_s=rung.seconds,
            view=view,
        )
        figures = _with_fleet(rung, site, settings, cores[-1], flooders)
        after = Usage.of(site.validator_pid)
    figures["rss_mb"] = after.rss_bytes / 1e6
    figures["memory_per_member_kb"] = (after.rss_bytes - before.rss_bytes) / rung.members / 1e3
    figures |= _per_unit(figures)
    figures |= replayed(site, figures["number"], figures["state"])
    return figures


def _with_fleet(
    rung: Rung, site: Site, settings: FleetSettings, core: int, flooders: tuple[str, ...]
) -> dict[str, Any]:
    """Runs the fleet's process, and watches the validator's while it measures."""
    path = site.directory / "fleet.json"
    path.write_bytes(msgspec.json.encode(settings))
    command = [sys.executable, "-m", "benchmarks.fleet", str(path)]
    fleet = _pinned(command, core, site.directory / "fleet.log")
    flood = None
    try:
        usage: list[tuple[float, Usage]] = []
        profile = os.environ.get("IOTA_PROFILE_S")
        while fleet.poll() is None:
            usage.append((time.monotonic(), Usage.of(site.validator_pid)))
            if profile and len(usage) == int(float(profile)):
                _profile(site)
            if flooders and flood is None and len(usage) > 5:
                flood = _pinned(
                    [
                        sys.executable,
                        "-m",
                        "benchmarks.flood",
                        HOST,
                        str(site.ports.validator),
                        site.receiver,
                        *flooders,
                    ],
                    core,
                    site.directory / "flood.log",
                )
            time.sleep(1.0)
    finally:
        for process in (fleet, flood):
            if process is not None and process.poll() is None:
                process.terminate()
                process.wait(10.0)
    lines = (site.directory / "fleet.log").read_text().strip().splitlines()
    if fleet.returncode != 0 or not lines or not lines[-1].startswith("{"):
        raise RuntimeError(f"the fleet failed: {lines[-20:]}")
    found = json.loads(lines[-1])
    window = [entry for entry in usage if usage[-1][0] - entry[0] <= rung.seconds + 2.5]
    (first_s, first), (last_s, last) = window[0], window[-1]
    found["validator_cpu"] = (last.cpu_s - first.cpu_s) / max(0.001, last_s - first_s)
    if flood is not None:
        found["flood"] = json.loads((site.directory / "flood.log").read_text().strip().splitlines()[-1])
    return found


def _profile(site: Site) -> None:
    py_spy = Path(sys.executable).with_name("py-spy")
    out = DIRECTORY / "profile.txt"
    subprocess.Popen(
        [str(py_spy), "record", "-p", str(site.validator_pid), "-d", "10", "-r", "200", "-f", "raw", "-o", str(out)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def _pinned(command: list[str], core: int, log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as file:
        return subprocess.Popen(
            command, cwd=ROOT, stdout=file, stderr=file, preexec_fn=lambda: os.sched_setaffinity(0, {core})
        )


def _per_unit(found: dict[str, Any]) -> dict[str, Any]:
    """What one message and one event cost, if all the validator's time is laid on them."""
    seconds, cpu_s = found["seconds"], found["validator_cpu"] * found["seconds"]
    due = found["members"] * seconds
    steps = found["step_bytes"]
    return {
        "sent_share": found["sent"] / due,
        "cpu_us_per_message": 1e6 * cpu_s / max(1, found["sent"]),
        "cpu_us_per_event": 1e6 * cpu_s / max(1, found["events"]),
        "items_per_member_s": found["items_per_s"] / found["members"],
        "journal_bytes_per_event": found["event_bytes"] / max(1, found["events"]),
        "journal_bytes_per_item": found["event_bytes"] / max(1, found["items"]),
        "journal_bytes_per_step": sum(steps) / len(steps) if steps else None,
    }


def replayed(site: Site, number: int, expected: str) -> dict[str, Any]:
    """Whether the validator's journal, and the log store's segments from record 0 on, fold to the fleet's state."""
    began_s = time.monotonic()
    journal = JournalStore(site.journal_path)
    try:
        state = journal.start_state()
        for record in journal.replay():
            if state.number < number:
                apply_record(state, record)
        took_s, size = time.monotonic() - began_s, site.journal_path.stat().st_size
        log = new_state()
        for record in run_records(site.store_directory):
            if log.number < number:
                apply_record(log, record)
        num_segments = log.number
        for data in journal.records_between(log.number, number):  # what no segment has yet
            apply_record(log, _record.decode(data))
    finally:
        journal.close()
    same = [found.number == number and blake3(state_bytes(found)).hexdigest() == expected for found in (state, log)]
    return {
        "replay_s": took_s,
        "replay_ok": same[0],
        "log_ok": same[1],
        "log_records": num_segments,
        "journal_file_mb": size / 1e6,
    }


def is_held(found: dict[str, Any]) -> bool:
    right = found["replay_ok"] and found["log_ok"] and not found["views_different"] and not found["refused"]
    return bool(right and found["answer_p99_ms"] < LIMIT_P99_MS and found["sent_share"] >= LIMIT_SENT)


def part(rung: Rung, code: Path, view: str, again: bool) -> dict[str, Any]:
    """A finished rung from disk, or measured now."""
    label = "" if code == ROOT else "-other"
    path = DIRECTORY / f"{rung.name}{label}.json"
    if path.exists() and not again:
        return json.loads(path.read_text())
    found = {**run_rung(rung, code, view), "held": False}
    found["held"] = is_held(found)
    path.write_text(json.dumps(found))
    print(f"{rung.name}: {json.dumps(found)}", flush=True)
    return found


def climb(sizes: tuple[int, ...], items_per_s: float, options: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    """Rungs until one isn't held; the last that was, and all of them."""
    held, rungs = 0, dict[str, Any]()
    for members in sizes:
        rung = Rung(members, items_per_s, options.seconds, options.stages)
        found = rungs[rung.name] = part(rung, options.code, options.view, options.again)
        if not found["held"]:
            break
        held = members
    return held, rungs


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--again", action="store_true", help="forget finished rungs")
    parser.add_argument("--seconds", type=float, default=300.0, help="of each rung")
    parser.add_argument("--stages", type=int, default=16)
    parser.add_argument("--one", default="", metavar="MEMBERSxRATE", help="a single rung, such as 500x1")
    parser.add_argument("--flood", action="store_true", help="with --one: beside a hotkey that sends all it can")
    parser.add_argument("--code", type=Path, default=ROOT, help="checkout whose validator is measured")
    parser.add_argument("--whole", dest="view", action="store_const", const="", default="&view=new",
                        help="every member takes the whole stream")  # fmt: skip
    options = parser.parse_args(arguments)
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    if options.quick:
        rung = Rung(48, 2.0, 20.0, 6, warm_s=4.0, step_s=6.0)
        found = part(rung, options.code, options.view, again=True)
        return _say(
            "coordinator",
            {rung.name: found},
            {"p99_ms": LIMIT_P99_MS, "steps": 1},
            found["held"] and found["steps"] > 0,
        )
    if options.one:
        members, rate = options.one.split("x")
        rung = Rung(int(members), float(rate), options.seconds, options.stages, flood=options.flood)
        found = part(rung, options.code, options.view, again=True)
        return _say("coordinator", {rung.name: found}, {"p99_ms": LIMIT_P99_MS}, found["held"])
    one, rungs = climb((250, 500, 750, 1000, 1250, 1500, 2000), 1.0, options)
    eight, more = climb((62, 125, 250, 375, 500, 750, 1000), 8.0, options)
    calm = max(250, one - 250)
    flooded = part(
        Rung(calm, 1.0, options.seconds, options.stages, flood=True), options.code, options.view, options.again
    )
    figures = {"held_at_1_item_s": one, "held_at_8_items_s": eight, "flooded": flooded, "rungs": {**rungs, **more}}
    limits = {"held_at_1_item_s": LIMIT_MEMBERS, "p99_ms": LIMIT_P99_MS, "held_beside_a_flood": True}
    return _say("coordinator", figures, limits, one >= LIMIT_MEMBERS and flooded["held"])


def _say(name: str, figures: dict[str, Any], limits: dict[str, Any], ok: bool) -> int:
    print(json.dumps({"name": name, "figures": figures, "limits": limits, "ok": ok}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
