"""Kinds of GPU by name: memory, dense bf16 rate, memory bandwidth, and what an hour of one is let for. No measurements.

Rates are the vendors' peaks for dense bf16 (fp16 for Apple) with fp32 accumulation, from the data sheets and architecture
white papers: GA102, AD102 and GB202 for RTX cards, the A100, H100, H200, L40S, A10 and B200 data sheets, and Apple's product
pages (whose GPU figures are fp32; the same is assumed for fp16). ``mfu`` is what of it a well-filled training step is taken to
reach in this code (eager torch, bf16 autocast); no card but the one in docs/simulate.md was measured for it. Prices are round
figures for on-demand rent on public marketplaces in 2026, and vary by a factor of two.
"""

from __future__ import annotations

import msgspec


class Preset(msgspec.Struct, frozen=True):
    """One kind of GPU. ``tflops``: dense peak; ``bandwidth_gb_s``: of its memory."""

    memory_gb: float
    tflops: float
    bandwidth_gb_s: float
    usd_per_hour: float
    mfu: float = 0.4


PRESETS: dict[str, Preset] = {
    "rtx3090": Preset(24, 71, 936, 0.20),
    "rtx4070ti-super": Preset(16, 88, 672, 0.20),
    "rtx4080": Preset(16, 97, 717, 0.25),
    "rtx4090": Preset(24, 165, 1008, 0.35),
    "rtx5080": Preset(16, 113, 960, 0.30),
    "rtx5090": Preset(32, 209, 1792, 0.60),
    "a10": Preset(24, 125, 600, 0.40),
    "a100-40": Preset(40, 312, 1555, 1.00),
    "a100-80": Preset(80, 312, 2039, 1.30),
    "l40s": Preset(48, 362, 864, 0.90),
    "h100": Preset(80, 989, 3350, 2.50),
    "h200": Preset(141, 989, 4800, 3.00),
    "b200": Preset(180, 2250, 8000, 5.00),
    "m1-max": Preset(32, 10.4, 400, 0.10, 0.3),
    "m2-ultra": Preset(128, 27.2, 800, 0.25, 0.3),
    "m3-max": Preset(64, 14.2, 400, 0.15, 0.3),
    "m4-max": Preset(64, 18.4, 546, 0.20, 0.3),
}
