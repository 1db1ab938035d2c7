"""When a copy of the fold is taken, and when it counts: taken as a quorum event is folded, staged once the log store has it.

So no later term takes back what a copy holds. A copy is taken at a StepSealed, where no step is open and the state is
smallest, every ``records`` records or ``size_bytes``; sooner where a snapshot was verified since (the state has just dropped
the seals before it); at any quorum event where steps are so long that none ended for four times as many.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from subnet.allocator import give_back
from subnet.run.events import QUORUM_EVENTS, AnyEvent, StepSealed
from subnet.run.state import RunState, num_stages, restore_point
from subnet.run.state_codec import dump_state
from subnet.words import CALIBRATION_STEP
from validator.copies import Beside, Copy, encode_beside
from validator.journal_store import JournalStore


@dataclass(frozen=True)
class CopyPolicy:
    """Between two copies, at least. A replay of 20,000 records takes about half a second, as does their download."""

    records: int = 20_000
    size_bytes: int = 64 << 20
    records_after_snapshot: int = 2_000


class Copier:
    """``consider`` each record after it was folded; ``settle`` whenever the log store has acknowledged more."""

    def __init__(self, journal: JournalStore, policy: CopyPolicy | None = None) -> None:
        self._journal, self._policy = journal, policy or CopyPolicy()
        self._number, self._restores_from = 0, CALIBRATION_STEP
        """Of the last copy that was taken."""
        if journal.copy is not None:
            self._number, self._restores_from = journal.copy.number, restores_from(journal.copy.load())
        self._size_bytes = journal.size_bytes - journal.size_bytes_from(self._number)
        self._waiting: list[Copy] = []

    def consider(self, event: AnyEvent, state: RunState, beside: Callable[[], Beside]) -> None:
        """``event`` was folded into ``state``: it is the last staged record."""
        if not isinstance(event, QUORUM_EVENTS) or not self._due(event, state):
            return
        journal = self._journal
        self._waiting.append(Copy(len(journal), journal.head, dump_state(state), encode_beside(beside())))
        self._number, self._size_bytes, self._restores_from = len(journal), journal.size_bytes, restores_from(state)

    def _due(self, event: AnyEvent, state: RunState) -> bool:
        policy, records = self._policy, len(self._journal) - self._number
        overdue = max(records / policy.records, (self._journal.size_bytes - self._size_bytes) / policy.size_bytes)
        if not isinstance(event, StepSealed):
            return overdue >= 4
        if overdue >= 1:
            return True
        return records >= policy.records_after_snapshot and restores_from(state) > self._restores_from

    def settle(self, acknowledged: int) -> None:
        """The newest copy that is final by now goes to the journal; older ones are of no use any more.

        The records before it go out of memory: what the heap holds of them is given back, else it rises with every copy.
        """
        final = [copy for copy in self._waiting if copy.number <= acknowledged]
        if final:
            self._journal.stage_copy(final[-1])
            self._waiting = self._waiting[len(final) :]
            give_back()


def restores_from(state: RunState) -> int:
    """The oldest step from which a joiner of any stage restores: it rises when a snapshot is verified."""
    if state.run is None:
        return CALIBRATION_STEP
    return min(restore_point(state, stage).version for stage in range(num_stages(state)))
