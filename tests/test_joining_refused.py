"""A miner that isn't let in goes on asking at the pace it is told, and says once why, with the case and where to read about it."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from loguru import logger

from miner.joining import CONVICTED_ASKS_S, Joiner
from subnet.errors import Refusal


@pytest.fixture
def said() -> Iterator[list[str]]:
    lines: list[str] = []
    sink = logger.add(lambda message: lines.append(str(message)), level="WARNING")
    yield lines
    logger.remove(sink)


def joiner() -> Joiner:
    return Joiner(SimpleNamespace(signer=SimpleNamespace(hotkey="mine")), SimpleNamespace(), SimpleNamespace(), ())  # type: ignore[arg-type]


QUARANTINED = Refusal("quarantined", "case 12 about step 7 stage 1 is open", 5.0)


def test_quarantine_is_waited_out_and_said_once_with_its_case(said: list[str]) -> None:
    asking = joiner()
    assert [asking.wait_after(QUARANTINED) for _ in range(5)] == [5.0] * 5
    assert len(said) == 1
    for words in ("case 12", "iota score explain mine", "iota audit fetch"):
        assert words in said[0]
    assert asking.wait_after(None) < 1
    asking.wait_after(QUARANTINED)
    assert len(said) == 2, "another time is another matter"


def test_what_the_validator_hints_at_is_said_too(said: list[str]) -> None:
    joiner().wait_after(Refusal("quarantined", "case 12", 5.0, "a third party is asked"))
    assert "a third party is asked" in said[0]


def test_a_convicted_hotkey_asks_seldom_since_an_appeal_may_free_it(said: list[str]) -> None:
    asking = joiner()
    assert asking.wait_after(Refusal("convicted", "case 12: convicted")) == CONVICTED_ASKS_S
    assert asking.wait_after(Refusal("convicted", "case 12: convicted", 600.0)) == 600.0
    assert len(said) == 1
    assert "until an appeal is upheld" in said[0]


def test_another_boot_id_is_taken_at_once(said: list[str]) -> None:
    asking = joiner()
    boot = asking.boot
    assert asking.wait_after(Refusal("boot_seen", "seen")) == 0.0
    assert asking.boot != boot
    assert asking.wait_after(Refusal("back_off", "gone silently", 3.0)) == 3.0
    assert not said
