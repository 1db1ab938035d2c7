"""A gradient is added or handed back, never both, whichever side asks first."""

from __future__ import annotations

from miner.member_items import _Addition


def test_refused_while_it_is_computed_is_never_added() -> None:
    addition = _Addition()
    assert addition.refuse()
    assert not addition.begin()
    assert addition.refuse(), "asked again, the answer stays"


def test_what_is_being_added_cannot_be_refused() -> None:
    addition = _Addition()
    assert addition.begin()
    assert not addition.refuse()
