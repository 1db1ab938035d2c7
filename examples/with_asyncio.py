"""Two runs of one swarm from asyncio: one is followed while the other waits in the queue.

python examples/with_asyncio.py
"""

import asyncio
import os
from pathlib import Path

from transformers import LlamaConfig

import iota

STEPS = int(os.environ.get("IOTA_STEPS", "30"))
BOOK = Path(iota.__file__).parent / "assets" / "moby_dick.txt"
MODEL = LlamaConfig(
    vocab_size=1024,
    hidden_size=64,
    intermediate_size=192,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=128,
)


async def train(swarm: iota.Swarm, seed: int) -> iota.Run:
    """Methods that block go into a thread; ``async for`` and ``await`` need none."""
    run = await asyncio.to_thread(
        swarm.train,
        iota.Model.from_config(MODEL),
        iota.Data.from_files(BOOK),
        iota.Pretrain(seq_len=64, batch_items=4, item_rows=2),
        schedule=iota.Cosine(steps=STEPS),
        stages=2,
        seed=seed,
        name=f"seed-{seed}",
    )
    async for report in run:
        print(f"{run.name}: step {report.step}/{report.steps}, loss {report.loss:.4f}")
    return run


async def main() -> None:
    async with iota.local(miners=2) as swarm:
        runs = await asyncio.gather(train(swarm, 1), train(swarm, 2))
        for run in runs:
            text = await asyncio.to_thread(run.sample, "Call me", max_new_tokens=20)
            print(run.name, await asyncio.to_thread(run.root), repr(text))


if __name__ == "__main__":
    asyncio.run(main())
