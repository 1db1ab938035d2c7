"""The independent reference agrees with torch's AdamW, with fp32 sums, and its root sees every bit."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.entry import Entry
from benchmarks.plain import Plain
from benchmarks.reference import EMBEDDING, HEAD, Reference
from benchmarks.reference_optimizers import update
from benchmarks.setting import draw, training_rows
from subnet.errors import InputError
from subnet.run.config import (
    NO_AUDITS,
    DataSection,
    EvaluationSection,
    ModelSection,
    ObjectiveSection,
    OptimizerSection,
    PipelineSection,
    PrecisionSection,
    RunConfig,
    RunSection,
)

SHAPE = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 16,
}


@pytest.fixture(autouse=True)
def _torch_settings():
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


def a_config(
    *, tied: bool = False, compute: str = "fp32", chunks: int = 1, clip: float = 1.0, **optimizer
) -> RunConfig:
    return RunConfig(
        audit=NO_AUDITS,
        run=RunSection(name="tiny", seed=7, steps=20),
        model=ModelSection(config={**SHAPE, "tie_word_embeddings": tied}),
        data=DataSection(sequence_length=16),
        objective=ObjectiveSection(ce_chunk_tokens=20),
        optimizer=OptimizerSection(learning_rate=5e-3, clip_norm=clip, **optimizer),
        pipeline=PipelineSection(microbatches=4, microbatch_rows=4, chunks=chunks),
        evaluation=EvaluationSection(rows=8),
        precision=PrecisionSection(compute=compute),
    )


def streams() -> tuple[np.ndarray, np.ndarray]:
    """Tokens with something to learn: each follows from the one before, most of the time."""
    rng = np.random.default_rng(0)
    out = [0]
    for noise in rng.integers(0, 64, 6000):
        out.append(int(noise) if noise % 5 == 0 else (out[-1] * 5 + 3) % 64)
    tokens = np.array(out, np.uint16)
    return tokens[:5000], tokens[5000:]


def a_reference(**kwargs) -> Reference:
    config = a_config(**kwargs)
    return Reference(config, config.model.config, *streams())


@pytest.mark.parametrize("tied", [False, True])
def test_fixed_point_learns_as_fp32_does(tied):
    fixed = a_reference(tied=tied)
    plain = Plain(fixed.config, fixed.config.model.config, *streams())
    start = fixed.holdout_loss()
    assert math.isclose(start, plain.holdout_loss(), rel_tol=1e-5)
    fixed.calibrate()
    for t in range(20):
        assert math.isclose(fixed.step(t).loss, plain.step(t), rel_tol=0.01)
    assert math.isclose(fixed.holdout_loss(), plain.holdout_loss(), rel_tol=0.01)
    assert fixed.holdout_loss() < 0.9 * start


def test_bf16_learns_and_differs():
    roots = set()
    for compute in ("fp32", "bf16"):
        reference = a_reference(compute=compute)
        reference.calibrate()
        losses = [reference.step(t).loss for t in range(5)]
        assert losses[-1] < losses[0]
        roots.add(reference.state_root())
    assert len(roots) == 2


def test_adamw_is_torchs_within_1e_6():
    reference = a_reference()
    entry = next(e for e in reference.entries if e.name.endswith("q_proj.weight"))
    settings_ = reference.config.optimizer
    other = torch.nn.Parameter(entry.weight.clone())
    torchs = torch.optim.AdamW([other], betas=settings_.betas, eps=settings_.epsilon, weight_decay=0.1)
    generator = torch.Generator().manual_seed(1)
    for t in range(20):
        gradient = torch.randn(entry.shape, generator=generator)
        other.grad = gradient.clone()
        rate = 5e-3 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * t / 20)))
        torchs.param_groups[0]["lr"] = rate
        torchs.step()
        update(reference.config, entry, gradient, t)
    assert (entry.weight - other.detach()).abs().max().item() < 1e-6


def test_adamw_is_ieee_fp32_operation_by_operation():
    reference = a_reference(clip=0.0)
    entry = next(e for e in reference.entries if e.name.endswith("q_proj.weight"))
    f, w = np.float32, entry.weight.numpy().copy()
    m, v = np.zeros(entry.shape, f), np.zeros(entry.shape, f)
    for t in range(3):
        g = np.random.default_rng(t).standard_normal(entry.shape, np.float32)
        update(reference.config, entry, torch.from_numpy(g.copy()), t)
        rate = 5e-3 * (0.1 + (1 - 0.1) * 0.5 * (1 + math.cos(math.pi * (t / 20))))
        m = m * f(0.9) + g * f(1 - 0.9)
        v = v * f(0.95) + (g * g) * f(1 - 0.95)
        u = (m / f(1 - 0.9 ** (t + 1))) / (np.sqrt(v / f(1 - 0.95 ** (t + 1))) + f(1e-8))
        w = w * f(1 - rate * 0.1) - u * f(rate)
    for mine, array in ((w, entry.weight), (m, entry.m), (v, entry.v)):
        assert np.array_equal(mine, array.numpy())


def test_the_root_sees_every_bit_of_every_array():
    reference = a_reference(tied=True)
    reference.calibrate()
    reference.step(0)
    root = reference.state_root()
    assert len(reference.entries) == 2 * 9 + 2
    assert {name.split("/")[1] for name in reference.arrays()} == {"weight", "m", "v", "decayed", "limit"}
    for values in reference.arrays().values():
        bits = values.reshape(-1).view(np.uint32)
        bits[-1] ^= 1
        assert reference.state_root() != root
        bits[-1] ^= 1
    reference.updates += 1
    assert reference.state_root() != root
    reference.updates -= 1
    assert reference.state_root() == root


def test_same_run_same_root_and_a_saved_state_goes_on(tmp_path):
    first, second = a_reference(), a_reference()
    assert first.state_root() == second.state_root()
    first.calibrate()
    first.step(0)
    first.save(tmp_path / "state.npz")
    second.load(tmp_path / "state.npz")
    assert first.state_root() == second.state_root()
    first.step(1)
    second.step(1)
    assert first.state_root() == second.state_root()
    with pytest.raises(InputError):
        second.step(1)


def test_a_saved_baseline_goes_on(tmp_path):
    config = a_config()
    first, second = (Plain(config, config.model.config, *streams()) for _ in range(2))
    first.step(0)
    first.save(tmp_path / "state.pt")
    second.load(tmp_path / "state.pt")
    assert second.updates == 1
    assert second.step(1) == first.step(1)
    assert second.holdout_loss() == first.holdout_loss()


def test_chunks_give_the_gradient_up_to_rounding():
    whole, cut = a_reference(), a_reference(chunks=4)
    assert math.isclose(whole.microbatch(0, 0), cut.microbatch(0, 0), rel_tol=1e-6)
    for name, parameter in whole.parameters.items():
        torch.testing.assert_close(parameter.grad, cut.parameters[name].grad, rtol=1e-3, atol=1e-6)


def test_a_non_finite_microbatch_is_skipped_and_divided_out(monkeypatch):
    reference, without = a_reference(clip=0.0), a_reference(clip=0.0)
    reference.calibrate()
    without.calibrate()
    whole = reference.microbatch

    def broken(t: int, m: int) -> float:
        loss = whole(t, m)
        if m == 2:
            reference.parameters[HEAD].grad[3, 5] = math.inf
        return loss

    monkeypatch.setattr(reference, "microbatch", broken)
    report = reference.step(0)
    assert report.skipped == (2,)
    assert report.coefficient == float(np.float32(1 / 3))
    assert math.isclose(report.loss, sum(without.microbatch(0, m) for m in (0, 1, 3)) / 3, rel_tol=1e-6)
    monkeypatch.setattr(reference, "microbatch", lambda t, m: broken(t, 2))
    with pytest.raises(InputError):
        reference.step(1)


def test_measuring_changes_nothing_and_is_small():
    first, second = a_reference(), a_reference()
    for reference in (first, second):
        reference.calibrate()
    measured = first.step(0, measure=True).measured
    assert second.step(0).measured == {}
    assert first.state_root() == second.state_root()
    assert set(measured) == {entry.name for entry in first.entries}
    assert max(each.lost_energy for each in measured.values()) < 1e-3
    assert max(each.error_energy for each in measured.values()) < 1e-3
    assert all(each.lost_energy <= each.quantising_energy < 1e-3 for each in measured.values())
    assert max(each.fp32_error_energy for each in measured.values()) < 1e-10


def test_clipping_is_seen_when_scales_are_too_small():
    reference = a_reference()
    reference.calibrate()
    for entry in reference.entries:
        entry.limit = entry.limit_used = entry.limit * np.float32(1 / 64)
    each = reference.step(0, measure=True).measured["model.norm.weight"]
    assert each.clipped > 0
    assert 0.1 < each.lost_energy < 1


def _entry(shape: tuple[int, ...], rows: int) -> Entry:
    empty = torch.empty(0)
    return Entry("x", shape, ("x",), 1023, rows, math.prod(shape) // rows, empty, empty, empty)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 3), st.integers(1, 2100), st.integers(0, 2**31))
def test_block_maxima_are_the_maxima_of_the_blocks(rows, length, seed):
    gradient = torch.randn((rows, length), generator=torch.Generator().manual_seed(seed))
    values = gradient.abs().numpy()
    blocks = [values[r, b : b + 1024].max() for r in range(rows) for b in range(0, length, 1024)]
    assert _entry((rows, length), rows).block_maxima(gradient).tolist() == blocks


@settings(max_examples=50, deadline=None)
@given(st.floats(2.0**-60, 2.0**100, width=32), st.sampled_from([3, 511, 1023]))
def test_the_exponent_is_the_smallest_that_fits(limit, qmax):
    entry = _entry((1, 1), 1)
    entry.qmax, entry.limit_used = qmax, np.array([limit], np.float32)
    k = int(entry.exponents()[0])
    assert Fraction(limit) <= qmax * Fraction(2) ** k
    assert Fraction(limit) > qmax * Fraction(2) ** (k - 1)


def test_scales_rescue_quiet_blocks_and_move_within_bounds():
    entry = _entry((2, 1024), 2)
    entry.calibrate(np.array([1.0, 0.0], np.float32))
    assert entry.limit.tolist() == [2.0, 0.5]
    entry.rescale(np.array([100.0, 0.0], np.float32))
    assert entry.limit.tolist() == [16.0, 4.0]
    entry.calibrate(np.zeros(2, np.float32))
    assert entry.limit.tolist() == [2.0**-60] * 2


def test_a_nan_reaches_the_block_maximum():
    gradient = torch.zeros(3000)
    gradient[2999] = math.nan
    assert np.isnan(_entry((3000,), 1).block_maxima(gradient)).tolist() == [False, False, True]


def test_drawing_depends_on_seed_and_name_only():
    assert torch.equal(draw("a.weight", (4, 4), 1, 0.02), draw("a.weight", (4, 4), 1, 0.02))
    assert not torch.equal(draw("a.weight", (4, 4), 1, 0.02), draw("a.weight", (4, 4), 2, 0.02))
    assert not torch.equal(draw("a.weight", (4, 4), 1, 0.02), draw("b.weight", (4, 4), 1, 0.02))
    assert draw("norm.weight", (4,), 1, 0.02).tolist() == [1.0] * 4
    assert draw("q.bias", (4,), 1, 0.02).tolist() == [0.0] * 4


def test_an_epoch_sees_each_sample_once():
    config = a_config()
    tokens = np.arange(16 * 32 + 1)
    rows = [training_rows(config, tokens, t, m) for t in range(2) for m in range(4)]
    assert sorted(np.concatenate(rows)[:, 0].tolist()) == list(range(0, 16 * 32, 16))
    assert np.array_equal(training_rows(config, tokens, -1, 1), rows[1])


def test_tied_leaves_share_values_and_have_their_own_gradients():
    reference = a_reference(tied=True)
    reference.microbatch(0, 0)
    leaves = [reference.parameters[name] for name in (EMBEDDING, HEAD)]
    assert leaves[0].data_ptr() == leaves[1].data_ptr()
    assert not torch.equal(leaves[0].grad, leaves[1].grad)
    assert next(e for e in reference.entries if e.name == EMBEDDING).qmax == 511
