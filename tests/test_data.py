"""Any row is found by arithmetic, read from checked row groups, and data that can't be used is refused with the remedy."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from subnet.errors import ConfigError, HashMismatch, InputError
from subnet.model.data import (
    ROW_GROUP_BYTES,
    DataManifest,
    SampleOrder,
    Shard,
    TokenStream,
    decode_manifest,
    encode_manifest,
    num_samples,
    permute,
    permute_array,
    row_group_hashes,
)
from subnet.model.data_checks import check_data
from subnet.run.config import (
    NO_AUDITS,
    DataSection,
    EvaluationSection,
    ModelSection,
    PipelineSection,
    RunConfig,
    RunSection,
)
from subnet.words import BlobHash, ItemKey

SHARD_TOKENS = 3 * ROW_GROUP_BYTES // 2


def config(length: int = 100, *, rows: int = 4, microbatches: int = 3, evaluation: int = 8) -> RunConfig:
    return RunConfig(
        audit=NO_AUDITS,
        run=RunSection(name="r", seed=11),
        model=ModelSection(config={"model_type": "llama"}),
        data=DataSection(sequence_length=length),
        pipeline=PipelineSection(microbatches=microbatches, microbatch_rows=rows),
        evaluation=EvaluationSection(rows=evaluation),
    )


def stream(tokens: np.ndarray, dtype: str, shard_bytes: int, store: dict[BlobHash, bytes]) -> TokenStream:
    raw = tokens.astype(dtype).tobytes()
    shards = []
    for start in range(0, len(raw), shard_bytes):
        part = raw[start : start + shard_bytes]
        blob = BlobHash(blake3(part).hexdigest())
        store[blob] = part
        shards.append(Shard(blob, len(part), row_group_hashes(part)))
    return TokenStream(len(tokens), tuple(shards))


def made(
    num_train: int, num_holdout: int, *, vocab: int = 5000, token_bytes: int = 2
) -> tuple[DataManifest, np.ndarray, np.ndarray, dict[BlobHash, bytes]]:
    generator = np.random.default_rng(0)
    train, holdout = generator.integers(0, vocab, num_train), generator.integers(0, vocab, num_holdout)
    store: dict[BlobHash, bytes] = {}
    dtype, shard_bytes = ("<u2" if token_bytes == 2 else "<u4"), SHARD_TOKENS * 2
    streams = [stream(tokens, dtype, shard_bytes, store) for tokens in (train, holdout)]
    return DataManifest(BlobHash("0" * 64), vocab, 0, token_bytes, streams[0], streams[1]), train, holdout, store


def fetch(order: SampleOrder, item: ItemKey, store: dict[BlobHash, bytes]) -> dict[tuple[BlobHash, int], bytes]:
    groups = {}
    for shard, index in order.ranges_for(item):
        start, end = shard.row_group_range(index)
        data = store[shard.blob][start:end]
        order.check_row_group(shard.blob, index, data)
        groups[shard.blob, index] = data
    return groups


@settings(max_examples=50, deadline=None)
@given(size=st.integers(1, 3000), seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 10**6))
def test_permutation_is_a_bijection(size: int, seed: int, epoch: int) -> None:
    found = permute_array(np.arange(size), size, seed, epoch)
    assert np.array_equal(np.sort(found), np.arange(size))
    for index in {0, size // 2, size - 1}:
        assert permute(index, size, seed, epoch) == found[index]


def test_permutation_mixes_and_depends_on_seed_and_epoch() -> None:
    orders = [permute_array(np.arange(1000), 1000, seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    for i, a in enumerate(orders):
        assert abs(np.corrcoef(a, np.arange(1000))[0, 1]) < 0.15
        for b in orders[:i]:
            assert (a == b).mean() < 0.02
    assert permute(2**61, 2**62, 5, 7) < 2**62
    # The order of the data is part of every run: these change only with the arithmetic.
    assert [permute(i, 20, 7, 0) for i in range(6)] == [11, 14, 17, 15, 9, 1]
    with pytest.raises(IndexError):
        permute(20, 20, 7, 0)
    with pytest.raises(IndexError):
        permute_array([20], 20, 7, 0)


@pytest.mark.parametrize("token_bytes", [2, 4])
def test_rows_are_the_tokens_of_the_arithmetic(token_bytes: int) -> None:
    """Rows cross row groups and shards, and an epoch ends within a step."""
    manifest, train, holdout, store = made(SHARD_TOKENS + 50_000, 2_000, token_bytes=token_bytes)
    order = SampleOrder(config(300), manifest)
    n = num_samples(len(train), 300)
    assert order.num_train_samples == n == (len(train) - 1) // 300
    for step in (-1, 0, 1, n // 12, n // 12 + 1):
        for microbatch in range(3):
            item = ItemKey(step, microbatch, 0)
            rows = order.assemble(item, fetch(order, item, store))
            assert rows.dtype == np.int64
            assert rows.shape == (4, 301)
            for r in range(4):
                index = (max(step, 0) * 3 + microbatch) * 4 + r
                start = permute(index % n, n, 11, index // n) * 300
                assert np.array_equal(rows[r], train[start : start + 301])
    held = num_samples(len(holdout), 300)
    for e in range(2):
        item = ItemKey(5, 3 + e, 0)
        rows = order.assemble(item, fetch(order, item, store))
        for r in range(4):
            start = (e * 4 + r) % held * 300
            assert np.array_equal(rows[r], holdout[start : start + 301])
    with pytest.raises(IndexError):
        order.ranges_for(ItemKey(5, 5, 0))


def test_an_epoch_reads_every_sample_once() -> None:
    manifest, *_ = made(4_000, 500)
    order = SampleOrder(config(100), manifest)
    assert order.num_train_samples == 39
    seen = [row for step in range(13) for m in range(3) for row in order.row_indices(step, m)]
    for epoch in range(4):
        assert sorted(seen[39 * epoch : 39 * (epoch + 1)]) == list(range(39))
    assert seen[:39] != seen[39:78]


def test_few_row_groups_are_read() -> None:
    manifest, *_ = made(SHARD_TOKENS + 50_000, 500)
    for microbatch in range(3):
        ranges = SampleOrder(config(100), manifest).ranges_for(ItemKey(0, microbatch, 1))
        assert 1 <= len(ranges) == len({(shard.blob, group) for shard, group in ranges}) <= 8


def test_altered_bytes_are_refused() -> None:
    manifest, _, _, store = made(50_000, 500)
    order, item = SampleOrder(config(), manifest), ItemKey(0, 0, 0)
    shard = manifest.train.shards[0]
    good = store[shard.blob][:ROW_GROUP_BYTES]
    order.check_row_group(shard.blob, 0, good)
    for bad in (good[:-1], bytes([good[0] ^ 1]) + good[1:], good + b"\0", b""):
        with pytest.raises(HashMismatch):
            order.check_row_group(shard.blob, 0, bad)
    for blob, index in ((shard.blob, 99), (shard.blob, -1), (BlobHash("f" * 64), 0)):
        with pytest.raises(InputError):
            order.check_row_group(blob, index, good)
    small = msgspec.structs.replace(manifest, vocab_size=10)
    order = SampleOrder(config(), small)
    with pytest.raises(InputError, match="beyond the vocabulary of 10"):
        order.assemble(item, fetch(order, item, store))


def test_manifest_round_trips_and_is_checked() -> None:
    manifest, *_ = made(SHARD_TOKENS + 10, 500)
    assert decode_manifest(encode_manifest(manifest)) == manifest
    assert len(manifest.shards) == 3
    first, second = manifest.train.shards
    assert first.shard_id == blake3(b"".join(bytes.fromhex(h) for h in first.row_group_hashes)).hexdigest()
    assert first.shard_id != second.shard_id
    swapped = TokenStream(manifest.train.num_tokens, (second, first))
    bad = [
        lambda: msgspec.structs.replace(manifest, version=2),
        lambda: msgspec.structs.replace(manifest, token_bytes=3),
        lambda: msgspec.structs.replace(manifest, vocab_size=2**16 + 1),
        lambda: msgspec.structs.replace(manifest, end_of_text=5000),
        lambda: msgspec.structs.replace(manifest, train=msgspec.structs.replace(manifest.train, num_tokens=3)),
        lambda: msgspec.structs.replace(manifest, train=swapped),
        lambda: Shard(first.blob, first.size_bytes + ROW_GROUP_BYTES, first.row_group_hashes),
        lambda: decode_manifest(b"{}"),
        lambda: decode_manifest(encode_manifest(manifest).replace(b'"vocab_size"', b'"vocab"')),
    ]
    for build in bad:
        with pytest.raises(InputError):
            build()


REFUSED = [
    (0, 500, 8, 5000, "data.sources hold no text to train on (name files that are not empty)"),
    (
        100,
        500,
        8,
        5000,
        "the training text has 100 tokens, a sample needs 101 (add text to data.sources or lower data.sequence_length)",
    ),
    (
        101,
        100,
        8,
        5000,
        "the hold-out text has 100 tokens, a sample needs 101 (raise data.holdout_fraction, add text, lower "
        "data.sequence_length, or set evaluation.rows = 0)",
    ),
    (
        101,
        101,
        8,
        4999,
        "the data's vocabulary has 5000 tokens, the model's vocab_size is 4999 (set vocab_size to 5000 or more in the "
        "model's config, or prepare the data with a vocabulary of at most 4999)",
    ),
]


@pytest.mark.parametrize(("train", "holdout", "rows", "vocab", "message"), REFUSED)
def test_unusable_data_is_refused(train: int, holdout: int, rows: int, vocab: int, message: str) -> None:
    manifest, *_ = made(train, holdout)
    with pytest.raises(ConfigError) as caught:
        check_data(config(evaluation=rows), manifest, vocab)
    assert str(caught.value) == message


def test_just_enough_data_is_enough() -> None:
    check_data(config(), made(101, 101)[0], 5000)
    check_data(config(evaluation=0), made(101, 0)[0], 5000)
