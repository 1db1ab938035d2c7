"""Token data by arithmetic: any row of any item is found from (run file, manifest, item) without a list in memory.

Foreign bytes are hashed before they are used, and a row never holds a token outside the vocabulary.
"""

from __future__ import annotations

import bisect
import struct
from collections.abc import Iterable, Mapping
from functools import cached_property

import msgspec
import numpy as np
import numpy.typing as npt
from blake3 import blake3

from subnet.errors import ConfigError, HashMismatch, InputError
from subnet.model.mixture import Mixture
from subnet.model.token_bits import TOKEN_BITS
from subnet.run.config import RunConfig
from subnet.words import BlobHash, ItemKey

ROW_GROUP_BYTES = 64 * 1024
"""Unit of reading and checking. It is part of every shard's id: changing it changes all of them."""

MANIFEST_VERSION = 1
"""Version of :class:`DataManifest`. Changing it makes older members refuse the data."""

_ROUNDS = 8
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK64 = 2**64 - 1


def _feistel_keys(seed: int, epoch: int) -> tuple[int, ...]:
    digest = blake3(b"iota/permutation/1\0" + struct.pack("<QQ", seed, epoch)).digest(length=8 * _ROUNDS)
    return struct.unpack(f"<{_ROUNDS}Q", digest)


def _half_bits(size: int) -> int:
    return max(1, ((size - 1).bit_length() + 1) // 2)


def permute(index: int, size: int, seed: int, epoch: int) -> int:
    """Where ``index`` of [0, size) goes in the epoch's shuffle: a bijection, in constant memory.

    A Feistel network of eight rounds on 2h bits, h = ceil(bits(size - 1) / 2), walked until the value is below
    ``size``. Its round keys are the little-endian u64 words of the first 64 bytes of
    BLAKE3("iota/permutation/1\\0" + u64 seed + u64 epoch); a round maps (left, right) to
    (right, left ^ (mix(right + key) mod 2^h)), with mix the finaliser of splitmix64.
    """
    if not 0 <= index < size:
        raise IndexError(f"index {index} is outside [0, {size})")
    keys, half = _feistel_keys(seed, epoch), _half_bits(size)
    mask = (1 << half) - 1
    value = index
    while True:
        left, right = value >> half, value & mask
        for key in keys:
            z = (right + key) & _MASK64
            z = ((z ^ (z >> 30)) * _MIX_1) & _MASK64
            z = ((z ^ (z >> 27)) * _MIX_2) & _MASK64
            left, right = right, left ^ ((z ^ (z >> 31)) & mask)
        value = (left << half) | right
        if value < size:
            return value


def permute_array(indices: npt.ArrayLike, size: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """:func:`permute` of many indices at once."""
    value = np.array(indices, dtype=np.uint64).reshape(-1)
    if value.size and int(value.max()) >= size:
        raise IndexError(f"index {int(value.max())} is outside [0, {size})")
    keys, half = _feistel_keys(seed, epoch), np.uint64(_half_bits(size))
    mask = np.uint64((1 << int(half)) - 1)
    todo = np.arange(value.size)
    while todo.size:
        left, right = value[todo] >> half, value[todo] & mask
        for key in keys:
            z = right + np.uint64(key)
            z = (z ^ (z >> np.uint64(30))) * np.uint64(_MIX_1)
            z = (z ^ (z >> np.uint64(27))) * np.uint64(_MIX_2)
            left, right = right, left ^ ((z ^ (z >> np.uint64(31))) & mask)
        value[todo] = (left << half) | right
        todo = todo[value[todo] >= np.uint64(size)]
    return value.astype(np.int64)


def row_group_hashes(shard: bytes | memoryview) -> tuple[BlobHash, ...]:
    """BLAKE3 of each 64 KiB of a shard, the last one shorter."""
    view = memoryview(shard)
    starts = range(0, len(view), ROW_GROUP_BYTES)
    return tuple(BlobHash(blake3(view[start : start + ROW_GROUP_BYTES]).hexdigest()) for start in starts)


class Shard(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of tokens, little-endian and nothing else."""

    blob: BlobHash
    """BLAKE3 of the whole file: where the store has it."""
    size_bytes: int
    row_group_hashes: tuple[BlobHash, ...]

    def __post_init__(self) -> None:
        if self.size_bytes <= 0 or len(self.row_group_hashes) != -(-self.size_bytes // ROW_GROUP_BYTES):
            raise InputError(
                f"shard {self.blob[:10]}: {self.size_bytes} bytes in {len(self.row_group_hashes)} row groups"
            )

    @property
    def shard_id(self) -> BlobHash:
        """BLAKE3 of the raw row-group hashes: names the shard so that any one group can be checked against it."""
        return BlobHash(blake3(b"".join(bytes.fromhex(h) for h in self.row_group_hashes)).hexdigest())

    def row_group_range(self, index: int) -> tuple[int, int]:
        """First byte and byte after the last of a row group."""
        if not 0 <= index < len(self.row_group_hashes):
            raise IndexError(
                f"shard {self.blob[:10]} has {len(self.row_group_hashes)} row groups, not one numbered {index}"
            )
        return index * ROW_GROUP_BYTES, min((index + 1) * ROW_GROUP_BYTES, self.size_bytes)


class TokenStream(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tokens in order, over shards of which all but the last fill their row groups."""

    num_tokens: int
    shards: tuple[Shard, ...] = ()


class Domain(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A source's part of both streams: so many tokens of each, behind those of the sources before it."""

    name: str
    train_tokens: int
    holdout_tokens: int


class DataManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All that a run needs to know of its data: where the tokens are, and what the bytes must hash to."""

    tokenizer: BlobHash
    """BLAKE3 of ``tokenizer.json``."""
    vocab_size: int
    """Largest token id + 1."""
    end_of_text: int
    """The token between documents."""
    token_bytes: int
    """2 (u16) or 4 (u32)."""
    train: TokenStream
    holdout: TokenStream
    version: int = MANIFEST_VERSION
    domains: tuple[Domain, ...] | msgspec.UnsetType = msgspec.UNSET
    """Where the sources lie in the streams, if there is more than one."""
    dialogues: int | msgspec.UnsetType = msgspec.UNSET
    """Rows of dialogues (:mod:`subnet.model.dialogues`) of so many tokens each; unset: running text."""

    def __post_init__(self) -> None:
        if self.version != MANIFEST_VERSION:
            raise InputError(f"data manifest of version {self.version}", hint=f"this program reads {MANIFEST_VERSION}")
        if self.token_bytes not in (2, 4) or not 0 <= self.end_of_text < self.vocab_size <= 2 ** (8 * self.token_bytes):
            raise InputError(f"data manifest: {self.vocab_size} tokens of {self.token_bytes} bytes")
        for stream in (self.train, self.holdout):
            sizes = [shard.size_bytes for shard in stream.shards]
            if sum(sizes) != stream.num_tokens * self.token_bytes or any(size % ROW_GROUP_BYTES for size in sizes[:-1]):
                raise InputError(f"data manifest: {stream.num_tokens} tokens in shards of {sum(sizes)} bytes")
        if self.dialogues is not msgspec.UNSET and (self.token_bytes != 4 or self.dialogues < 1):
            raise InputError(f"data manifest: dialogues of {self.dialogues} tokens of {self.token_bytes} bytes")
        if self.domains is msgspec.UNSET:
            return
        sums = [sum(domain.train_tokens for domain in self.domains), sum(d.holdout_tokens for d in self.domains)]
        if sums != [self.train.num_tokens, self.holdout.num_tokens] or any(
            domain.train_tokens < 0 or domain.holdout_tokens < 0 for domain in self.domains
        ):
            raise InputError(f"data manifest: its domains have {sums[0]} and {sums[1]} tokens")

    @property
    def domain_names(self) -> tuple[str, ...]:
        """One for each source; empty where there is one only."""
        return () if self.domains is msgspec.UNSET else tuple(domain.name for domain in self.domains)

    def domain_rows(self, length: int, *, holdout: bool) -> list[tuple[int, int]]:
        """(first token, rows of ``length`` tokens) of each domain in one of the streams."""
        found: list[tuple[int, int]] = []
        first = 0
        for domain in () if self.domains is msgspec.UNSET else self.domains:
            tokens = domain.holdout_tokens if holdout else domain.train_tokens
            last_row_ends = 0 if self.dialogues is not msgspec.UNSET else 1  # text: a row predicts the token behind it
            found.append((first, max(0, (tokens - last_row_ends) // length)))
            first += tokens
        return found

    @property
    def shards(self) -> tuple[Shard, ...]:
        return self.train.shards + self.holdout.shards

    @property
    def token_dtype(self) -> np.dtype[np.uint16] | np.dtype[np.uint32]:
        return np.dtype("<u2") if self.token_bytes == 2 else np.dtype("<u4")


def encode_manifest(manifest: DataManifest) -> bytes:
    """JSON of the manifest; its BLAKE3 names the data of a run."""
    return msgspec.json.encode(manifest)


def decode_manifest(data: bytes) -> DataManifest:
    try:
        return msgspec.json.decode(data, type=DataManifest)
    except msgspec.MsgspecError as error:
        raise InputError(f"not a data manifest: {error}") from error


def num_samples(num_tokens: int, sequence_length: int) -> int:
    """Samples of ``sequence_length + 1`` tokens, each starting ``sequence_length`` after the one before."""
    return max(0, (num_tokens - 1) // sequence_length)


class _StreamIndex:
    """Where the row groups of one stream lie."""

    def __init__(self, stream: TokenStream, token_bytes: int) -> None:
        self.shards = stream.shards
        self.token_bytes = token_bytes
        self.starts = [0]
        for shard in stream.shards:
            self.starts.append(self.starts[-1] + shard.size_bytes)

    def pieces(self, first_token: int, num_tokens: int) -> Iterable[tuple[Shard, int, int, int]]:
        """(shard, row group, first byte, byte after the last within the group) of consecutive tokens, in order."""
        at, end = first_token * self.token_bytes, (first_token + num_tokens) * self.token_bytes
        while at < end:
            number = bisect.bisect_right(self.starts, at) - 1
            shard, offset = self.shards[number], at - self.starts[number]
            group, inside = divmod(offset, ROW_GROUP_BYTES)
            _, group_end = shard.row_group_range(group)
            take = min(end - at, group_end - offset)
            yield shard, group, inside, inside + take
            at += take


class SampleOrder:
    """Which rows belong to which item of a run, and where their tokens lie (docs/arithmetic.md, section 3)."""

    def __init__(self, config: RunConfig, manifest: DataManifest) -> None:
        self.manifest = manifest
        self.sequence_length = config.data.sequence_length
        self.num_items = config.num_items
        self.parts_per_item = config.parts_per_item
        self.rows = config.pipeline.microbatch_rows
        self.num_evaluation_items = config.num_evaluation_items
        self.seed = config.run.seed
        self.first_step = config.run.first_step
        self.num_train_samples = num_samples(manifest.train.num_tokens, self.sequence_length)
        self.num_holdout_samples = num_samples(manifest.holdout.num_tokens, self.sequence_length)
        self._train = _StreamIndex(manifest.train, manifest.token_bytes)
        self._holdout = _StreamIndex(manifest.holdout, manifest.token_bytes)

        self._holdout_domains = [d for d in manifest.domain_rows(self.sequence_length, holdout=True) if d[1]]
        self._domains = manifest.domain_rows(self.sequence_length, holdout=False)
        self._mixture: Mixture | None = None
        if config.data.weights and len(self._domains) > 1:
            if len(config.data.weights) != len(self._domains) or not all(count for _, count in self._domains):
                raise InputError("the run's data.weights don't fit its data")
            sizes = [count for _, count in self._domains]
            self._mixture = Mixture(config.data.weights, sizes, self.seed, permute)

    @cached_property
    def _shards(self) -> dict[BlobHash, Shard]:
        return {shard.blob: shard for shard in self.manifest.shards}

    def row_indices(self, step: int, microbatch: int, part: int = 1) -> list[int]:
        """Training samples of an item's microbatch; the calibration step -1 reads the data of step 0.

        With lanes an item (a lane) has parts, 1 to ``parts_per_item``.
        """
        return [
            permute(i % self.num_train_samples, self.num_train_samples, self.seed, i // self.num_train_samples)
            for i in self._numbers(step, microbatch, part)
        ]

    def _numbers(self, step: int, microbatch: int, part: int) -> range:
        """The rows of an item's microbatch among all that the run reads."""
        if not 0 <= microbatch < self.num_items:
            raise IndexError(f"item {microbatch} of {self.num_items}")
        if not 1 <= part <= self.parts_per_item:
            raise IndexError(f"part {part} of {self.parts_per_item}")
        if not self.num_train_samples:
            raise ConfigError("the training text is shorter than a sample", hint="add text to data.sources")
        item = (self.first_step + max(step, 0)) * self.num_items + microbatch
        first = (item * self.parts_per_item + part - 1) * self.rows
        return range(first, first + self.rows)

    def domains_of(self, step: int, microbatch: int, part: int = 1) -> list[int]:
        """The source that each row of a training item is of, by number; for runs with ``data.weights``."""
        if self._mixture is None:
            raise ConfigError("the run has no data.weights", hint="its rows are of no source in particular")
        return [self._mixture.row(number)[0] for number in self._numbers(step, microbatch, part)]

    def holdout_domains(self, evaluation_item: int) -> list[int]:
        """The source (:attr:`DataManifest.domain_names`) of each row of an evaluation item: one for all, so that the sealed
        loss of an item is that source's; 0 where there is one only."""
        if not self._holdout_domains:
            return [0] * self.rows
        there = [i for i, d in enumerate(self.manifest.domain_rows(self.sequence_length, holdout=True)) if d[1]]
        return [there[evaluation_item % len(there)]] * self.rows

    def _holdout_tokens(self, evaluation_item: int) -> list[int]:
        """First tokens of its rows; of several sources each has an item in turn."""
        if not self._holdout_domains:
            return [sample * self.sequence_length for sample in self.holdout_rows(evaluation_item)]
        turn, source = divmod(evaluation_item, len(self._holdout_domains))
        start, rows = self._holdout_domains[source]
        return [start + nth % rows * self.sequence_length for nth in range(turn * self.rows, (turn + 1) * self.rows)]

    def _train_tokens(self, step: int, microbatch: int, part: int) -> list[int]:
        if self._mixture is None:
            return [sample * self.sequence_length for sample in self.row_indices(step, microbatch, part)]
        places = [self._mixture.row(number) for number in self._numbers(step, microbatch, part)]
        return [self._domains[source][0] + row * self.sequence_length for source, row in places]

    def holdout_rows(self, evaluation_item: int) -> list[int]:
        """Hold-out samples of an evaluation item: in order, the same at each evaluation."""
        if not self.num_holdout_samples:
            raise ConfigError("the hold-out text is shorter than a sample", hint="raise data.holdout_fraction")
        first = evaluation_item * self.rows
        return [i % self.num_holdout_samples for i in range(first, first + self.rows)]

    def _samples(self, item: ItemKey, part: int) -> tuple[_StreamIndex, list[int]]:
        """The stream, and the first token of each row."""
        if item.microbatch >= self.num_items:
            evaluation_item = item.microbatch - self.num_items
            if evaluation_item >= self.num_evaluation_items:
                raise IndexError(f"evaluation item {evaluation_item} of {self.num_evaluation_items}")
            return self._holdout, self._holdout_tokens(evaluation_item)
        return self._train, self._train_tokens(item.step, item.microbatch, max(part, 1))

    def ranges_for(self, item: ItemKey, part: int = 0) -> list[tuple[Shard, int]]:
        """The row groups that :meth:`assemble` needs for an item (with lanes: a part of it), each once, in the order of
        first use."""
        stream, starts = self._samples(item, part)
        needed: dict[tuple[BlobHash, int], tuple[Shard, int]] = {}
        for start in starts:
            for shard, group, _, _ in stream.pieces(start, self.sequence_length + 1):
                needed.setdefault((shard.blob, group), (shard, group))
        return list(needed.values())

    def check_row_group(self, blob: BlobHash, index: int, data: bytes | memoryview) -> None:
        """Refuse the bytes of a row group unless they are the manifest's; do it once, on arrival."""
        shard = self._shards.get(blob)
        if shard is None or not 0 <= index < len(shard.row_group_hashes):
            raise InputError(f"row group {index} of {blob[:10]} is not of this run's data")
        if blake3(data).hexdigest() != shard.row_group_hashes[index]:
            raise HashMismatch(f"row group {index} of shard {blob[:10]} fails its hash", hint="fetch it again")

    def assemble(
        self, item: ItemKey, row_groups: Mapping[tuple[BlobHash, int], bytes | memoryview], part: int = 0
    ) -> npt.NDArray[np.int64]:
        """Tokens of an item's rows, shape (rows, sequence_length + 1), from checked row groups.

        Those of dialogues have the bits of :mod:`subnet.model.token_bits`.
        """
        stream, starts = self._samples(item, part)
        rows = np.empty((self.rows, self.sequence_length + 1), dtype=np.int64)
        dtype = self.manifest.token_dtype
        for row, start in zip(rows, starts, strict=True):
            at = 0
            for shard, group, first, end in stream.pieces(start, self.sequence_length + 1):
                tokens = np.frombuffer(memoryview(row_groups[shard.blob, group])[first:end], dtype=dtype)
                row[at : at + tokens.size] = tokens
                at += tokens.size
        ids = rows if self.manifest.dialogues is msgspec.UNSET else rows & TOKEN_BITS
        if ids.size and int(ids.max()) >= self.manifest.vocab_size:
            raise InputError(f"{item}: token {int(ids.max())} is beyond the vocabulary of {self.manifest.vocab_size}")
        return rows
