"""A checked export as objects of ``transformers``, and a prompt continued with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from iota.sdk.bars import without_bars


def load(directory: Path) -> tuple[Any, Any]:
    """(model in evaluation mode, tokenizer)."""
    with without_bars():
        model: Any = AutoModelForCausalLM.from_pretrained(directory, local_files_only=True)
        tokenizer: Any = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    return model.eval(), tokenizer


def continued(
    model: Any, tokenizer: Any, prompt: str, max_new_tokens: int, temperature: float, top_k: int, seed: int
) -> str:
    """The prompt and what follows it, as text."""
    tokens = tokenizer(prompt, return_tensors="pt").input_ids
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
