"""What crosses an item's border: foreign buffers checked before use, results as bytes, failures as reproducible hashes.

Where a model has a router loss, each chunk's two sums of experts follow the hidden states, in fp32, whatever their code.
Shape suffixes: B rows of a chunk, L positions, H hidden size, 2E sums of the router loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from blake3 import blake3
from numpy.typing import NDArray
from torch import Tensor

from subnet.errors import InputError, IotaError
from subnet.model.chunk import ChunkInput
from subnet.model.device_copies import copies_of
from subnet.model.dialogues import IGNORED_LABEL, split_bits
from subnet.model.families import num_routed
from subnet.model.plan import ModelPlan
from subnet.model.stage import Boundary
from subnet.model.token_bits import LEARNT
from subnet.numerics.codes import RAW, Buffer, coded_size, decode, encode
from subnet.words import ItemKey

_FAILURE_TAG = b"iota/failure/1\0"


class ItemFailed(IotaError):
    """The computation of an item failed; ``hash`` is the same on every machine of the class for the same failure."""

    code = "item_failed"

    def __init__(self, hash: str, reason: str) -> None:
        super().__init__(reason)
        self.hash = hash


class failing:
    """``with failing(item):`` turns whatever the computation raises into :class:`ItemFailed`; our own errors pass."""

    def __init__(self, item: ItemKey) -> None:
        self._item = item

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, IotaError):
            raise exception_failure(self._item, error) from error


def exception_failure(item: ItemKey, error: Exception) -> ItemFailed:
    """A caught exception: its type's name is what machines can be expected to agree on."""
    name = type(error).__name__
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
        name = "OutOfMemoryError"
    words = str(error).strip().splitlines() or [""]
    return ItemFailed(failure_hash(item, name), f"{item}: {name}: {words[0]}")


def gradient_failure(item: ItemKey, grads: Mapping[str, Tensor]) -> ItemFailed:
    """Non-finite parameter gradients: names and positions."""
    details: list[bytes] = []
    names: list[str] = []
    for name, grad in grads.items():
        values = grad.detach().reshape(-1).cpu().numpy()
        if not bool(np.isfinite(values).all()):
            names.append(name)
            details += [name.encode(), _positions(values)]
    reason = f"{item}: the gradient of {names[0]} ({len(names)} tensors in all) is not finite"
    return ItemFailed(failure_hash(item, "gradient", *details), reason)


def check_gradients(item: ItemKey, grads: Mapping[str, Tensor]) -> None:
    """Raises where :func:`~subnet.numerics.fixed_point.add_item_to_sections` would refuse the gradients."""
    if not grads:
        return
    highest = torch.stack([torch.stack(grad.aminmax()).abs().amax() for grad in grads.values()])
    if not bool(torch.isfinite(highest).all()):
        raise gradient_failure(item, grads)


def check_finite(item: ItemKey, output: memoryview | None, loss_bits: int | None) -> None:
    """Raises :class:`ItemFailed` for a loss or a boundary that is not finite."""
    if loss_bits is not None and loss_bits & 0x7F800000 == 0x7F800000:
        raise ItemFailed(failure_hash(item, "loss"), f"{item}: the loss is not finite")
    if output is None:
        return
    values = np.frombuffer(output, dtype=np.float32)
    if not (np.isfinite(values.min()) and np.isfinite(values.max())):
        raise ItemFailed(failure_hash(item, "boundary", _positions(values)), f"{item}: the boundary is not finite")


def failure_hash(item: ItemKey, kind: str, *details: bytes) -> str:
    hasher = blake3(_FAILURE_TAG + msgspec.msgpack.encode(item) + kind.encode())
    for detail in details:
        hasher.update(len(detail).to_bytes(8, "little") + detail)
    return hasher.hexdigest()


def _positions(values: NDArray[np.float32]) -> bytes:
    return np.packbits(~np.isfinite(values)).tobytes()


def sum_bits(losses: Sequence[Tensor]) -> int:
    """fp32 bits of the chunks' losses added in order."""
    total = losses[0]
    for loss in losses[1:]:
        total = total + loss
    return int(total.reshape(1).cpu().numpy().view(np.uint32)[0])


@dataclass(frozen=True)
class ItemShape:
    """Shape of a microbatch and of the chunks it is worked on in, and the form of its boundaries."""

    rows: int
    chunks: int
    length: int
    hidden: int
    vocab: int
    code: str = RAW
    """What boundaries are rounded to, :mod:`subnet.numerics.codes`."""
    routed: int = 0
    """Experts of the router loss, whose sums go with each chunk."""
    dialogues: bool = False
    """Tokens have the bits of :mod:`subnet.model.dialogues`."""

    @staticmethod
    def of(plan: ModelPlan) -> ItemShape:
        pipeline = plan.config.pipeline
        return ItemShape(
            rows=pipeline.microbatch_rows,
            chunks=pipeline.chunks,
            length=plan.config.data.sequence_length,
            hidden=plan.hidden_size,
            vocab=plan.vocab_size,
            code=pipeline.boundary_code,
            routed=num_routed(plan.model_config),
            dialogues=plan.config.objective.kind == "sft",
        )

    @property
    def routing_bytes(self) -> int:
        """Bytes at the end of a boundary that are router sums."""
        return 4 * 2 * self.routed * self.chunks

    @property
    def boundary_size_bytes(self) -> int:
        return coded_size(self.code, self.rows * self.length, self.hidden, self.chunks) + self.routing_bytes

    def coded(self, output: memoryview | None) -> memoryview | None:
        """A boundary as it is hashed, kept and sent, from its fp32 bytes."""
        if output is None or self.code == RAW:
            return output
        end = len(output) - self.routing_bytes
        states = np.frombuffer(output[:end], dtype=np.float32).reshape(-1, self.hidden)
        made = encode(self.code, states, self.chunks)
        return memoryview(bytes(made) + bytes(output[end:])) if self.routed else made

    def boundary(
        self, buffer: Buffer | None, device: torch.device, what: str, *, finite: bool = True
    ) -> list[Boundary]:
        """A foreign buffer as chunks (B, L, H) with their router sums, checked before it is used."""
        data = memoryview(buffer or b"").cast("B")
        if self.routed and len(data) != self.boundary_size_bytes:
            raise InputError(f"the {what} has {len(data)} bytes instead of {self.boundary_size_bytes}")
        end = len(data) - self.routing_bytes
        copies = copies_of(device)
        host = copies.buffer((self.rows, self.length, self.hidden))
        decode(self.code, data[:end], host.view(-1, self.hidden).numpy(), self.chunks, finite=finite, what=what)
        hidden = [copies.upload(part) for part in host.chunk(self.chunks)]
        if not self.routed:
            return [Boundary(chunk_BLH) for chunk_BLH in hidden]
        sums = np.frombuffer(data[end:], dtype="<f4").reshape(self.chunks, 2, self.routed)
        if finite and not bool(np.isfinite(sums).all()):
            raise InputError(f"the router sums of the {what} are not finite")
        routing = torch.from_numpy(sums.astype(np.float32)).to(device)
        return [Boundary(chunk_BLH, sums_2E) for chunk_BLH, sums_2E in zip(hidden, routing, strict=True)]

    def inputs(
        self, tokens: NDArray[np.integer] | None, device: torch.device, *, is_first: bool, is_last: bool
    ) -> list[ChunkInput]:
        """What a stage takes of the tokens, by chunk; of dialogues every stage needs them, else the first and the last."""
        if self.dialogues:
            return self._dialogues(tokens, device, is_first=is_first, is_last=is_last)
        if not is_first and not is_last:
            return [ChunkInput()] * self.chunks
        return [
            ChunkInput(tokens_BL=ids[:, :-1] if is_first else None, labels_BL=ids[:, 1:] if is_last else None)
            for ids in self.tokens(tokens, device, is_first=is_first)
        ]

    def _dialogues(
        self, tokens: NDArray[np.integer] | None, device: torch.device, *, is_first: bool, is_last: bool
    ) -> list[ChunkInput]:
        expected = (self.rows, self.length + 1)
        if tokens is None or tokens.shape != expected:
            raise InputError(f"tokens are {None if tokens is None else tokens.shape}, not {expected}")
        given = torch.from_numpy(tokens.astype(np.int64))
        if int(given.min()) < 0 or int(given.max()) >= 2 * LEARNT:
            raise InputError("a token of a dialogue is no 32-bit number")
        rows = split_bits(given)
        if int(rows.ids.max()) >= self.vocab:
            raise InputError(f"a token is outside of 0 to {self.vocab - 1}")
        count = rows.num_labels
        parts = (part.to(device).chunk(self.chunks) for part in (rows.ids[:, :-1], rows.positions_BL, rows.labels_BL))
        return [
            ChunkInput(
                tokens_BL=ids if is_first else None,
                labels_BL=labels if is_last else None,
                positions_BL=positions,
                num_labels=count,
            )
            for ids, positions, labels in zip(*parts, strict=True)
        ]

    def tokens(self, tokens: NDArray[np.integer] | None, device: torch.device, *, is_first: bool) -> list[Tensor]:
        """Rows of L + 1 tokens as chunks; -100 may mask a label, but is no token at the first stage."""
        expected = (self.rows, self.length + 1)
        if tokens is None or tokens.shape != expected:
            raise InputError(f"tokens are {None if tokens is None else tokens.shape}, not {expected}")
        ids = torch.from_numpy(tokens.astype(np.int64))
        masked = (ids < 0) & (ids != IGNORED_LABEL)
        if bool(masked.any()) or int(ids.max()) >= self.vocab or (is_first and int(ids[:, :-1].min()) < 0):
            raise InputError(f"a token is outside of 0 to {self.vocab - 1}")
        return list(ids.to(device).chunk(self.chunks))
