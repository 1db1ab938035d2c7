"""Each role's first success by its page alone: the commands that the docs mark are run as they stand there, in an empty home.

python -m benchmarks.walks [--quick]

A block of commands is marked by a comment before it: ``<!-- walk: ROLE; background: 1, 5 -->`` (services that stay, by number).
In a clean clone with a new environment; ``--quick`` takes this checkout and its environment, and leaves installing out.
What a role is given (a validator's needs a chain, a miner's a validator with a run) is started beside it and not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import mkdtemp

ROOT = Path(__file__).resolve().parent.parent
MARK = re.compile(r"<!-- walk: (\w+)(?:; background: ([\d, ]+))? -->\n+((?:    .*\n)+)")
PORTS = (8091, 8192, 9944, 9945)
COMMAND_S, SUCCESS_S = 3600.0, 900.0
LOSS_S = 60.0


@dataclass(frozen=True)
class Walk:
    """A role's commands; ``background``: numbers, from 1, of those that stay."""

    role: str
    page: str
    commands: tuple[str, ...]
    background: frozenset[int]


def read_walks(docs: Path) -> dict[str, Walk]:
    """All that the pages mark, by role; an error where a role is marked twice."""
    found: dict[str, Walk] = {}
    for page in sorted(docs.glob("*.md")):
        for role, background, block in MARK.findall(page.read_text(encoding="utf-8")):
            assert role not in found, f"{role} is walked in {found[role].page} and {page.name}"
            lines = (re.sub(r"\s+#.*$", "", line).strip() for line in block.splitlines())
            numbers = frozenset(int(number) for number in re.findall(r"\d+", background))
            found[role] = Walk(role, page.name, tuple(line for line in lines if line), numbers)
    return found


@dataclass
class Place:
    """Where the commands are run: a checkout, an environment, a home."""

    checkout: Path
    home: Path
    quick: bool
    services: list[subprocess.Popen[bytes]] = field(default_factory=list[subprocess.Popen[bytes]])
    logs: int = 0

    def words(self, command: str) -> str:
        """As it stands in the docs, but for the address that a reader fills in."""
        command = command.replace("http://VALIDATOR:", "http://127.0.0.1:")
        if self.quick:
            command = re.sub(r"^scripts/join\b", "iota miner setup", command)
            command = re.sub(r"^scripts/demo\b", "iota demo", command)
            command = re.sub(r"^\.venv/bin/", "", command)
        return command

    def environment(self) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if key.startswith("PIP_")}
        path = f"{self.checkout / '.venv' / 'bin'}:{os.environ['PATH']}"
        return {**kept, "HOME": str(self.home), "PATH": path, "TERM": "dumb", "LANG": "C.UTF-8"}

    def start(self, command: str) -> tuple[subprocess.Popen[bytes], Path]:
        self.logs += 1
        log = self.home / f"walk-{self.logs}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {self.words(command)}"],
                cwd=self.checkout,
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.services.append(process)
        return process, log

    def stop(self, process: subprocess.Popen[bytes]) -> None:
        """In order, then its whole group."""
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def close(self) -> None:
        for process in reversed(self.services):
            self.stop(process)


@dataclass
class Step:
    """What one command took. ``success_s``: until what the role wants was there, where this command brings it."""

    command: str
    seconds: float
    status: int | None
    said: str


def wait_for(seen: Callable[[], bool], process: subprocess.Popen[bytes], within_s: float) -> bool:
    """Whether it was seen before the process ended or the time was over."""
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        if seen():
            return True
        if process.poll() is not None:
            return seen()
        time.sleep(0.1)
    return False


def said_in(log: Path, pattern: str) -> Callable[[], bool]:
    return lambda: re.search(pattern, log.read_text(encoding="utf-8", errors="replace")) is not None


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2.0) as answer:
            return answer.status == 200
    except OSError:
        return False


def success_of(role: str, log: Path) -> Callable[[], bool]:
    """What each role came for."""
    return {
        "builder": said_in(log, r"step \d+/\d+ · loss \d"),
        "validator": lambda: answers("http://127.0.0.1:8091/v1/hello"),
        "miner": said_in(log, r"joined as \S+ at stage \d"),
        "owner": said_in(log, r"(?i)honest fast"),
    }[role]


def walk(place: Place, found: Walk) -> dict[str, object]:
    """Run a role's commands; the last one (or the one that stays) has to bring the success."""
    steps: list[Step] = []
    began = time.monotonic()
    success_s: float | None = None
    for number, command in enumerate(found.commands, 1):
        if place.quick and command.startswith("scripts/install"):
            continue
        step_began = time.monotonic()
        process, log = place.start(command)
        last = number == len(found.commands)
        if last:
            ok = wait_for(success_of(found.role, log), process, SUCCESS_S)
            success_s = time.monotonic() - step_began if ok else None
        elif number in found.background:
            wait_for(lambda log=log: log.stat().st_size > 0, process, 60.0)
        else:
            process.wait(COMMAND_S)
        if not last and number not in found.background:
            place.services.remove(process)
        said = log.read_text(encoding="utf-8", errors="replace")[-400:]
        steps.append(Step(command, round(time.monotonic() - step_began, 1), process.poll(), said))
        if process.poll() not in (None, 0):
            break
    return {
        "page": found.page,
        "commands": len(found.commands),
        "seconds": round(time.monotonic() - began, 1),
        "last_command_s": None if success_s is None else round(success_s, 1),
        "ok": success_s is not None,
        "steps": [{"command": s.command, "seconds": s.seconds, "status": s.status} for s in steps],
        **({} if success_s is not None else {"said": steps[-1].said}),
    }


def given(place: Place, command: str, ready: Callable[[Path], Callable[[], bool]]) -> None:
    """Something that a role is given; an error where it doesn't come."""
    process, log = place.start(command)
    if not wait_for(ready(log), process, SUCCESS_S):
        raise SystemExit(f"{command} isn't ready: {log.read_text(errors='replace')[-800:]}")


def check_ports() -> None:
    for port in PORTS:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                raise SystemExit(
                    f"port {port} is taken: the docs' commands use it (unshare -rn gives a network of its own)"
                )


def run(place: Place, walks: dict[str, Walk], only: set[str]) -> dict[str, object]:
    results: dict[str, object] = {}

    def take(role: str) -> None:
        if role in only:
            print(f"{role}: {' && '.join(walks[role].commands)}", file=sys.stderr, flush=True)
            results[role] = walk(place, walks[role])
            print(f"{role}: {json.dumps(results[role])}", file=sys.stderr, flush=True)

    take("builder")
    if place.services:
        place.stop(place.services.pop())
    take("owner")
    if only & {"validator", "miner"}:
        given(place, "iota chain serve", lambda log: said_in(log, r"127\.0\.0\.1:9944"))
        results["validator"] = walk(place, walks["validator"])
        print(f"validator: {json.dumps(results['validator'])}", file=sys.stderr, flush=True)
    if "miner" in only:
        given(
            place,
            "iota run submit examples/demo.toml --wallet.name validator --same-class",
            lambda log: said_in(log, r"is submitted"),
        )
        take("miner")
    return results


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="this checkout and its environment, nothing is installed")
    parser.add_argument("--only", nargs="+", default=["builder", "owner", "validator", "miner"])
    options = parser.parse_args(arguments)
    check_ports()
    limits = {"builder": 2, "miner": 3, "validator": 5, "owner": 2}
    walks = read_walks(ROOT / "docs")
    scratch = Path(mkdtemp(prefix="iota-walks-"))
    checkout = ROOT
    if not options.quick:
        checkout = scratch / "iota"
        subprocess.run(
            ["git", "-c", "advice.detachedHead=false", "clone", "--quiet", str(ROOT), str(checkout)], check=True
        )
    home = scratch / "home"
    home.mkdir()
    place = Place(checkout, home, options.quick)
    try:
        results = run(place, walks, set(options.only))
    finally:
        place.close()
    ok = all(bool(result["ok"]) and result["commands"] <= limits[role] for role, result in results.items())  # type: ignore[index,operator]
    loss_s = results.get("builder", {}).get("last_command_s")  # type: ignore[union-attr]
    ok = ok and ("builder" not in results or (loss_s is not None and loss_s <= LOSS_S))
    figures = {**results, "commands_limit": limits, "first_loss_limit_s": LOSS_S, "load_average": os.getloadavg()}
    print(json.dumps({"name": "walks", "quick": options.quick, "figures": figures, "ok": ok}))
    if ok:
        shutil.rmtree(scratch, ignore_errors=True)
    else:
        print(f"logs: {shlex.quote(str(home))}", file=sys.stderr)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
