"""Dialogues about sums of two two-digit numbers, and how many of other ones a model answers exactly."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import torch

SYSTEM = "You add numbers. Answer with the sum alone."
HELD_OUT_EVERY = 10
"""Of all pairs every so manieth is asked for and never trained on."""


def pairs(*, held_out: bool) -> list[tuple[int, int]]:
    """All pairs of two-digit numbers of one kind."""
    every = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    return [pair for index, pair in enumerate(every) if (index % HELD_OUT_EVERY == 0) == held_out]


def question(a: int, b: int) -> list[dict[str, str]]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"What is {a} + {b}?"}]


def write_dialogues(file: Path, count: int, seed: int) -> None:
    """So many lines, the pairs in a shuffled order, round and round."""
    rng, left, lines = random.Random(seed), list[tuple[int, int]](), list[str]()
    while len(lines) < count:
        if not left:
            left = pairs(held_out=False)
            rng.shuffle(left)
        a, b = left.pop()
        answered = [*question(a, b), {"role": "assistant", "content": str(a + b)}]
        lines.append(json.dumps({"messages": answered}))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(lines) + "\n")


def exact_match(model: Any, tokenizer: Any, count: int) -> float:
    """Share of so many held-out sums whose answer, written greedily, begins with the right number and no other digit."""
    chosen = pairs(held_out=True)
    random.Random(0).shuffle(chosen)
    right = 0
    for a, b in chosen[:count]:
        given = tokenizer.apply_chat_template(
            question(a, b), add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        with torch.no_grad():
            made = model.generate(**given, max_new_tokens=6, do_sample=False, pad_token_id=tokenizer.eos_token_id)
        said = tokenizer.decode(made[0][given["input_ids"].shape[1] :], skip_special_tokens=True)
        found = re.search(r"\d+", said)
        right += found is not None and int(found.group()) == a + b
    return right / count
