"""Refused frames are dropped one by one and logged once; who goes on is cut off, for twice as long each time."""

from __future__ import annotations

import asyncio

import pytest
from loguru import logger
from peer_cases import A, B, Node, Note, raw_peer, running, soon, until

from subnet.errors import InputError, NotFound, Refused
from subnet.net.base import Priority
from subnet.net.offences import BORNE, CUT_FIRST_S, CUT_MOST_S, CUTS_FORGIVEN_S, FORGIVEN_S, CutOff, Offences


def test_a_few_are_borne_and_forgiven() -> None:
    offences = Offences("peer")
    now_s = 0.0
    for _ in range(100):
        now_s += FORGIVEN_S
        assert offences.note(InputError("x"), now_s) == 0.0
    offences.check(now_s)
    assert offences.counts == {"bad_input": 100}


def test_cut_offs_double_up_to_the_most_and_start_again_after_a_long_time() -> None:
    offences = Offences("peer")
    now_s, cuts = 0.0, []
    while len(cuts) < 10:
        cut_s = offences.note(InputError("x"), now_s)
        if cut_s:
            cuts.append(cut_s)
            now_s += cut_s
    assert cuts == [min(CUT_MOST_S, CUT_FIRST_S * 2**i) for i in range(10)]
    now_s += CUTS_FORGIVEN_S + 1
    cut_s = 0.0
    while not cut_s:
        cut_s = offences.note(InputError("x"), now_s)
    assert cut_s == CUT_FIRST_S


def test_what_honest_peers_send_too_counts_little() -> None:
    offences = Offences("peer")
    most = round(BORNE * 64)
    assert not any(offences.note(NotFound("x"), 0.0) for _ in range(most - 1))
    assert offences.note(NotFound("x"), 0.0) == CUT_FIRST_S


def test_while_it_is_cut_off() -> None:
    offences = Offences("peer")
    while not offences.note(InputError("x"), 5.0):
        pass
    with pytest.raises(CutOff) as raised:
        offences.check(6.0)
    assert raised.value.retryable
    assert raised.value.retry_after_s == CUT_FIRST_S - 1.0
    offences.check(5.0 + CUT_FIRST_S)


async def test_a_liar_is_cut_off_its_sender_told_and_each_code_said_once() -> None:
    said: list[str] = []
    sink = logger.add(lambda message: said.append(message.record["message"]), level="WARNING")
    a, b = Node(A), Node(B)
    try:
        async with running(a, b):
            for number in range(-4, 0):
                await a.transport.send(b.address, Note(number), b"", priority=Priority.FORWARD, deadline=soon())
            await a.transport.send(b.address, Note(1), b"", priority=Priority.FORWARD, deadline=soon())
            await until(lambda: b.numbers == [1])
            assert (a.resets, b.resets) == ([], [])
            await a.transport.send(b.address, Note(-9), b"", priority=Priority.FORWARD, deadline=soon())
            await until(lambda: len(b.resets) == 1)
            assert "cut off" in b.resets[0]
            late = asyncio.create_task(a.transport.send(b.address, Note(2), b"", deadline=soon()))
            await asyncio.sleep(0.3)
            assert b.numbers == [1]
            with pytest.raises(Refused) as refused:
                async with raw_peer(b):
                    pass
            assert refused.value.code == "cut_off"
            assert refused.value.retryable
            b.transport._peers[A.hotkey].offences._cut_until_s = 0.0
            await late
            await until(lambda: b.numbers == [1, 2])
    finally:
        logger.remove(sink)
    assert sum("is refused: bad_input" in line for line in said) == 1
    assert sum("refuses a FORWARD frame of ours: bad_input" in line for line in said) == 1
    assert sum("cut off for 2 s, after: bad_input 5" in line for line in said) == 1
