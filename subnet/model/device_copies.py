"""Boundaries between host and device: on CUDA through pinned memory, on a stream of their own, beside the compute.

A copy in is waited for by the compute stream, never by the host; a copy out begins when its chunk is computed, so that it
runs while the next chunk is, and the host waits once, at the end. Each tensor that two streams touch is recorded with the
second, or the allocator would hand its memory on too early. On a CPU a copy is the tensor itself. Not run on a GPU yet:
``scripts/gpu-check`` is what shows it there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from subnet.model.stage import Boundary


class HostCopies:
    """The device is the CPU: nothing is copied."""

    def buffer(self, shape: tuple[int, ...]) -> Tensor:
        """Host memory for fp32 numbers that are to be uploaded."""
        return torch.empty(shape, dtype=torch.float32)

    def upload(self, host: Tensor) -> Tensor:
        """The tensor on the device; whatever runs on the current stream from now on sees its values."""
        return host

    def download(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Begin the way back, behind what the current stream does now; the answer waits and gives a host tensor."""
        return lambda: tensor


class CudaCopies(HostCopies):
    """A CUDA device's copy stream. ``api`` is ``torch.cuda`` (tests take another)."""

    def __init__(self, device: torch.device, api: Any = torch.cuda, *, pinned: bool = True) -> None:
        self.device, self._api, self._pinned = device, api, pinned
        self._stream = api.Stream(device=device)

    def buffer(self, shape: tuple[int, ...]) -> Tensor:
        # The caching host allocator gives a freed buffer out again only after the copies that use it have ended.
        return torch.empty(shape, dtype=torch.float32, pin_memory=self._pinned)

    def upload(self, host: Tensor) -> Tensor:
        compute = self._api.current_stream(self.device)
        with self._api.stream(self._stream):
            there = torch.empty(host.shape, dtype=host.dtype, device=self.device)
            there.copy_(host, non_blocking=True)
            done = self._api.Event()
            done.record(self._stream)
        compute.wait_event(done)
        self._record(there, compute)
        return there

    def download(self, tensor: Tensor) -> Callable[[], Tensor]:
        source = tensor.detach().contiguous()
        computed = self._api.Event()
        computed.record(self._api.current_stream(self.device))
        host = self.buffer(tuple(source.shape))
        with self._api.stream(self._stream):
            self._stream.wait_event(computed)
            host.copy_(source, non_blocking=True)
            done = self._api.Event()
            done.record(self._stream)
        self._record(source, self._stream)

        def wait() -> Tensor:
            done.synchronize()
            return host

        return wait

    def _record(self, tensor: Tensor, stream: Any) -> None:
        tensor.record_stream(stream)


@lru_cache(maxsize=8)
def copies_of(device: torch.device) -> HostCopies:
    """One for each device of the process."""
    return CudaCopies(device) if device.type == "cuda" else HostCopies()


class Outgoing:
    """An item's output, chunk by chunk: each begins its way to the host when it is there."""

    def __init__(self, device: torch.device, *, wanted: bool = True) -> None:
        self._copies, self._wanted = copies_of(device), wanted
        self._hidden: list[Callable[[], Tensor]] = []
        self._routing: list[Callable[[], Tensor]] = []

    def append(self, chunk: Boundary) -> None:
        if not self._wanted:
            return
        self._hidden.append(self._copies.download(chunk.hidden_BLH))
        if chunk.routing_2E is not None:
            self._routing.append(self._copies.download(chunk.routing_2E))

    def data(self) -> memoryview | None:
        """Hidden states stacked (rows, L, H), then router sums (chunks, 2, E), as bytes of fp32; None: nothing is wanted.

        Pinned memory is scarce and these bytes are kept: they are copied out of it.
        """
        if not self._wanted:
            return None
        hidden, routing = ([wait() for wait in waits] for waits in (self._hidden, self._routing))
        whole = torch.cat(hidden) if len(hidden) > 1 else hidden[0]
        if routing:
            whole = torch.cat([part.reshape(-1) for part in (whole, *routing)])
        whole = whole.detach().contiguous()
        if isinstance(self._copies, CudaCopies) and whole.data_ptr() == hidden[0].data_ptr():
            whole = whole.clone()
        return whole.numpy().data.cast("B")
