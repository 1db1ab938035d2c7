"""Submit a run, walk away, come back from another process and look on: the run doesn't need us.

python examples/detach_and_attach.py
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from transformers import LlamaConfig

import iota

STEPS = int(os.environ.get("IOTA_STEPS", "40"))
BOOK = Path(iota.__file__).parent / "assets" / "moby_dick.txt"
MODEL = {"vocab_size": 1024, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2}


def look(url: str, name: str) -> None:
    """What another process, or another machine, does."""
    run = iota.attach(url, name, warn=False)
    for report in run:
        print(f"  elsewhere: step {report.step}/{report.steps}, loss {report.loss:.4f}", flush=True)
    print("  elsewhere: root", run.root())


def main() -> None:
    directory = Path(tempfile.mkdtemp(prefix="iota-detached-"))
    swarm = iota.local(miners=2, directory=directory, detach=True)  # goes on without this process
    try:
        config = LlamaConfig(**MODEL, num_attention_heads=4, max_position_embeddings=128)
        run = swarm.train(
            iota.Model.from_config(config),
            iota.Data.from_files(BOOK),
            iota.Pretrain(seq_len=64, batch_items=4, item_rows=2),
            schedule=iota.Cosine(steps=STEPS),
            stages=2,
        )
        for report in run:
            print(f"here: step {report.step}/{report.steps}, loss {report.loss:.4f}", flush=True)
            if report.step >= STEPS // 4:
                break  # Ctrl-C does the same, and prints how to look again
        print(f'here: enough; iota.attach("{run.swarm.url}", "{run.name}") looks again', flush=True)
        subprocess.run([sys.executable, __file__, run.swarm.url, run.name], check=True, timeout=600)
    finally:
        swarm.shutdown()


if __name__ == "__main__":
    look(sys.argv[1], sys.argv[2]) if len(sys.argv) == 3 else main()
