"""Copies beside the compute: every stream waits for what it reads, memory is kept for whoever still uses it, bits are kept.

There is no GPU here: the streams are recorders, so what is checked is which waits are asked for, in which order.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from subnet.model import device_copies
from subnet.model.device_copies import CudaCopies, Outgoing, copies_of
from subnet.model.stage import Boundary

CPU = torch.device("cpu")


class Stream:
    def __init__(self, api: Streams, name: str) -> None:
        self.api, self.name = api, name

    def wait_event(self, event: Event) -> None:
        self.api.log.append(f"{self.name} waits for {event.where}")


class Event:
    def __init__(self, api: Streams) -> None:
        self.api, self.where = api, ""

    def record(self, stream: Stream) -> None:
        self.where = f"{stream.name}:{self.api.marks}"
        self.api.marks += 1
        self.api.log.append(f"event {self.where}")

    def synchronize(self) -> None:
        self.api.log.append(f"host waits for {self.where}")


class Streams:
    """What of ``torch.cuda`` is used, written down."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.marks = 0
        self.now = self.compute = Stream(self, "compute")

    def Stream(self, device: torch.device) -> Stream:
        return Stream(self, "copy")

    def Event(self) -> Event:
        return Event(self)

    def current_stream(self, device: torch.device) -> Stream:
        return self.now

    @contextmanager
    def stream(self, stream: Stream) -> Generator[None]:
        before, self.now = self.now, stream
        yield
        self.now = before


class Recorded(CudaCopies):
    def __init__(self, api: Streams) -> None:
        super().__init__(CPU, api, pinned=False)
        self.log = api.log

    def _record(self, tensor: Tensor, stream: Any) -> None:
        self.log.append(f"kept for {stream.name}")


def test_the_compute_stream_waits_for_what_comes_in_and_the_memory_is_kept_for_it() -> None:
    api = Streams()
    host = torch.randn(3, 4)
    there = Recorded(api).upload(host)
    assert torch.equal(there, host)
    assert there.data_ptr() != host.data_ptr()
    assert api.log == ["event copy:0", "compute waits for copy:0", "kept for compute"]


def test_the_copy_stream_waits_for_what_goes_out_and_the_host_waits_once_at_the_end() -> None:
    api = Streams()
    copies, one, two = Recorded(api), torch.randn(2, 3), torch.randn(3, 2).t()
    waits = [copies.download(one), copies.download(two)]
    begun = [
        "event compute:0", "copy waits for compute:0", "event copy:1", "kept for copy",
        "event compute:2", "copy waits for compute:2", "event copy:3", "kept for copy",
    ]  # fmt: skip
    assert api.log == begun
    assert [torch.equal(wait(), given) for wait, given in zip(waits, (one, two), strict=True)] == [True, True]
    assert api.log[len(begun) :] == ["host waits for copy:1", "host waits for copy:3"]


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("routed", [False, True])
@pytest.mark.parametrize("cuda", [False, True])
def test_outgoing_bytes_are_the_chunks_and_then_the_router_sums(
    chunks: int, routed: bool, cuda: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cuda:
        monkeypatch.setattr(device_copies, "copies_of", lambda device: Recorded(Streams()))
    hidden = [torch.randn(2, 3, 4) for _ in range(chunks)]
    sums = [torch.rand(2, 5) if routed else None for _ in range(chunks)]
    out = Outgoing(CPU)
    for states, routing in zip(hidden, sums, strict=True):
        out.append(Boundary(states, routing))
    expected = b"".join(t.numpy().tobytes() for t in [*hidden, *(s for s in sums if s is not None)])
    data = out.data()
    assert data is not None
    assert bytes(data) == expected
    hidden[0].zero_()
    assert not cuda or bytes(data) == expected  # kept bytes lie in memory of their own
    assert Outgoing(CPU, wanted=False).data() is None


def test_a_cpu_copies_nothing() -> None:
    tensor = torch.randn(4)
    copies = copies_of(CPU)
    assert copies.upload(tensor) is tensor
    assert copies.download(tensor)() is tensor
    assert copies is copies_of(CPU)
