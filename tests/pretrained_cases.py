"""A small Hugging Face directory, as somebody might bring it: bf16 weights in shards, tokenizer, chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from iota.tokenizer import train_tokenizer

ROOT = Path(__file__).resolve().parent.parent
VOCAB = 300
CHAT = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def book(size: int = 60_000) -> str:
    return (ROOT / "iota" / "assets" / "moby_dick.txt").read_text(encoding="utf-8")[:size]


def save_model(directory: Path, model_type: str = "llama", **changes: Any) -> Path:
    """The library's own ``save_pretrained`` of random weights."""
    config = AutoConfig.for_model(model_type, **{**SHAPE, **changes})
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(directory, max_shard_size="30KB")
    return directory


def save_tokenizer(directory: Path, vocab_size: int = VOCAB) -> Path:
    (directory / "tokenizer.json").write_bytes(train_tokenizer([book()], vocab_size).json)
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(described))
    (directory / "chat_template.jinja").write_text(CHAT)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 0, "max_new_tokens": 7}))
    return directory


def change_tensors(directory: Path, changes: Mapping[str, Tensor | None]) -> None:
    """Tensors put into the last shard, or (None) taken out; the index is brought up to it."""
    index_file = directory / "model.safetensors.index.json"
    index = json.loads(index_file.read_text())
    for name, tensor in changes.items():
        shard = index["weight_map"].get(name, sorted(set(index["weight_map"].values()))[-1])
        held = load_file(directory / shard)
        if tensor is None:
            held.pop(name)
            index["weight_map"].pop(name)
        else:
            held[name] = tensor
            index["weight_map"][name] = shard
        save_file(held, directory / shard, metadata={"format": "pt"})
    index_file.write_text(json.dumps(index))


def weights_of(directory: Path) -> dict[str, Tensor]:
    """All tensors of all shards."""
    found: dict[str, Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        found.update(load_file(path))
    return found
