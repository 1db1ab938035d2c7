"""Teach a model to write in capitals, by adapters: a few MB a merge, and what comes back is a peft adapter.

python examples/lora.py                    # a tiny model drawn here; IOTA_MODEL=DIR for a pretrained directory
"""

import os
from pathlib import Path

import iota

STEPS = int(os.environ.get("IOTA_STEPS", "60"))
BOOK = Path(iota.__file__).parent / "assets" / "moby_dick.txt"
TINY = {
    "model_type": "llama",
    "vocab_size": 1024,
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}

if __name__ == "__main__":
    given = os.environ.get("IOTA_MODEL")
    with iota.local(miners=3) as swarm:
        run = swarm.train(
            iota.Model.from_pretrained(given) if given else iota.Model.from_config(TINY),
            iota.Data.from_iterable(line.upper() for line in BOOK.read_text().split("\n\n")[:2000]),
            iota.Pretrain(seq_len=128, batch_items=8, item_rows=2),
            iota.AdamW(lr=2e-3, weight_decay=0.0),
            iota.Cosine(warmup_steps=min(10, STEPS // 2), steps=STEPS),
            stages=3,
            trainable=iota.LoRA(rank=8, alpha=16),
        )
        for report in run:
            print(f"step {report.step}/{report.steps}  loss {report.loss:.4f}")
        done = run.export("lora-adapter")
        print("adapter   ", done.directory, f"{done.num_parameters:,} parameters")
        print("run root  ", run.root())
