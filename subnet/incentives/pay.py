"""What members do and are credited with, in the real accounts of a run, interval by interval.

Aggregated: the items that a hotkey seals in an interval are one credit at its middle, or as many as its drawn lies part them
into; leases are counted there too. Which partials are wrong and which are drawn is decided partial by partial, by the rates of
:mod:`subnet.audit.draw`, with numpy's generator in place of BLAKE3 of a block's hash. In probation each partial is redone until the
real rule says that it is over. A machine that goes down loses half a step.
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from subnet.audit.draw import wrong_partials
from subnet.incentives.behaviour import AWAY
from subnet.incentives.court import Court
from subnet.incentives.machines import HOUR_S, Floats
from subnet.incentives.scenario import BLOCK_S, TEMPO_S, Scenario
from subnet.incentives.seats import Lie, Seat
from subnet.policy.policy import SubnetPolicy
from subnet.run.audits import CONVICTED
from subnet.score.accounts import Accounts, AccountsData
from subnet.score.entry import tally_of
from subnet.score.score import Score, scores_of
from subnet.words import Commitment, Member

DRAWN_FROM_BLOCKS = 2
"""A window's audits are drawn from the block so many after its end (``validator.policy.AuditPolicy.block_margin``)."""


class Payroll:
    def __init__(
        self,
        policy: SubnetPolicy,
        scenario: Scenario,
        court: Court,
        seats: list[Seat],
        interval_s: float,
        rng: np.random.Generator,
    ) -> None:
        self._policy, self._run, self._court, self._seats, self._rng = policy, scenario.run, court, seats, rng
        self._interval_s = interval_s
        self._steps = max(1, round(interval_s / scenario.run.step_s))
        """Partials of a member in an interval."""
        self._step_s = interval_s / self._steps
        self.accounts = Accounts(policy.score, AccountsData(stage_flops=[scenario.run.item_flops]))
        self._lies: list[Lie] = []
        self._incarnations = 0
        self._last_step = 0
        self._machine_S = np.array([seat.number for seat in seats], dtype=np.int64)
        self._items_per_s_S = np.array([seat.machine.flops_per_s / scenario.run.item_flops for seat in seats])
        self._late_share_S = np.array([seat.machine.late_share for seat in seats])
        self._rest_S, self._late_rest_S = np.zeros(len(seats)), np.zeros(len(seats))
        self._in_S, self._speed_S, self._begins_S, self._rate_S = (np.zeros(len(seats)) for _ in range(4))
        self._items: dict[int, tuple[int, ...]] = {}

    # --- members -----------------------------------------------------------------------------------------------------

    def begin_tempo(self) -> None:
        """Takes up what everybody decided."""
        for index, seat in enumerate(self._seats):
            conduct = seat.conduct
            self._in_S[index] = seat.is_in
            self._speed_S[index] = conduct.speed
            self._begins_S[index] = conduct.begins
            self._rate_S[index] = self._court.rate(seat.hotkey, unchecked=conduct.unchecked) if seat.is_in else 0.0

    def _reach(self, time_s: float) -> None:
        self.accounts.reach(int(time_s * 1e9))

    def join(self, seat: Seat, now_s: float) -> None:
        """A machine that is down joins when it comes up."""
        self._reach(now_s)
        self._incarnations += 1
        seat.member = Member(seat.hotkey, 1, self._incarnations)
        self.accounts.joined(seat.member, seat.block)
        seat.on_probation = self._court.in_probation(seat.hotkey)
        if not seat.is_up:
            self.accounts.gone(seat.member, lost=False)

    def leave(self, seat: Seat, now_s: float) -> None:
        """Politely: that is no absence."""
        if seat.member is not None:
            self._reach(now_s)
            self.accounts.gone(seat.member, lost=False)
            seat.member = None
        seat.conduct = AWAY

    def go_down(self, seat: Seat, now_s: float) -> None:
        seat.is_up = False
        if seat.member is not None:
            self._reach(now_s)
            self.accounts.gone(seat.member, lost=True)

    def come_up(self, seat: Seat, now_s: float) -> None:
        seat.is_up = True
        if seat.member is not None:
            self.join(seat, now_s)

    # --- work --------------------------------------------------------------------------------------------------------

    def work(self, interval: int, begins: float, up_M: Floats, downs_M: Floats) -> None:
        """An interval's. ``begins``: where in its tempo, as a part of it; ``up_M``: part of it that each machine is up."""
        middle_s = (interval + 0.5) * self._interval_s
        self._establish(middle_s)
        self._reach(middle_s)
        up_S = up_M[self._machine_S] * self._in_S
        part = self._interval_s / TEMPO_S
        works_S = np.clip((begins + part - self._begins_S) / part, 0.0, 1.0)
        busy_s_S = np.maximum(0.0, up_S * works_S * self._interval_s - 0.5 * self._step_s * downs_M[self._machine_S])
        handed_S = self._rest_S + busy_s_S * self._items_per_s_S * self._speed_S
        items_S = np.floor(handed_S)
        self._rest_S = handed_S - items_S
        idle_s_S = up_S * (1.0 - works_S) * self._interval_s
        late_S = self._late_rest_S + self._late_share_S * items_S
        late_S += idle_s_S * self._items_per_s_S / self._run.lease_factor
        self._late_rest_S = late_S - np.floor(late_S)
        busy_S = busy_s_S / self._interval_s
        chances_SP = self._rng.random((len(self._seats), self._steps))
        wrong_SP = self._rng.random((len(self._seats), self._steps))
        drawn_S = (chances_SP < (self._rate_S * busy_S)[:, None]).sum(axis=1)
        self._credit(interval, items_S, late_S, drawn_S, busy_S, chances_SP, wrong_SP)

    def _credit(
        self,
        interval: int,
        items_S: Floats,
        late_S: Floats,
        drawn_S: NDArray[np.int64],
        busy_S: Floats,
        chances_SP: Floats,
        wrong_SP: Floats,
    ) -> None:
        accounts, court = self.accounts, self._court
        step = interval * self._steps
        self._last_step = step + self._steps
        redone: list[tuple[Member, int]] = []
        many, late, drawn = items_S.astype(int).tolist(), late_S.astype(int).tolist(), drawn_S.tolist()
        for index, seat in enumerate(self._seats):
            member, items = seat.member, many[index]
            if member is None:
                continue
            if items and (seat.conduct.wrong > 0.0 or seat.on_probation):
                num = max(1, round(float(busy_S[index]) * self._steps))
                self._examine(index, seat, member, interval, items, num, chances_SP[index], wrong_SP[index])
            elif items:
                self._seal(step, member, items)
                for _ in range(drawn[index]):
                    accounts.passed(member)
                if drawn[index]:
                    redone.append((member, drawn[index] * max(1, items // self._steps)))
            if items or late[index]:
                accounts.count(member, done=items, late=late[index])
        court.passed(redone)

    def _seal(self, step: int, member: Member, items: int) -> None:
        if items > 0:
            which = self._items.get(items)
            if which is None:
                which = self._items[items] = tuple(range(items))
            self.accounts.sealed(step, Commitment(member, 0, which, ()))

    def _examine(
        self,
        index: int,
        seat: Seat,
        member: Member,
        interval: int,
        items: int,
        num: int,
        chances_P: Floats,
        wrong_P: Floats,
    ) -> None:
        """A newcomer's, or a liar's interval, partial by partial."""
        court, conduct, begins_s = self._court, seat.conduct, interval * self._interval_s
        first, each = interval * self._steps, items / num
        own = max(1, round(float(self._items_per_s_S[index]) * self._step_s))
        lying = wrong_partials(conduct.wrong, max(1, round(each)))
        rate = court.rate(seat.hotkey, unchecked=conduct.unchecked)
        open_from, open_items, done = first, 0, 0
        for p in range(num):
            count = min(items - done, max(1, round(each * (p + 1)) - done)) if p < num - 1 else items - done
            time_s = begins_s + (p + 1) * self._step_s
            redo = court.must_audit(seat.hotkey)
            if redo and conduct.honest_first and court.in_probation(seat.hotkey):
                count, is_wrong = min(count, own), False
            else:
                is_wrong = bool(wrong_P[p] < lying)
            done += count
            if count <= 0:
                continue
            if is_wrong and seat.first_lie_s is None:
                seat.first_lie_s = time_s
            if redo and is_wrong:
                self._seal(open_from, member, open_items)
                open_from, open_items = first + p + 1, 0
                if self._found(seat, Lie(time_s, first + p, index, count, member), sealed=False):
                    return
            elif redo:
                court.passed([(member, count)])
                self.accounts.passed(member)
                open_items += count
            elif chances_P[p] < rate:
                self._seal(open_from, member, open_items)
                open_from, open_items = first + p + 1, 0
                self._seal(first + p, member, count)
                if is_wrong:
                    heapq.heappush(
                        self._lies, Lie(self._known_at_s(first + p, time_s), first + p, index, count, member)
                    )
                else:
                    court.passed([(member, count)])
                    self.accounts.passed(member)
            else:
                open_items += count
        self._seal(open_from, member, open_items)
        seat.on_probation = court.in_probation(seat.hotkey)

    def _known_at_s(self, step: int, time_s: float) -> float:
        """When the window of a step has ended, its audits are drawn, and the lie is established."""
        left = self._court.audit.window_steps - 1 - step % self._court.audit.window_steps
        return time_s + left * self._step_s + DRAWN_FROM_BLOCKS * BLOCK_S + self._run.redo_s

    # --- lies --------------------------------------------------------------------------------------------------------

    def _establish(self, until_s: float) -> None:
        while self._lies and self._lies[0].time_s <= until_s:
            lie = heapq.heappop(self._lies)
            seat = self._seats[lie.seat]
            if seat.hotkey == lie.member.hotkey:
                self._found(seat, lie, sealed=True)

    def _found(self, seat: Seat, lie: Lie, *, sealed: bool) -> bool:
        """Whether it is out."""
        accounts, member = self.accounts, lie.member
        self._reach(lie.time_s)
        accounts.failed(lie.step, 0, member, lie.step, lie.items)
        case, outcome = self._court.accuse(member, seat.coldkey, sealed=sealed)
        if seat.first_lie_s is not None:
            seat.book.found_out_h.append(max(0.0, lie.time_s - seat.first_lie_s) / HOUR_S)
            seat.first_lie_s = None
        if outcome != CONVICTED:
            seat.faults += 1
            seat.book.faults += 1
            seat.on_probation = self._court.in_probation(seat.hotkey)
            return False
        accounts.convict(case, accounts.of(member), f"convicted in case {case}")
        if seat.member is not None:
            accounts.gone(seat.member, lost=False)
        self._court.forget(member.hotkey)
        seat.book.convictions += 1
        seat.convictions += 1
        seat.hotkey, seat.member, seat.faults = "", None, 0
        seat.out_s = lie.time_s
        seat.retry_s = lie.time_s + seat.machine.behaviour.returns_after_h * HOUR_S
        return True

    # --- scores ------------------------------------------------------------------------------------------------------

    def scores(self, now_s: float) -> dict[str, Score]:
        """As a validator has them at the end of a tempo."""
        self._establish(now_s)
        self._reach(now_s)
        audit, accounts = self._court.audit, self.accounts
        settle_after = (audit.open_windows + 2) * audit.window_steps if audit.on else 0
        accounts.settle(below=self._last_step - settle_after)
        accounts.forget_idle()
        faded: dict[float, float] = {}
        tallies = {
            hotkey: [tally_of(hotkey, entry, now_s, self._policy.score, faded)]
            for hotkey, entry in accounts.data.entries.items()
        }
        return scores_of(self._policy.score, tallies)

    def end(self) -> None:
        """Who lied and wasn't found out."""
        for seat in self._seats:
            seat.book.undetected += seat.first_lie_s is not None
