"""The throughput baselines do the work that they say, and leave no process behind."""

from __future__ import annotations

import subprocess

import msgspec
import pytest
import torch
from transformers import LlamaForCausalLM

from benchmarks import baselines
from benchmarks.baseline_worker import HalfModel, Shape, Work, matmul, plain
from subnet.errors import DeadlinePassed, InputError

TINY = Shape(
    hidden=16, intermediate=24, layers=3, heads=2, vocab_size=32, sequence_length=8, rows=2, microbatches=2
)  # fmt: skip


def test_two_halves_are_the_whole_model():
    tokens = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(3))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        whole = LlamaForCausalLM(TINY.llama(tied=False))
        halves = []
        for stage in range(2):
            torch.manual_seed(0)
            halves.append(HalfModel(TINY, stage, "fp32"))
    expected = whole(input_ids=tokens).logits
    assert torch.equal(halves[1](halves[0](tokens)), expected)
    count = sum(p.numel() for half in halves for p in half.parameters())
    assert count == sum(p.numel() for p in whole.parameters()) == TINY.parameters + 16 * 32


def test_the_shape_is_the_one_of_the_page():
    assert round(Shape().parameters / 1e6, 1) == 29.5
    assert Shape().tokens_per_step == 16_384
    assert Shape().first_stage_layers in (4, 5)
    assert baselines.mfu(Shape(), 2.0, 1000.0) == pytest.approx(Shape().flop_per_token * 16_384 / 2e12)


def test_each_step_is_timed():
    work = Work("plain", "fp32", torch.get_num_threads(), 3, 1, 60.0, TINY)
    assert msgspec.json.decode(msgspec.json.encode(work), type=Work) == work
    assert len(plain(work)) == 3


def test_a_peak_is_found(monkeypatch):
    monkeypatch.setattr("time.perf_counter", iter(range(1000)).__next__)
    assert matmul(Work("matmul", "fp32", 1, 1, 0, 60.0, TINY)) == [2 * 256**3 / 1e9]


def test_a_late_baseline_is_killed_and_named(monkeypatch):
    started: list[subprocess.Popen[str]] = []

    class Recording(subprocess.Popen):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Recording)
    with pytest.raises(DeadlinePassed):
        baselines.measure("pipeline", "fp32", 1, shape=TINY, deadline_s=0.2)
    assert len(started) == 2
    assert all(process.returncode is not None for process in started)


def test_wrong_names_and_odd_counts_are_refused():
    with pytest.raises(InputError):
        baselines.measure("pipelines", "fp32", 1)
    with pytest.raises(InputError):
        baselines.measure("plain", "fp32", 1, shape=msgspec.structs.replace(TINY, microbatches=3))
