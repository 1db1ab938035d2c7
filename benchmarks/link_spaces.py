"""Network namespaces for a benchmark, one a miner: with links of a rate and a delay, or as fast as the machine; gone at the end.

Limited: each namespace's interface is a TUN device, its upload paced by ``tc tbf``, and a user-space switch
(:mod:`benchmarks.link_switch`) adds the delay and the download rate; so TCP itself meets the round trip. Unlimited: pairs of
virtual Ethernet devices on one bridge. The addresses are the same.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

TUN = "iota0"
BRIDGE = "iotabr0"
MTU_BYTES = 32_000
"""Large, so that the switch has few packets to move: it shares the cores with what is measured."""
NETWORK = "10.77.0"
HOME = f"{NETWORK}.1"
"""The address of this machine's own namespace, where chain, store and validator are."""
_START_S = 20.0


@dataclass(frozen=True)
class Link:
    """What each miner has to the rest: both ways at ``bytes_per_s``, every packet ``delay_s`` on its way."""

    bytes_per_s: float
    delay_s: float


def run(*command: str) -> str:
    """Raises with what it said."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def why_not() -> str:
    """Why there can be no namespaces here, or nothing."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"iproute2 isn't installed ({', '.join(missing)})"
    if not Path("/dev/net/tun").exists():
        return "there is no /dev/net/tun"
    try:
        run("ip", "netns", "add", "iota-try")
    except OSError as error:
        return str(error)
    run("ip", "netns", "delete", "iota-try")
    return ""


class Spaces:
    """``link`` None: unlimited."""

    def __init__(self, count: int, link: Link | None) -> None:
        self.names = [f"iota-link-{number}" for number in range(count)]
        self._link = link
        self._switch: subprocess.Popen[str] | None = None

    def address(self, number: int) -> str:
        return f"{NETWORK}.{number + 2}"

    def command(self, number: int) -> list[str]:
        """What starts a program in the namespace."""
        return ["ip", "netns", "exec", self.names[number]]

    def sent_bytes(self, number: int) -> int:
        """What has left the namespace so far, headers included."""
        found = json.loads(run(*self.command(number), "ip", "-s", "-j", "link", "show", TUN))
        return int(found[0]["stats64"]["tx"]["bytes"])

    def __enter__(self) -> Spaces:
        self._remove()
        try:
            for name in self.names:
                run("ip", "netns", "add", name)
                run("ip", "-n", name, "link", "set", "lo", "up")
            if self._link is None:
                self._join()
            else:
                self._limit(self._link)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._switch is not None:
            self._switch.kill()
            self._switch.communicate()
        self._remove()

    def _join(self) -> None:
        run("ip", "link", "add", BRIDGE, "type", "bridge")
        run("ip", "addr", "add", f"{HOME}/24", "dev", BRIDGE)
        run("ip", "link", "set", BRIDGE, "up")
        for number, name in enumerate(self.names):
            outer = f"iotav{number}"
            run("ip", "link", "add", outer, "type", "veth", "peer", "name", TUN, "netns", name)
            run("ip", "link", "set", outer, "master", BRIDGE, "up")
            run("ip", "-n", name, "addr", "add", f"{self.address(number)}/24", "dev", TUN)
            run("ip", "-n", name, "link", "set", TUN, "up")

    def _limit(self, link: Link) -> None:
        ends = [f"={HOME}=free", *(f"{name}={self.address(number)}" for number, name in enumerate(self.names))]
        self._switch = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.link_switch", str(link.delay_s), str(link.bytes_per_s), *ends],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._switch.stdout is not None
        if self._switch.stdout.readline() != "ready\n":
            raise OSError("the switch between the namespaces didn't start")
        rate = f"{round(link.bytes_per_s * 8)}bit"
        for name in self.names:
            run("tc", "-n", name, "qdisc", "replace", "dev", TUN, "root", "tbf",
                "rate", rate, "burst", "64kb", "latency", "100ms")  # fmt: skip

    def _remove(self) -> None:
        """What this or an earlier one has left."""
        for name in self.names:
            with suppress(OSError):
                run("ip", "netns", "delete", name)
        for device in (BRIDGE, TUN):
            with suppress(OSError):
                run("ip", "link", "delete", device)
