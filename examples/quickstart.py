"""Train a small Llama on Moby-Dick with six miners on this machine, and let it write.

python examples/quickstart.py              # 60 steps; IOTA_STEPS=8 for a look
"""

import os
from pathlib import Path

from transformers import LlamaConfig

import iota

STEPS = int(os.environ.get("IOTA_STEPS", "60"))
BOOK = Path(iota.__file__).parent / "assets" / "moby_dick.txt"

config = LlamaConfig(
    vocab_size=2048,
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=3,
    num_attention_heads=4,
    max_position_embeddings=256,
    tie_word_embeddings=True,
)

if __name__ == "__main__":
    with iota.local(miners=int(os.environ.get("IOTA_MINERS", "6"))) as swarm:
        run = swarm.train(
            model=iota.Model.from_config(config),
            data=iota.Data.from_files(BOOK),
            objective=iota.Pretrain(seq_len=128, batch_items=8, item_rows=2),
            optimizer=iota.AdamW(lr=3e-3),
            schedule=iota.Cosine(warmup_steps=min(10, STEPS // 2), steps=STEPS),
            stages=3,
        )
        for report in run:
            print(f"step {report.step}/{report.steps}  loss {report.loss:.4f}  {report.tokens_per_s:,.0f} tokens/s")
        print("hold-out loss", round(run.evaluate().loss, 4))
        print("run root     ", run.root())
        print("sample       ", repr(run.sample("The whale")))
        model = run.model()  # plain transformers
        print("parameters   ", f"{model.num_parameters():,}")
