"""The last joins that were refused, by hotkey, so that a miner that stands outside can ask why. Bounded; in memory alone."""

from __future__ import annotations

from collections import OrderedDict, deque

import msgspec

from subnet.errors import Refusal
from subnet.score.api import RefusalView

MAX_HOTKEYS = 4096
KEPT_EACH = 8


class Refusals:
    def __init__(self) -> None:
        self._by_hotkey: OrderedDict[str, deque[RefusalView]] = OrderedDict()

    def note(self, hotkey: str, refusal: Refusal, time_s: float) -> None:
        """The same refusal again only counts up."""
        kept = self._by_hotkey.setdefault(hotkey, deque(maxlen=KEPT_EACH))
        self._by_hotkey.move_to_end(hotkey)
        times = 1
        if kept and (kept[-1].code, kept[-1].hint) == (refusal.code, refusal.hint):
            times = kept.pop().times + 1
        kept.append(RefusalView(time_s, refusal.code, refusal.reason, refusal.retry_after, refusal.hint, times))
        while len(self._by_hotkey) > MAX_HOTKEYS:
            self._by_hotkey.popitem(last=False)

    def of(self, hotkey: str, now_s: float | None = None) -> tuple[RefusalView, ...]:
        """Oldest first; with ``now_s`` what is left of ``retry_after_s``."""
        found = tuple(self._by_hotkey.get(hotkey, ()))
        if now_s is None:
            return found
        return tuple(msgspec.structs.replace(view, retry_after_s=_left(view, now_s)) for view in found)


def _left(view: RefusalView, now_s: float) -> float | None:
    return None if view.retry_after_s is None else max(0.0, view.retry_after_s - (now_s - view.time_s))
