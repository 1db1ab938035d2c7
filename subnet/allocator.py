"""Keeps a process's resident memory near what it uses: large blocks go back to the system when they are freed.

glibc raises its mmap threshold with the sizes it sees, so that freed buffers of tens of megabytes stay in the heap between
activations and fragment it. A fixed threshold of 8 MiB keeps a process small. A miner's lies above a piece of logits, and
its compute thread has the main arena, whose top isn't cut at each free: below that, pages that were zeroed anew for every
item were a tenth of a last stage's time. Elsewhere than on glibc nothing is done.

Huge pages for what is larger are a setting that glibc (2.35 and later) reads when a process begins: where the kernel gives
them on request, an item took about 6 % less time (three pairs of runs).
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
SMALL = {_M_MMAP_THRESHOLD: 8 << 20, _M_TRIM_THRESHOLD: 64 << 20, _M_ARENA_MAX: 2}
COMPUTING = {_M_MMAP_THRESHOLD: 64 << 20, _M_TRIM_THRESHOLD: 256 << 20, _M_ARENA_MAX: 1}
_TUNABLES, _HUGE_PAGES = "GLIBC_TUNABLES", "glibc.malloc.hugetlb"


def bound_heap(*, computes: bool = False) -> bool:
    """Call once, early; whether the allocator took it. ``computes``: a process that works items, again and again."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return all(mallopt(option, value) == 1 for option, value in (COMPUTING if computes else SMALL).items())


def give_back() -> None:
    """Return free pages of the heap to the system: after an update, when a step's activations are gone."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError):
        return


def with_huge_pages(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process whose heap asks for huge pages; what it says of them already stands."""
    given = environ.get(_TUNABLES, "")
    if _HUGE_PAGES in given:
        return dict(environ)
    return {**environ, _TUNABLES: ":".join(filter(None, (given, f"{_HUGE_PAGES}=1")))}


def restart_with_huge_pages() -> None:
    """Call first thing in a program: it begins again, once, with that environment. Does nothing elsewhere than on Linux."""
    environ = with_huge_pages(os.environ)
    if sys.platform == "linux" and environ != dict(os.environ):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environ)
