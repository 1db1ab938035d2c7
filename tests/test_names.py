"""The index of key names says the same as a sorted list of strings, and a long journal costs bytes a segment."""

from __future__ import annotations

import tracemalloc

from hypothesis import given
from hypothesis import strategies as some

from subnet.store.names import NameIndex

heads = some.sampled_from(["runs/a/journal/", "runs/ab/journal/", "runs/a/", "x/", "runs/a/journal"])
tails = some.one_of(
    some.integers(0, 10**10 - 1).map(lambda n: f"{n:010d}"),
    some.integers(0, 20).map(lambda n: f"{n:010d}"),
    some.sampled_from(["submission", "1", "0000000001x", "00000000001", "½234567890", "b/0000000001"]),
)
names = some.tuples(heads, tails).map("".join)


@given(some.lists(names, unique=True), some.one_of(names, some.just(""), heads), names | heads, some.integers(1, 12))
def test_it_says_what_a_sorted_list_says(there: list[str], after: str, prefix: str, limit: int) -> None:
    index = NameIndex()
    for name in there:
        index.add(name)
    assert len(index) == len(there)
    assert all(name in index for name in there)
    assert (after in index) == (after in there)
    expected = sorted(name for name in there if name.startswith(prefix) and name > after)[:limit]
    assert index.page(prefix, after, limit) == expected
    assert index.page("", "", len(there) + 1) == sorted(there)


def test_a_segment_costs_some_bytes() -> None:
    tracemalloc.start()
    index = NameIndex()
    before = tracemalloc.get_traced_memory()[0]
    for number in range(20_000):
        index.add(f"runs/whale-0123abcd/journal/{number:010d}")
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert (after - before) / 20_000 < 16
    assert index.page("runs/whale-0123abcd/journal/", "runs/whale-0123abcd/journal/0000019997", 10) == [
        "runs/whale-0123abcd/journal/0000019998",
        "runs/whale-0123abcd/journal/0000019999",
    ]
