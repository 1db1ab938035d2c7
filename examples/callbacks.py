"""A progress bar, TensorBoard and a callback of one's own, while a miner is killed in the middle of the run.

python examples/callbacks.py && tensorboard --logdir runs
"""

import os
from pathlib import Path

from transformers import LlamaConfig

import iota

STEPS = int(os.environ.get("IOTA_STEPS", "40"))
BOOK = Path(iota.__file__).parent / "assets" / "moby_dick.txt"


class KillAndTell(iota.Callback):
    """kill -9 of a miner half-way; what happens then is told, and no bit of the result changes."""

    def __init__(self) -> None:
        self.killed = False

    def on_step_end(self, run: iota.Run, report: iota.StepReport) -> None:
        if report.step >= STEPS // 2 and not self.killed:
            self.killed = True
            run.swarm.kill_miner(0)

    def on_disruption(self, run: iota.Run, disruption: iota.Disruption) -> None:
        print(f"step {disruption.step}: {disruption.kind}: {disruption.text}")

    def on_evaluate(self, run: iota.Run, evaluation: iota.Evaluation) -> None:
        print(f"after {evaluation.step} updates: hold-out loss {evaluation.loss:.4f}")


if __name__ == "__main__":
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
    )
    with iota.local(miners=4) as swarm:
        run = swarm.train(
            iota.Model.from_config(config),
            iota.Data.from_files(BOOK),
            iota.Pretrain(seq_len=64, batch_items=8, item_rows=2),
            schedule=iota.Cosine(steps=STEPS),
            stages=2,
            callbacks=[iota.ProgressBar(), iota.TensorBoard(os.environ.get("IOTA_LOGDIR", "runs")), KillAndTell()],
            evaluation={"every_steps": max(1, STEPS // 4)},
        )
        run.wait(timeout_s=1800)
        print("run root", run.root())
