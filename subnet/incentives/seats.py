"""A hotkey's place in a simulation: its machine, its present registration, what it does, and what it lied about."""

from __future__ import annotations

from dataclasses import dataclass, field

from subnet.incentives.behaviour import AWAY, Conduct, View
from subnet.incentives.machines import HOUR_S, Machine
from subnet.incentives.outcome import KindSeed
from subnet.words import Member


@dataclass(slots=True)
class Seat:
    """One of a machine's hotkeys. After a conviction it goes on under a new one."""

    machine: Machine
    number: int
    """Of the machine."""
    seat: int
    book: KindSeed
    conduct: Conduct = AWAY
    hotkey: str = ""
    block: int = 0
    """Of the registration."""
    member: Member | None = None
    """Its last incarnation; None while it isn't a member by its own choice, or is out."""
    is_up: bool = True
    on_probation: bool = False
    registered_s: float = 0.0
    left_s: float | None = None
    out_s: float = -1.0
    """When it was convicted last."""
    retry_s: float = 0.0
    """Not before this another hotkey is registered."""
    generation: int = 0
    convictions: int = 0
    faults: int = 0
    first_lie_s: float | None = None
    """Of this hotkey, or since its last fault."""
    income_per_h: float = 0.0

    @property
    def is_in(self) -> bool:
        return self.member is not None

    def hours_in(self, begins_s: float, length_s: float) -> float:
        """Of a tempo that it began as a member, or not."""
        if self.is_in:
            return length_s / HOUR_S
        return max(0.0, self.out_s - begins_s) / HOUR_S

    @property
    def coldkey(self) -> str:
        return f"coldkey-{self.number}"

    def view(self, now_s: float, going_rate: float) -> View:
        """``going_rate``: USD per hour and FLOP/s that honest machines were paid."""
        return View(
            now_s=now_s,
            seat=self.seat,
            age_s=now_s - self.registered_s if self.hotkey else 0.0,
            away_s=0.0 if self.left_s is None else now_s - self.left_s,
            convictions=self.convictions,
            faults=self.faults,
            income_per_h=self.income_per_h,
            cost_per_h=self.machine.cost_per_h,
            going_rate_per_h=going_rate * self.machine.flops_per_s,
        )


@dataclass(frozen=True, order=True)
class Lie:
    """A wrong partial that was drawn: established at ``time_s``."""

    time_s: float
    step: int
    seat: int
    items: int
    member: Member = field(compare=False)


def make_seats(machines: list[Machine], books: dict[str, KindSeed]) -> list[Seat]:
    return [
        Seat(machine, number, seat, books[machine.group])
        for number, machine in enumerate(machines)
        for seat in range(machine.behaviour.seats)
    ]
