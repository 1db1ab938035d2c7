"""Which device a miner takes; there is no GPU here, so what torch says of GPUs is given."""

from __future__ import annotations

import pytest
import torch

from miner.hardware import choose_device, limit_memory
from subnet.errors import ConfigError

FREE = {0: 2 << 30, 1: 9 << 30, 2: 9 << 30}


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(FREE))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda number: (FREE[number], 24 << 30))


@pytest.mark.usefixtures("gpus")
def test_auto_takes_the_one_with_most_free_memory_and_a_number_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_device("auto") == "cuda:1"
    assert choose_device("cuda:2") == "cuda:2"
    assert choose_device("cpu") == "cpu"
    with pytest.raises(ConfigError, match=r"'cuda:3': there is no such device \(allowed: cuda:0 to cuda:2\)"):
        choose_device("cuda:3")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert choose_device("auto") == "cuda"


@pytest.mark.parametrize("wanted", ["gpu", "meta", "cuda:x"])
def test_what_is_no_device_is_refused(wanted: str) -> None:
    with pytest.raises(ConfigError, match=rf"{wanted}.*auto, cpu, cuda or cuda:N"):
        choose_device(wanted)


def test_a_cuda_device_where_there_is_none_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    assert choose_device("auto") == "cpu"
    with pytest.raises(ConfigError, match="finds no CUDA device"):
        choose_device("cuda:1")


@pytest.mark.usefixtures("gpus")
def test_memory_is_limited_by_the_devices_share(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        total_memory = 8 << 30

    shares: list[tuple[float, torch.device]] = []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda share, device: shares.append((share, device))
    )
    limit_memory("cuda:1", 6 << 30)
    assert shares == [(0.75, torch.device("cuda:1"))]
    with pytest.raises(ConfigError, match=r"--limit\.vram = "):
        limit_memory("cuda:1", 9 << 30)
    limit_memory("cpu", 9 << 30)
    limit_memory("cuda:1", None)
    assert len(shares) == 1
