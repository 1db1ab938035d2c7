"""The behaviours that the project knows: the honest, and those of docs/security.md that want pay for less than its work.

Each attacker passes its probation honestly unless it says otherwise: redone before the seal, a lie there earns nothing. What
isn't computed costs nothing and takes no time, so a faker also hands in more: leases are dealt by measured speed.
"""

from __future__ import annotations

from typing import ClassVar

from subnet.incentives.behaviour import AWAY, Behaviour, Conduct, View, behaviour, check

DAY_S = 86_400.0
BANDWIDTH_COST = 0.05
"""Of a machine's cost: what it takes to be a member and compute nothing."""


@behaviour("honest")
class Honest(Behaviour, frozen=True):
    """Works whenever its machine is up: fast, slow or flaky is its hardware's affair."""

    def act(self, view: View) -> Conduct:
        return Conduct()


@behaviour("price_sensitive")
class PriceSensitive(Behaviour, frozen=True, kw_only=True):
    """Honest; leaves when it earns less than it costs, and comes back when others of its speed earn more."""

    margin: float = 0.0
    """Profit that it wants, as a share of its cost."""
    patience_h: float = 48.0

    def act(self, view: View) -> Conduct:
        least = view.cost_per_h * (1.0 + self.margin)
        patience_s = self.patience_h * 3600.0
        if view.away_s:
            return Conduct() if view.away_s >= patience_s and view.going_rate_per_h >= least else AWAY
        return AWAY if view.age_s >= patience_s and view.income_per_h < least else Conduct()


class Faker(Behaviour, frozen=True, kw_only=True):
    """Does part of the work, says it is all."""

    is_attack: ClassVar[bool] = True
    speed: float = 4.0
    """Of what it hands in, once its probation is over."""
    cost: float = BANDWIDTH_COST
    share_wrong: float = 1.0
    """Of its items."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check("speed", self.speed, 0.01, 100.0)
        check("cost", self.cost, 0.0, 10.0)
        check("share_wrong", self.share_wrong, 0.0, 1.0)

    def act(self, view: View) -> Conduct:
        return Conduct(speed=self.speed, cost=self.cost, wrong=self.share_wrong)


@behaviour("free_rider")
class FreeRider(Faker, frozen=True, kw_only=True):
    """Computes nothing after its probation; its bandwidth bounds what it hands in."""


@behaviour("lazy_quantiser")
class LazyQuantiser(Faker, frozen=True, kw_only=True):
    """Computes in a cheaper precision than the run's: all bits differ a little."""

    speed: float = 1.7
    cost: float = 0.9


@behaviour("forward_only")
class ForwardOnly(Faker, frozen=True, kw_only=True):
    """Computes the forward (a third of an item), makes up gradients."""

    speed: float = 3.0
    cost: float = 1.0


@behaviour("copier")
class Copier(Faker, frozen=True, kw_only=True):
    """Hands in another microbatch's output again for half of its items: twice as fast, half of them wrong."""

    speed: float = 2.0
    cost: float = 1.0
    share_wrong: float = 0.5


@behaviour("sybils")
class Sybils(Behaviour, frozen=True, kw_only=True):
    """One honest machine under several hotkeys."""

    is_attack: ClassVar[bool] = True
    seats: int = 8

    def act(self, view: View) -> Conduct:
        return Conduct(speed=1.0 / self.seats, cost=1.0 / self.seats)


@behaviour("colluders")
class Colluders(Behaviour, frozen=True, kw_only=True):
    """Owner and contributor: hotkey 0 works and owns partitions, the others hand in made-up sums that it merges. The merge's
    check passes; an audit of a contributor doesn't. ``unchecked``: nobody else holds their stage, so it is audited more."""

    is_attack: ClassVar[bool] = True
    seats: int = 2
    speed: float = 1.0
    unchecked: bool = True

    def act(self, view: View) -> Conduct:
        if view.seat == 0:
            return Conduct(unchecked=self.unchecked)
        return Conduct(speed=self.speed, cost=BANDWIDTH_COST, wrong=1.0, unchecked=self.unchecked)


@behaviour("sleeper")
class Sleeper(Faker, frozen=True, kw_only=True):
    """Honest for weeks, so that its first mismatch counts as a fault; then it computes nothing."""

    turns_after_days: float = 14.0

    def act(self, view: View) -> Conduct:
        return super().act(view) if view.age_s >= self.turns_after_days * DAY_S else Conduct()


@behaviour("uptime_farmer")
class UptimeFarmer(Behaviour, frozen=True, kw_only=True):
    """There all the time, works the last part of each tempo, when work fades least before weights are set; the rest of the
    time its machine is sold to somebody else, and the leases it is dealt run late."""

    is_attack: ClassVar[bool] = True
    duty: float = 0.4
    """Part of the time that it works."""
    idle_cost: float = 0.1
    """Of its cost, while it only is there."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check("duty", self.duty, 0.0, 1.0)
        check("idle_cost", self.idle_cost, 0.0, 1.0)

    def act(self, view: View) -> Conduct:
        return Conduct(begins=1.0 - self.duty, cost=self.duty + (1.0 - self.duty) * self.idle_cost)
