"""The GPU check itself, on a CPU: all of its lines run, and it says so where there is no GPU."""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_check

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def _torch_settings() -> Generator[None]:
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


def test_without_a_gpu_it_says_so_and_exits_3(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    assert gpu_check.main([]) == 3
    assert "finds no CUDA device" in capsys.readouterr().err
    script = (ROOT / "scripts" / "gpu-check").read_text()
    assert '-m benchmarks.gpu_check "$@"' in script


def test_all_of_it_runs_on_a_cpu_with_a_tiny_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["--cpu"]) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    figures = said["figures"]
    assert said["ok"]
    assert figures["golden_of_cpu"]
    assert min(figures["tokens_per_s"], figures["plain_tokens_per_s"], figures["matmul_flop_per_s"]) > 0


def test_other_bits_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, config = torch.device("cpu"), gpu_check.TINY.plan("bf16").config
    assert set(gpu_check.equal_updates(config, cpu).values()) == {True}
    answers = iter([{"weight": b"1"}, {"weight": b"2"}] * 2)
    monkeypatch.setattr(gpu_check, "merged_and_updated", lambda *_: next(answers))
    assert set(gpu_check.equal_updates(config, cpu).values()) == {False}


def test_the_two_billion_are_what_they_are_called() -> None:
    plan = gpu_check.TWO_BILLION.plan("bf16")
    assert 1.7e9 < plan.units.num_parameters < 2.3e9
    assert (plan.hidden_size, plan.units.num_layers, plan.num_stages) == (2048, 24, 4)
