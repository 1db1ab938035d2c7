"""How much of a peer's wrong doing is borne: a few offences are, more cut it off, for twice as long each time.

What counts is forgiven with time. Each code of a peer is said once, and each cut-off with all counts; never each frame.
"""

from __future__ import annotations

from collections import Counter

from loguru import logger

from subnet.errors import Busy, InputError, IotaError

BORNE = 4.0
FORGIVEN_S = 15.0
"""One offence is forgiven in this time."""
CUT_FIRST_S = 2.0
CUT_MOST_S = 300.0
CUTS_FORGIVEN_S = 600.0
"""The length of the next cut-off falls back to the first after so long without one."""
STALE_WEIGHT = 1 / 64
"""Of a refused frame that an honest peer may send as well, because it has seen less than we have."""


class CutOff(Busy):
    """We speak with this peer again later."""

    code = "cut_off"


class Offences:
    """Of one peer; times are the caller's clock, in seconds."""

    def __init__(self, hotkey: str) -> None:
        self._hotkey = hotkey
        self._counts: Counter[str] = Counter()
        self._level = 0.0
        self._noted_s = 0.0
        self._cut_s = 0.0
        self._cut_until_s = 0.0

    @property
    def counts(self) -> dict[str, int]:
        """Refused frames and connections by code."""
        return dict(self._counts)

    def note(self, error: IotaError, now_s: float) -> float:
        """One more; the seconds for which the peer is cut off from now on, 0 for not at all."""
        self._counts[error.code] += 1
        if self._counts[error.code] == 1:
            logger.warning("peer {} is refused: {}: {}", self._hotkey, error.code, error.reason)
        self._level = max(0.0, self._level - (now_s - self._noted_s) / FORGIVEN_S)
        self._level += 1.0 if isinstance(error, InputError) else STALE_WEIGHT
        self._noted_s = now_s
        if self._level < BORNE:
            return 0.0
        if now_s > self._cut_until_s + CUTS_FORGIVEN_S:
            self._cut_s = 0.0
        self._cut_s = min(CUT_MOST_S, max(CUT_FIRST_S, 2 * self._cut_s))
        self._cut_until_s, self._level = now_s + self._cut_s, BORNE / 2
        counts = ", ".join(f"{code} {count}" for code, count in sorted(self._counts.items()))
        logger.warning("peer {} is cut off for {:g} s, after: {}", self._hotkey, self._cut_s, counts)
        return self._cut_s

    def check(self, now_s: float) -> None:
        """Raises :class:`CutOff` while the peer is."""
        left_s = self._cut_until_s - now_s
        if left_s > 0:
            raise CutOff(f"cut off for {left_s:.1f} s after repeated offences", retry_after_s=left_s)
