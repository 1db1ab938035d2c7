"""A subnet in virtual time: machines work, audits draw, cases end, scores become weights, tempos pay. No clock, no socket.

Real code: accounts and scores (:mod:`subnet.incentives.pay`, which says what is aggregated), audits and cases
(:mod:`subnet.incentives.court`), the chain (:mod:`subnet.incentives.market`). Not simulated: other stages and what they wait for,
rewinds, pay for work that is redone, refused evidence.
"""

from __future__ import annotations

import numpy as np

from subnet.incentives.behaviour import AWAY, Conduct
from subnet.incentives.court import Court, Rules
from subnet.incentives.machines import HOUR_S, Change, Timeline, make_machines
from subnet.incentives.market import Market
from subnet.incentives.outcome import KindSeed, Seed, gini
from subnet.incentives.pay import Payroll
from subnet.incentives.scenario import TEMPO_S, Scenario
from subnet.incentives.seats import Seat, make_seats
from subnet.policy.policy import SubnetPolicy
from subnet.run.config import AuditSection

DAY_S = 86_400.0
INCOME_HALF_LIFE_S = 12 * HOUR_S
"""Of what a miner calls its income."""
_STRENGTH = ("none", "probation", "all")


def audit_of(scenario: Scenario, policy: SubnetPolicy) -> AuditSection:
    """The run's audits, raised to what the policy requires: a run with less would be refused."""
    run, least = scenario.run.audit, policy.audit
    before = max(run.before_seal, least.required, key=_STRENGTH.index)
    if before == "none":
        return run
    return AuditSection(
        rate=max(run.rate, least.min_rate),
        before_seal=before,
        probation_items=max(run.probation_items, least.min_probation_items),
        window_steps=run.window_steps,
        open_windows=run.open_windows,
        horizon_steps=run.horizon_steps,
    )


def num_tempos(scenario: Scenario) -> int:
    return max(1, round(scenario.days * DAY_S / TEMPO_S))


def simulate(policy: SubnetPolicy, scenario: Scenario, seed: int, rules: Rules) -> Seed:
    """The same policy, scenario and seed give the same numbers."""
    world = World(policy, scenario, seed, rules)
    for tempo in range(world.tempos):
        world.pass_tempo(tempo)
    return world.outcome()


class World:
    def __init__(self, policy: SubnetPolicy, scenario: Scenario, seed: int, rules: Rules) -> None:
        self.policy, self.scenario, self._seed = policy, scenario, seed
        self.tempos = num_tempos(scenario)
        self._folds = scenario.folds_per_tempo
        self._interval_s = TEMPO_S / self._folds
        self.machines = make_machines(scenario, seed, self.tempos * TEMPO_S)
        self._timeline = Timeline(self.machines, self._interval_s, self.tempos * self._folds)
        num_days = max(1, round(self.tempos * TEMPO_S / DAY_S))
        self.books = {
            group.name: KindSeed(group.count, daily_usd=[0.0] * num_days, daily_running_usd=[0.0] * num_days)
            for group in scenario.groups
        }
        self.seats = make_seats(self.machines, self.books)
        self._by_machine: list[list[Seat]] = [[] for _ in self.machines]
        for seat in self.seats:
            self._by_machine[seat.number].append(seat)
        self._days_s = [0.0] * num_days
        self._income = [0.0] * len(self.machines)
        self._away_h = 0.0
        self._going_rate = 0.0
        """USD per hour and FLOP/s."""
        self._validators_usd: dict[str, float] = {}
        coldkeys = [f"coldkey-{number}" for number in range(len(self.machines))]
        self.market = Market(scenario.economy, len(self.seats), coldkeys, policy.weights.burn_share, rules)
        court = Court(audit_of(scenario, policy), rules)
        rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, 2**31])))
        self.pay = Payroll(policy, scenario, court, self.seats, self._interval_s, rng)

    # --- a tempo ---------------------------------------------------------------------------------------------------

    def pass_tempo(self, tempo: int) -> None:
        begins_s = tempo * TEMPO_S
        self._choose(begins_s)
        for fold in range(self._folds):
            interval = tempo * self._folds + fold
            self._pass_interval(interval, fold)
        now_s = begins_s + TEMPO_S
        self._pay(now_s, self.market.tempo(self.pay.scores(now_s)))

    def _choose(self, now_s: float) -> None:
        """Everybody decides what to do until the next tempo; who stays has a registration."""
        known = self.market.registered()
        for seat in self.seats:
            conduct = seat.machine.behaviour.act(seat.view(now_s, self._going_rate))
            if not conduct.stays:
                self._leave(seat, now_s)
            elif now_s >= seat.retry_s and (seat.hotkey in known or self._register(seat, now_s)):
                self._enter(seat, conduct, now_s)
        self.pay.begin_tempo()

    def _leave(self, seat: Seat, now_s: float) -> None:
        if seat.left_s is None:
            seat.left_s = now_s
            seat.book.departures += 1
        self.pay.leave(seat, now_s)

    def _register(self, seat: Seat, now_s: float) -> bool:
        """A new hotkey after a conviction, the same one where it was pruned."""
        if not seat.hotkey:
            seat.generation += 1
            seat.hotkey = f"{seat.machine.group}-{seat.number}-{seat.seat}-{seat.generation}"
        block = self.market.register(seat.hotkey, seat.coldkey)
        if block is None:
            return False
        seat.block, seat.registered_s, seat.member = block, now_s, None
        seat.book.registrations += 1
        seat.book.registering_usd += self.scenario.economy.registration_cost * self.scenario.economy.token_usd
        return True

    def _enter(self, seat: Seat, conduct: Conduct, now_s: float) -> None:
        seat.left_s, seat.conduct = None, conduct
        if seat.member is None:
            self.pay.join(seat, now_s)

    def _pass_interval(self, interval: int, fold: int) -> None:
        changes = self._timeline.changes[interval]
        middle_s = (interval + 0.5) * self._interval_s
        downs = np.zeros(len(self.machines))
        for change in changes:
            downs[change.machine] += not change.is_up
        for change in changes:
            if change.time_s < middle_s:
                self._change(change)
        self.pay.work(interval, fold / self._folds, self._timeline.up_IM[interval], downs)
        for change in changes:
            if change.time_s >= middle_s:
                self._change(change)

    def _change(self, change: Change) -> None:
        for seat in self._by_machine[change.machine]:
            if change.is_up:
                self.pay.come_up(seat, change.time_s)
            else:
                self.pay.go_down(seat, change.time_s)

    # --- money -----------------------------------------------------------------------------------------------------

    def _pay(self, now_s: float, earned: dict[str, float]) -> None:
        economy, hours = self.scenario.economy, TEMPO_S / HOUR_S
        day = min(int((now_s - TEMPO_S / 2) / DAY_S), len(self._days_s) - 1)
        self._days_s[day] += TEMPO_S
        fade = 0.5 ** (TEMPO_S / INCOME_HALF_LIFE_S)
        stake_usd = self.policy.admission.min_stake * economy.token_usd
        capital_per_h = stake_usd * economy.capital_cost_per_year / (365 * 24)
        honest_usd = honest_flops = 0.0
        longest_h: dict[int, float] = {}
        for seat in self.seats:
            usd = earned.get(seat.hotkey, 0.0) * economy.token_usd if seat.hotkey else 0.0
            seat.income_per_h = fade * seat.income_per_h + (1.0 - fade) * usd / hours
            self._income[seat.number] += usd
            book = seat.book
            book.income_usd += usd
            book.daily_usd[day] += usd
            in_h = seat.hours_in(now_s - TEMPO_S, TEMPO_S)
            longest_h[seat.number] = max(longest_h.get(seat.number, 0.0), in_h)
            running = seat.machine.cost_per_h * seat.conduct.cost * in_h
            book.running_usd += running
            book.daily_running_usd[day] += running
            book.capital_usd += capital_per_h * in_h
            if seat.left_s is not None:
                self._away_h += hours
            if seat.is_in and not seat.machine.behaviour.is_attack:
                honest_usd += usd
                honest_flops += seat.machine.flops_per_s
            if not seat.is_in:
                seat.conduct = AWAY
        for number, in_h in longest_h.items():
            self._by_machine[number][0].book.machine_h += in_h
        self._going_rate = honest_usd / honest_flops / hours if honest_flops else 0.0
        for hotkey in self.market.stakes:
            usd = earned.get(hotkey, 0.0) * economy.token_usd
            self._validators_usd[hotkey] = self._validators_usd.get(hotkey, 0.0) + usd

    def outcome(self) -> Seed:
        self.pay.end()
        for book in self.books.values():
            for day, length_s in enumerate(self._days_s):
                each = book.machines * length_s / DAY_S
                book.daily_usd[day] = book.daily_usd[day] / each if each else 0.0
                book.daily_running_usd[day] = book.daily_running_usd[day] / each if each else 0.0
        emitted, owner, burned = self.market.paid()
        all_h = len(self.machines) * self.tempos * TEMPO_S / HOUR_S
        return Seed(
            seed=self._seed,
            kinds=self.books,
            burned_share=burned / ((emitted - owner) / 2) if emitted > owner else 0.0,
            gini=gini(self._income),
            churn=self._away_h / all_h,
            departures=sum(book.departures for book in self.books.values()),
            honest_dividends=self._dividends(self.market.honest) or 0.0,
            copying_dividends=self._dividends(self.market.copying),
        )

    def _dividends(self, hotkeys: list[str]) -> float | None:
        """USD a day per 1,000 tokens of stake."""
        stake = sum(self.market.stakes[hotkey] for hotkey in hotkeys)
        if not stake > 0:
            return None
        usd = sum(self._validators_usd.get(hotkey, 0.0) for hotkey in hotkeys)
        return usd / stake * 1000.0 / (self.tempos * TEMPO_S / DAY_S)
