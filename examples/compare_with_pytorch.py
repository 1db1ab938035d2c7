"""The same training twice: a plain PyTorch loop, and six miners. Run: python examples/compare_with_pytorch.py"""

import os
import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import iota
from iota.prepare import prepare_data
from subnet.model.data import permute

STEPS, BATCH, LENGTH, LR = int(os.environ.get("IOTA_STEPS", "60")), 32, 128, 2e-3  # 32 x 128 tokens a step
BOOK = Path(iota.__file__).parent / "assets" / "moby_dick.txt"
SHAPE = {"vocab_size": 2048, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3}
torch.manual_seed(0)
start = LlamaForCausalLM(LlamaConfig(**SHAPE, num_attention_heads=4, max_position_embeddings=LENGTH))
data = prepare_data([BOOK], Path(tempfile.mkdtemp()) / "data", vocab_size=2048).directory
tokens, held_out = (np.fromfile(data / f"{name}-00000.tokens", "<u2").astype(np.int64) for name in ("train", "holdout"))


def with_a_swarm() -> tuple[list[float], float]:
    with iota.local(miners=6) as swarm:
        run = swarm.train(
            model=iota.Model.from_transformers(start),
            data=iota.Data.from_files(data),
            objective=iota.Pretrain(seq_len=LENGTH, batch_items=8, item_rows=4),
            optimizer=iota.AdamW(lr=LR, betas=(0.9, 0.95), weight_decay=0.1, clip_norm=1.0),
            schedule=iota.Constant(steps=STEPS),
            stages=3,
        )
        return [report.loss for report in run], run.evaluate().loss


def loss_of(model: LlamaForCausalLM, stream: np.ndarray, samples: list[int]) -> torch.Tensor:
    rows = torch.tensor(np.stack([stream[s * LENGTH : (s + 1) * LENGTH + 1] for s in samples]))
    return torch.nn.functional.cross_entropy(model(rows[:, :-1]).logits.flatten(0, 1), rows[:, 1:].flatten())


def with_a_loop() -> tuple[list[float], float]:
    model, losses, size = start, [], (len(tokens) - 1) // LENGTH
    groups = [[p for p in model.parameters() if (p.ndim >= 2) == decays] for decays in (True, False)]
    decayed, kept = ({"params": g, "weight_decay": d} for g, d in zip(groups, (0.1, 0.0), strict=True))
    optimizer = torch.optim.AdamW([decayed, kept], lr=LR, betas=(0.9, 0.95))
    for step in range(STEPS):
        loss = loss_of(model, tokens, [permute(i, size, 0, 0) for i in range(step * BATCH, (step + 1) * BATCH)])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, loss_of(model, held_out, list(range(16))).item()  # as many rows as the run evaluates


(swarm, swarm_end), (loop, loop_end) = with_a_swarm(), with_a_loop()
worst = max(abs(a / b - 1) for a, b in zip(swarm, loop, strict=True))
print(f"training loss of the last step: swarm {swarm[-1]:.5f}, PyTorch {loop[-1]:.5f}; furthest apart {worst:.2e}")
print(f"hold-out loss after {STEPS} updates: swarm {swarm_end:.5f}, PyTorch {loop_end:.5f}")
