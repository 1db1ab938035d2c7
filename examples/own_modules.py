"""A language model of your own modules, causal convolutions on Moby-Dick, trained by a private swarm in three stages.

python examples/own_modules.py             # 60 steps; IOTA_STEPS=8 for a look
"""

import os
from pathlib import Path

from torch import Tensor, nn
from torch.nn.functional import pad

import iota

STEPS = int(os.environ.get("IOTA_STEPS", "60"))
BOOK = Path(iota.__file__).parent / "assets" / "moby_dick.txt"


class ConvBlock(nn.Module):
    """Sees the last ``kernel`` positions, ``dilation`` apart; keeps (rows, positions, width)."""

    def __init__(self, width: int, kernel: int, dilation: int) -> None:
        super().__init__()
        self.reach = (kernel - 1) * dilation
        self.norm = nn.LayerNorm(width)
        self.conv = nn.Conv1d(width, width, kernel, dilation=dilation)
        self.mlp = nn.Sequential(nn.GELU(), nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        seen = pad(self.norm(x).transpose(1, 2), (self.reach, 0))
        return x + self.mlp(self.conv(seen).transpose(1, 2))


def build(vocab_size: int, width: int, depth: int) -> list[nn.Module]:
    """An embedding, blocks, a head: what ``iota.Model.from_modules`` wants."""
    blocks = [ConvBlock(width, kernel=4, dilation=4 ** (layer % 3)) for layer in range(depth)]
    return [nn.Embedding(vocab_size, width), *blocks, nn.LayerNorm(width), nn.Linear(width, vocab_size, bias=False)]


if __name__ == "__main__":
    with iota.local(miners=3) as swarm:  # a private swarm: it runs this file, by its hash
        run = swarm.train(
            iota.Model.from_modules(build, vocab_size=1024, width=96, depth=6),
            iota.Data.from_files(BOOK),
            iota.Pretrain(seq_len=128, batch_items=8, item_rows=2),
            iota.AdamW(lr=3e-3),
            iota.Cosine(warmup_steps=min(10, STEPS // 2), steps=STEPS),
            stages=3,
        )
        for report in run:
            print(f"step {report.step}/{report.steps}  loss {report.loss:.4f}")
        model = run.model()  # nn.Sequential(*build(...))
        print("parameters", sum(p.numel() for p in model.parameters()))
        print("sample    ", repr(run.sample("The whale", max_new_tokens=20)))
        print("run root  ", run.root())
