"""This machine: software, processor, memory, disk, graphics cards. What can be measured is measured, for two seconds at most."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import time
from importlib import metadata
from pathlib import Path
from statistics import median
from tempfile import NamedTemporaryFile

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from iota.doctor.spec import RoleSpec
from subnet.chain.fit import Findings

PACKAGE = "iota-open"
BENCHMARK_S = 2.0
DISK_BYTES = 64 << 20
SLOW_DISK_BYTES_PER_S, SLOW_FSYNC_S = 50e6, 0.05
FULL_GB = 0.3
"""A miner's caches leave a quarter of a gigabyte free: with less there is no room for anything."""
MIN_FILES = 4096
CPU_NEEDS_GFLOPS = 20.0
"""Below it an item of the smallest run takes minutes."""


def software(findings: Findings) -> None:
    """Python and every package that this one requires."""
    python, needed = platform.python_version(), metadata.metadata(PACKAGE)["Requires-Python"]
    if not SpecifierSet(needed).contains(python, prereleases=True):
        findings.bad(f"Python {python}", f"{needed} is needed: install it and run scripts/install again")
    else:
        findings.ok(f"Python {python}")
    wrong, names = [], []
    for text in metadata.requires(PACKAGE) or []:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            wrong.append(f"{requirement.name} is missing")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} {version} isn't {requirement.specifier}")
        elif requirement.name in ("torch", "transformers", "bittensor"):
            names.append(f"{requirement.name} {version}")
    for problem in wrong:
        findings.bad(problem, "run scripts/install again")
    if not wrong:
        findings.ok(f"all packages fit: {', '.join(names)}")


def processor(findings: Findings, spec: RoleSpec) -> None:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cpu = spec.cpu
    _compare(findings, f"{cores} cores", cores, cpu.min_cores, cpu.recommended_cores, "cores")
    if platform.machine() != cpu.architecture:
        findings.note(f"the processor is {platform.machine()}, tested is {cpu.architecture}")
    if platform.system() != spec.os.name:
        findings.note(f"the system is {platform.system()}, tested is {spec.os.name}")


def memory(findings: Findings, spec: RoleSpec, meminfo: str | None = None) -> None:
    """``meminfo``: text of ``/proc/meminfo``; None reads it."""
    try:
        text = meminfo if meminfo is not None else Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        findings.note("how much memory there is isn't known on this system")
        return
    kib = {name: int(value) for name, value in re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE)}
    whole, free = kib["MemTotal"] / 1e6, kib.get("MemAvailable", 0) / 1e6
    what = f"{whole:.1f} GB of memory, {free:.1f} GB free"
    _compare(findings, what, whole, spec.memory.min_ram, spec.memory.recommended_ram, "GB")
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if 0 <= files < MIN_FILES:
        findings.note(f"{files} files may be open at once", f"ulimit -n {MIN_FILES} or more: each peer takes one")


def disk(findings: Findings, directory: Path, spec: RoleSpec, *, measure: bool = True) -> None:
    """Room, rights and speed where the role's directory is or will be."""
    place = directory
    while not place.exists() and place != place.parent:
        place = place.parent
    if not os.access(place, os.W_OK | os.X_OK):
        findings.bad(
            f"{directory} can't be written", f"give its owner the right, or choose another --dir (user {os.getuid()})"
        )
        return
    free = shutil.disk_usage(place).free / 1e9
    what = f"{free:.0f} GB free at {directory}"
    _compare(findings, what, free, spec.storage.min_space, spec.storage.recommended_space, "GB", hard=free < FULL_GB)
    if not measure or free < FULL_GB:
        return
    speed, sync_s = _disk_speed(place)
    said = f"the disk writes {speed / 1e6:.0f} MB/s, a small fsync takes {1e3 * sync_s:.1f} ms"
    if speed < SLOW_DISK_BYTES_PER_S or sync_s > SLOW_FSYNC_S:
        findings.note(said, "an SSD is recommended: each seal waits for an fsync")
    else:
        findings.ok(said)


def _disk_speed(place: Path) -> tuple[float, float]:
    """(bytes/s written and synced, seconds of a small fsync)."""
    block = os.urandom(1 << 20)
    with NamedTemporaryFile(dir=place, prefix=".iota-doctor-") as out:
        began = time.perf_counter()
        for _ in range(DISK_BYTES >> 20):
            out.write(block)
        out.flush()
        os.fsync(out.fileno())
        speed = DISK_BYTES / (time.perf_counter() - began)
        syncs: list[float] = []
        for _ in range(8):
            began = time.perf_counter()
            out.write(block[:4096])
            out.flush()
            os.fsync(out.fileno())
            syncs.append(time.perf_counter() - began)
    return speed, median(syncs)


def device(findings: Findings, wanted: str, spec: RoleSpec) -> None:
    """The device that a miner would use, by two seconds of matrix products: names of cards say little of their speed."""
    import torch

    from miner.hardware import choose_device, matmul_flops
    from subnet.errors import ConfigError

    try:
        name = choose_device(wanted)
    except ConfigError as error:
        findings.bad(error.reason, error.hint)
        return
    found = torch.device(name)
    if found.type == "cuda":
        card = torch.cuda.get_device_properties(found)
        capability = float(f"{card.major}.{card.minor}")
        vram = card.total_memory / 1e9
        _compare(findings, f"{card.name}, {vram:.0f} GB", vram, spec.gpu.min_vram, spec.gpu.recommended_vram, "GB")
        _compare(
            findings, f"compute capability {capability}", capability,
            spec.gpu.min_compute_capability, spec.gpu.recommended_compute_capability, "",
        )  # fmt: skip
    else:
        findings.note("no CUDA device: the processor computes", "fine for a demo; a run of its class must want CPUs")
    size = 0 if found.type == "cuda" else 768
    speeds = {kind: matmul_flops(name, kind, seconds=BENCHMARK_S / 2, size=size) / 1e9 for kind in ("fp32", "bf16")}
    said = f"matrix products: fp32 {speeds['fp32']:,.0f}, bf16 {speeds['bf16']:,.0f} GFLOP/s"
    if speeds["fp32"] < CPU_NEEDS_GFLOPS:
        findings.note(said, "slow: leases will be late and dealt to others")
    else:
        findings.ok(said)


def _compare(
    findings: Findings, what: str, value: float, least: float, best: float, unit: str, *, hard: bool = False
) -> None:
    """``hard``: too little would really fail; otherwise it costs."""
    if hard:
        findings.bad(what, f"at least {least:g} {unit} are needed".replace("  ", " "))
    elif value < least:
        findings.note(what, f"less than the {least:g} {unit} that min_compute.yml asks for".replace("  ", " "))
    elif value < best:
        findings.ok(f"{what} (recommended: {best:g} {unit})".replace(" )", ")"))
    else:
        findings.ok(what)
