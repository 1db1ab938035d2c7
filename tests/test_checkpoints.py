"""Weights from a seed, to and from Hugging Face directories that plain `transformers` loads, chunks checked by hash."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from model_cases import plain_model, tiny_plan, tokens_of
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, AutoTokenizer

from subnet.errors import ConfigError, HashMismatch, InputError
from subnet.model.checkpoints import initial_weights, plan_shards, write_pretrained
from subnet.model.pretrained import PretrainedDirectory
from subnet.model.registry import load_architecture
from subnet.model.snapshots import ChunkRef, SnapshotManifest, cut_array, decode_manifest, fill_array, store_tensor
from subnet.numerics.layout import TensorSpec
from subnet.words import BlobHash


def test_initial_weights_depend_on_seed_and_name_alone() -> None:
    whole = initial_weights(tiny_plan((0,)))
    cut = tiny_plan((0, 2))
    part = initial_weights(cut, cut.stage_tensors[1])
    assert all(torch.equal(tensor, whole[name]) for name, tensor in part.items())
    assert torch.equal(whole["model.norm.weight"], torch.ones(32))
    first, second = (whole[f"model.layers.{i}.self_attn.q_proj.weight"] for i in range(2))
    assert not torch.equal(first, second)
    digest = blake3(b"iota/init/1\0" + (7).to_bytes(8, "little") + b"lm_head.weight").digest()[:8]
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") % 2**63)
    assert torch.equal(whole["lm_head.weight"], torch.empty(97, 32).normal_(0, 0.02, generator=generator))


@pytest.mark.parametrize("max_shard_bytes", [1 << 30, 20_000], ids=["one-file", "shards"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_export_loads_in_plain_transformers_and_reads_back(tmp_path: Path, tied: bool, max_shard_bytes: int) -> None:
    plan = tiny_plan(tie_word_embeddings=tied, eos_token_id=0, bos_token_id=None)
    weights = initial_weights(plan)
    tokenizer = tmp_path / "tokenizer.json"
    Tokenizer(models.WordLevel({"<end>": 0, "a": 1}, unk_token="<end>")).save(str(tokenizer))
    target = tmp_path / "deep" / "model"
    write_pretrained(
        target,
        plan.model_config,
        plan.canonical,
        lambda spec: weights[spec.name],
        tokenizer=tokenizer,
        max_shard_bytes=max_shard_bytes,
    )
    files = {path.name for path in target.iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"} <= files
    assert ("model.safetensors.index.json" in files) == (max_shard_bytes == 20_000)
    loaded = AutoModelForCausalLM.from_pretrained(target).eval()
    assert loaded.dtype == torch.float32
    ids = torch.from_numpy(tokens_of(1))
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, plain_model(plan, weights)(ids).logits)
    assert AutoTokenizer.from_pretrained(target).eos_token == "<end>"
    opened = PretrainedDirectory(target)
    assert load_architecture(opened.model_config).model_config == plan.model_config
    back = {spec.name: tensor for spec, tensor in opened.read(plan.canonical)}
    assert all(torch.equal(tensor, weights[name]) for name, tensor in back.items())
    assert [path.name for path in target.parent.iterdir()] == ["model"]


def test_a_failed_export_leaves_nothing(tmp_path: Path) -> None:
    plan = tiny_plan()
    weights = initial_weights(plan)

    def read(spec: TensorSpec) -> torch.Tensor:
        if spec.name == "model.norm.weight":
            raise OSError("gone")
        return weights[spec.name]

    with pytest.raises(OSError, match="gone"):
        write_pretrained(tmp_path / "m", plan.model_config, plan.canonical, read)
    assert not list(tmp_path.iterdir())
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "mine").touch()
    with pytest.raises(ConfigError, match="not an empty"):
        write_pretrained(tmp_path / "m", plan.model_config, plan.canonical, lambda spec: weights[spec.name])
    with pytest.raises(ConfigError, match="no tokenizer"):
        write_pretrained(
            tmp_path / "n", plan.model_config, plan.canonical, lambda spec: weights[spec.name], tokenizer=tmp_path
        )
    assert {path.name for path in tmp_path.iterdir()} == {"m"}


def test_half_precision_checkpoints_are_read_as_fp32(tmp_path: Path) -> None:
    plan = tiny_plan()
    weights = {name: tensor.bfloat16() for name, tensor in initial_weights(plan).items()}
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(plan.model_config))
    for spec, tensor in PretrainedDirectory(tmp_path).read(plan.canonical):
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, weights[spec.name].float())


def test_a_wrong_directory_says_what_is_wrong(tmp_path: Path) -> None:
    plan = tiny_plan()
    with pytest.raises(ConfigError, match="not a directory"):
        PretrainedDirectory(tmp_path / "absent")
    with pytest.raises(ConfigError, match=r"config\.json"):
        PretrainedDirectory(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(plan.model_config))
    with pytest.raises(ConfigError, match=r"no model\.safetensors"):
        PretrainedDirectory(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors at all")
    with pytest.raises(ConfigError, match="can't be read"):
        PretrainedDirectory(tmp_path)
    save_file({"lm_head.weight": torch.zeros(3, 3)}, tmp_path / "model.safetensors")
    opened = PretrainedDirectory(tmp_path)
    with pytest.raises(ConfigError, match="no tensor"):
        list(opened.read(plan.canonical))
    with pytest.raises(ConfigError, match=r"lm_head\.weight is \(3, 3\)"):
        list(opened.read(plan.canonical[-1:]))
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"x": "../x"}}')
    with pytest.raises(ConfigError, match="outside"):
        PretrainedDirectory(tmp_path)


@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=12), limit=st.integers(4, 200))
@settings(max_examples=30, deadline=None)
def test_shards_keep_order_and_size(sizes: list[int], limit: int) -> None:
    specs = [TensorSpec(f"t{i}", (size,), False) for i, size in enumerate(sizes)]
    shards = plan_shards(specs, limit)
    assert [spec for shard in shards for spec in shard] == specs
    assert all(shard for shard in shards)
    assert all(len(shard) == 1 or 4 * sum(s.num_elements for s in shard) <= limit for shard in shards)


@given(data=st.binary(max_size=200), chunk=st.integers(1, 70))
@settings(max_examples=50, deadline=None)
def test_arrays_survive_cutting(data: bytes, chunk: int) -> None:
    parts = [(ref, bytes(part)) for ref, part in cut_array(memoryview(data), chunk)]
    assert all(ref.size_bytes <= chunk for ref, _ in parts)
    blobs = {ref.hash: part for ref, part in parts}
    target = bytearray(b"\xff" * len(data))
    fill_array([ref for ref, _ in parts], memoryview(target), lambda ref: blobs[ref.hash])
    assert target == data


def test_chunks_are_checked_before_they_are_written() -> None:
    spec = TensorSpec("t", (6,), False)
    blobs: dict[str, bytes] = {}
    entry = store_tensor(
        spec, {"weight": memoryview(bytes(range(24)))}, b"l" * 32, lambda b, d: blobs.update({b: bytes(d)})
    )
    assert entry.arrays["exp_avg"] == ()
    refs = entry.arrays["weight"]
    target = bytearray(b"\xff" * 24)
    with pytest.raises(HashMismatch):
        fill_array(refs, memoryview(target), lambda _ref: bytes(24))
    assert target == b"\xff" * 24
    with pytest.raises(InputError, match="instead of"):
        fill_array([ChunkRef(BlobHash("0"), 23)], memoryview(target), lambda _ref: b"")
    fill_array((), memoryview(target), lambda _ref: b"")
    assert target == bytes(24)
    with pytest.raises(ValueError, match="bytes instead of"):
        store_tensor(spec, {"weight": memoryview(bytes(20))}, b"", lambda _b, _d: None)
    manifest = SnapshotManifest(3, (entry,))
    assert decode_manifest(manifest.encode()) == manifest
    with pytest.raises(InputError, match="not a snapshot manifest"):
        decode_manifest(b"\x93abc")
