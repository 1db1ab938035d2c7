"""A checked export as objects of ``transformers``, and a prompt continued with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from iota.sdk.bars import without_bars
from subnet.model.own_code import MODULES
from subnet.model.sequence_files import load_directory


def load(directory: Path) -> tuple[Any, Any]:
    """(model in evaluation mode, tokenizer)."""
    with without_bars():
        if json.loads((directory / "config.json").read_bytes()).get("model_type") == MODULES:
            return load_directory(directory), AutoTokenizer.from_pretrained(directory, local_files_only=True)
        model: Any = AutoModelForCausalLM.from_pretrained(directory, local_files_only=True)
        tokenizer: Any = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    return model.eval(), tokenizer


def _written(
    model: nn.Sequential, tokens_BL: Tensor, max_new_tokens: int, temperature: float, top_k: int, seed: int
) -> Tensor:
    """The tokens and those that follow them, each by a whole forward: modules of a builder's own have no cache."""
    generator = torch.Generator().manual_seed(seed)
    with torch.inference_mode():
        for _ in range(max_new_tokens):
            logits_BV = model(tokens_BL)[:, -1].float()
            if temperature > 0:
                best_BK, ids_BK = logits_BV.topk(min(top_k, logits_BV.shape[-1]))
                picked = torch.multinomial(torch.softmax(best_BK / temperature, -1), 1, generator=generator)
                next_B1 = ids_BK.gather(-1, picked)
            else:
                next_B1 = logits_BV.argmax(-1, keepdim=True)
            tokens_BL = torch.cat([tokens_BL, next_B1], dim=-1)
    return tokens_BL


def continued(
    model: Any, tokenizer: Any, prompt: str, max_new_tokens: int, temperature: float, top_k: int, seed: int
) -> str:
    """The prompt and what follows it, as text."""
    tokens = tokenizer(prompt, return_tensors="pt").input_ids
    if isinstance(model, nn.Sequential):
        return str(tokenizer.decode(_written(model, tokens, max_new_tokens, temperature, top_k, seed)[0]))
    chance: dict[str, Any] = {"do_sample": True, "temperature": temperature, "top_k": top_k}
    with torch.random.fork_rng(devices=[]), torch.inference_mode():
        torch.manual_seed(seed)
        written = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=max_new_tokens,
            pad_token_id=0,
            **(chance if temperature > 0 else {"do_sample": False}),
        )
    return str(tokenizer.decode(written[0], skip_special_tokens=True))
