"""AdamW against a numpy transcription (to the bit) and against torch's own (closely); state roots by hand."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from subnet.errors import InputError
from subnet.numerics.layout import TensorSpec, block_lengths, build_layout
from subnet.numerics.optimizer import adamw_update_, sqrt_
from subnet.numerics.roots import leaf_hash, run_root, stage_root
from subnet.run.config import NO_AUDITS, ModelSection, OptimizerSection, RunConfig, RunSection, ScheduleSection
from subnet.run.schedule import StepScalars, bits_fp32, fp32_bits, step_scalars

SPECS = [
    TensorSpec("embed", (9, 1500), True),
    TensorSpec("flat", (33, 70), False),
    TensorSpec("norm", (128,), False),
    TensorSpec("experts", (3, 40, 33), False),
    TensorSpec("short", (20, 64), True),
]
SECTION = build_layout([SPECS], tied=None, qmax=1023).sections[0]


def run_config(weight_decay: float = 0.1) -> RunConfig:
    return RunConfig(
        audit=NO_AUDITS,
        run=RunSection("r", steps=50),
        model=ModelSection(config={"model_type": "llama"}),
        optimizer=OptimizerSection(learning_rate=3e-3, weight_decay=weight_decay, clip_norm=0.0),
        schedule=ScheduleSection(warmup_steps=5),
    )


def plain_adamw(
    state: list[np.ndarray], q: np.ndarray, ks: np.ndarray, coefficient: int, s: StepScalars
) -> list[np.ndarray]:
    """§8 line by line in numpy's fp32, element by element and without tiles."""
    f = np.float32
    w, m, v = (x.copy() for x in state)
    two_k = np.repeat(np.ldexp(f(1), ks.astype(np.int32)), block_lengths(SECTION)).astype(f)
    b1, c1, b2, c2 = (f(bits_fp32(x)) for x in (s.beta1, s.one_minus_beta1, s.beta2, s.one_minus_beta2))
    eps, bc1, bc2 = (f(bits_fp32(x)) for x in (s.epsilon, s.bias_correction1, s.bias_correction2))
    g = (q * two_k) * f(bits_fp32(coefficient))
    m = (m * b1) + (g * c1)
    v = (v * b2) + ((g * g) * c2)
    u = (m / bc1) / (np.sqrt((v / bc2).astype(np.float64)).astype(f) + eps)
    if s.decays:
        for span in SECTION.tensors:
            if len(span.spec.shape) >= 2:
                w[span.element_start : span.element_start + span.num_elements] *= f(bits_fp32(s.decay))
    w = w - (u * f(bits_fp32(s.lr)))
    assert all(x.dtype == f for x in (g, u, w, m, v))
    return [w, m, v]


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.1]))
def test_update_equals_the_transcription_to_the_bit(seed: int, weight_decay: float) -> None:
    rng = np.random.default_rng(seed)
    config, n = run_config(weight_decay), SECTION.num_elements
    state = [rng.standard_normal(n).astype(np.float32), np.zeros(n, np.float32), np.zeros(n, np.float32)]
    tensors = [torch.from_numpy(x.copy()) for x in state]
    for step in range(3):
        q = (rng.integers(-16000, 16001, n) * (rng.random(n) > 0.3)).astype(np.float32)
        ks = rng.integers(-40, -5, SECTION.num_blocks).astype(np.int16)
        coefficient = fp32_bits(float(rng.uniform(1e-3, 0.5)))
        scalars = step_scalars(config, step)
        state = plain_adamw(state, q, ks, coefficient, scalars)
        adamw_update_(SECTION, *tensors, torch.from_numpy(q), torch.from_numpy(ks), coefficient, scalars)
        for ours, theirs in zip(tensors, state, strict=True):
            assert ours.numpy().tobytes() == theirs.tobytes()


def test_roots_are_correctly_rounded() -> None:
    bits = np.random.default_rng(0).integers(0, 0x7F800000, 200_000).astype(np.uint32)
    values = np.concatenate([bits.view(np.float32), np.array([0.0, 1e-45, 1.0, 4.0], np.float32)])
    # fp64 has more than twice the digits, so that rounding twice is rounding once
    wanted = np.sqrt(values.astype(np.float64)).astype(np.float32)
    assert sqrt_(torch.from_numpy(values.copy())).numpy().tobytes() == wanted.tobytes()


def test_stays_with_torch_adamw_over_fifty_steps() -> None:
    config, generator = run_config(), torch.Generator().manual_seed(4)
    n = SECTION.num_elements
    weight = torch.randn(n, generator=generator) * 0.1
    exp_avg, exp_avg_sq = torch.zeros(n), torch.zeros(n)
    spans = [slice(span.element_start, span.element_start + span.num_elements) for span in SECTION.tensors]
    params = [weight[span].clone().view(s.shape).requires_grad_() for span, s in zip(spans, SPECS, strict=True)]
    wide = [p for p in params if p.dim() >= 2]
    rest = [p for p in params if p.dim() < 2]
    groups = [{"params": wide, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95), eps=1e-8, foreach=False)
    ks = torch.full((SECTION.num_blocks,), -14, dtype=torch.int16)
    for step in range(50):
        q = torch.randint(-4000, 4001, (n,), generator=generator).float()
        scalars = step_scalars(config, step)
        adamw_update_(SECTION, weight, exp_avg, exp_avg_sq, q, ks, fp32_bits(1 / 8), scalars)
        for param, span in zip(params, spans, strict=True):
            param.grad = (q[span] * 2.0**-14 / 8).view(param.shape)
        for group in reference.param_groups:
            group["lr"] = bits_fp32(scalars.lr)
        reference.step()
    for param, span in zip(params, spans, strict=True):
        assert (weight[span] - param.detach().view(-1)).abs().max() < 1e-6


def test_no_gradient_at_all_gives_no_nan() -> None:
    n = SECTION.num_elements
    weight, zeros = torch.ones(n), torch.zeros(n)
    ks = torch.full((SECTION.num_blocks,), -70, dtype=torch.int16)
    scalars = step_scalars(run_config(), 0)
    adamw_update_(SECTION, weight, zeros.clone(), zeros.clone(), zeros, ks, fp32_bits(1.0), scalars)
    norm = SECTION.tensors[2]
    assert weight[norm.element_start : norm.element_start + norm.num_elements].eq(1.0).all()
    assert weight[0] == bits_fp32(scalars.decay)


def test_wrong_buffers_are_refused() -> None:
    n, scalars = SECTION.num_elements, step_scalars(run_config(), 0)
    good = [torch.zeros(n) for _ in range(4)]
    ks = torch.zeros(SECTION.num_blocks, dtype=torch.int16)
    for index, bad in ((0, torch.zeros(n - 1)), (1, torch.zeros(n).double()), (3, torch.zeros(2 * n)[::2])):
        with pytest.raises(ValueError):
            adamw_update_(SECTION, *good[:index], bad, *good[index + 1 :], ks, 0, scalars)
    with pytest.raises(InputError):
        adamw_update_(SECTION, *good, ks[:-1], 0, scalars)


# Roots


def test_roots_are_the_bytes_that_the_page_says() -> None:
    weight = np.arange(6, dtype=np.float32)
    moment, square = weight * 2, weight * 3
    decayed, limit = np.array([0.5, 0.25], np.float32), np.array([1.0, 2.0], np.float32)

    def u64(number: int) -> bytes:
        return struct.pack("<Q", number)

    message = b"iota/leaf/1\x00" + b"m\xc3\xbc.weight" + b"\x00" + u64(2) + u64(2) + u64(3)
    for array in (weight, moment, square):
        message += u64(24) + array.astype("<f4").tobytes()
    for array in (decayed, limit):
        message += u64(8) + array.astype("<f4").tobytes()
    leaf = leaf_hash("mü.weight", (2, 3), weight.data, moment.data, square.data, decayed.data, limit.data)
    assert leaf == blake3(message).digest()
    other = leaf_hash("v", (6,), weight.data, moment.data, square.data, decayed.data, limit.data)
    assert stage_root(7, [leaf, other]) == blake3(b"iota/stage/1\x00" + u64(7) + leaf + other).digest()
    assert run_root(7, [leaf, other]) == blake3(b"iota/root/1\x00" + u64(7) + leaf + other).digest()
    assert run_root(0, iter(())) == blake3(b"iota/root/1\x00" + u64(0)).digest()
    assert run_root(7, [other, leaf]) != run_root(7, [leaf, other])
    # written once by hand with another BLAKE3 call, to notice a change of the page's labels
    assert leaf.hex() == GOLDEN_LEAF
    with pytest.raises(ValueError):
        leaf_hash("v", (5,), weight.data, moment.data, square.data, decayed.data, limit.data)


GOLDEN_LEAF = "ef2c38b92047f28441efbb0ad93b6ac26f06d068a1eaf90630f7c6d81eeb526a"
