"""Huge pages are asked for once, and what was set already stands."""

from __future__ import annotations

import subprocess
import sys

from subnet.allocator import with_huge_pages


def test_huge_pages_are_added_to_what_is_set() -> None:
    assert with_huge_pages({})["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=1"
    added = with_huge_pages({"A": "b", "GLIBC_TUNABLES": "glibc.malloc.check=0"})
    assert added == {"A": "b", "GLIBC_TUNABLES": "glibc.malloc.check=0:glibc.malloc.hugetlb=1"}
    assert with_huge_pages(added) == added
    mine = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}
    assert with_huge_pages(mine) == mine


def test_a_program_begins_again_once_with_its_arguments() -> None:
    code = (
        "import os, sys\n"
        "from subnet.allocator import restart_with_huge_pages\n"
        "print('began', flush=True)\n"
        "restart_with_huge_pages()\n"
        "print(os.environ['GLIBC_TUNABLES'], sys.argv[1:])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "--x", "1"],
        env={"PATH": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    lines = done.stdout.splitlines()
    began = 2 if sys.platform == "linux" else 1
    assert lines[:-1] == ["began"] * began
    if sys.platform == "linux":
        assert lines[-1] == "glibc.malloc.hugetlb=1 ['--x', '1']"
