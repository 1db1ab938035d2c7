"""Who does what by rendezvous hashing: one that goes moves only its own work."""

from __future__ import annotations

from collections.abc import Sequence

from blake3 import blake3

from subnet.words import Member


def rendezvous(purpose: str, step: int, index: int, candidates: Sequence[Member]) -> Member:
    """The candidate with the highest hash of purpose, step, index and member; there must be one."""

    def rank(member: Member) -> tuple[bytes, Member]:
        text = f"{purpose}/{step}/{index}/{member.hotkey}/{member.term}/{member.number}"
        return blake3(text.encode()).digest(), member

    return max(candidates, key=rank)
