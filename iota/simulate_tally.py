"""What a simulated run is counted by: steps and their phases, where members' time went, bytes, events; and its figures."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from subnet.run import events as ev
from subnet.run import state as st
from subnet.words import CALIBRATION_STEP

if TYPE_CHECKING:
    from iota.simulate_member import SimMember
    from iota.simulate_world import World


class Interval(NamedTuple):
    node: int
    phase: str
    begin_s: float
    end_s: float


class StepFigures(msgspec.Struct, frozen=True):
    """One step. ``computed_s``: until the last item of the step was done; the rest is the merge."""

    step: int
    opened_s: float
    computed_s: float
    sealed_s: float
    tokens: int
    records: int
    journal_bytes: int


class Figures(msgspec.Struct, frozen=True):
    """What came of a simulated run. All of it is the same for the same seed; ``fault`` counts are of the whole run."""

    gpus: int
    stages: int
    steps: int
    seconds: float
    """Simulated, from the first measured step's opening to the last seal."""
    tokens_per_s: float
    step_s: float
    """Mean of the measured steps."""
    mfu: float
    """Useful FLOPs over the peak of the whole fleet, those that are down included."""
    usd_per_million_tokens: float
    time_share: dict[str, float]
    """Of all GPUs' time: compute (useful), lost, input, merge, idle, join, down."""
    computing_share: float
    """Of a step, until its last item is done; what is left is the merge."""
    bytes_per_step: dict[str, float]
    """Sent, by kind, all members and the store together."""
    faults: dict[str, int]
    redone_items: int
    records_per_step: float
    journal_bytes_per_step: float
    claims_per_step: float
    items_counted: int
    """Microbatches in sealed sums: steps times M, less the skipped."""
    too_small: int
    """Members whose GPU holds less than their stage needs."""
    each_step: tuple[StepFigures, ...]


class Tally:
    """Told of every event and of every member's phases."""

    def __init__(self, world: World, picture_step: int | None) -> None:
        self._world = world
        self.picture_step = picture_step
        self._picture_end_s: float | None = None
        self.intervals: list[Interval] = []
        self.steps: list[StepFigures] = []
        self.counts: Counter[str] = Counter()
        self.items_counted = 0
        self.progress_s = 0.0
        """When a step was sealed last."""
        self._opened_s = self._computed_s = 0.0
        self._records = self._bytes = self._claims = 0
        self._index = {node.hotkey: number for number, node in enumerate(world.nodes)}
        self._spent_at: tuple[float, dict[str, float], float] = (0.0, {}, 0.0)
        self._spent_end: tuple[dict[str, float], float] = ({}, 0.0)
        self._sent_at: dict[str, float] = {}
        self._first_claims = 0

    # --- told

    def saw(self, event: ev.AnyEvent) -> None:
        self.counts[type(event).__name__] += 1
        world = self._world
        match event:
            case ev.StepPlanned():
                if event.step == 0:  # measured from here: calibration and joining are behind
                    self._spent_at = (world.now_s, self._phases(), self._lost())
                    self._sent_at = self._sent()
                    self._first_claims = world.coordinator.num_claims
                self._opened_s = self._computed_s = world.now_s
            case ev.Backwarded():
                self._computed_s = world.now_s
            case ev.Leased() if event.generation > 1:
                self.counts["redone"] += 1
            case ev.StepSealed():
                self.items_counted += event.num_counted
                self.progress_s = world.now_s
                if event.step > CALIBRATION_STEP:
                    self._sealed(event)
            case _:
                pass

    def _sealed(self, event: ev.StepSealed) -> None:
        coordinator = self._world.coordinator
        if event.step == self.picture_step:
            self._picture_end_s = self._world.now_s
        records, size = coordinator.num_records, coordinator.num_bytes
        if not self.steps:
            self._records, self._bytes = self._records or records, self._bytes or size
        self.steps.append(
            StepFigures(
                event.step,
                self._opened_s,
                self._computed_s,
                self._world.now_s,
                event.tokens,
                records - self._records,
                size - self._bytes,
            )
        )
        self._records, self._bytes = records, size
        self._spent_end = (self._phases(), self._lost())

    def spent(self, node: SimMember, phase: str, begin_s: float, end_s: float) -> None:
        node.spent_s[phase] += end_s - begin_s
        wanted, end = self.picture_step, self._picture_end_s
        if wanted is None or end_s <= begin_s or self._world.state.next_step < wanted:
            return
        if end is None or begin_s < end:
            self.intervals.append(Interval(self._index[node.hotkey], phase, begin_s, end_s))

    def close(self) -> None:
        for node in self._world.nodes:
            self.spent(node, node.phase, node.phase_since_s, self._world.now_s)
            node.phase_since_s = self._world.now_s

    # --- asked

    def _phases(self) -> dict[str, float]:
        total: dict[str, float] = {}
        now_s = self._world.now_s
        for node in self._world.nodes:
            for phase, spent_s in node.spent_s.items():
                total[phase] = total.get(phase, 0.0) + spent_s
            total[node.phase] = total.get(node.phase, 0.0) + now_s - node.phase_since_s
        return total

    def _lost(self) -> float:
        return sum(node.lost_s for node in self._world.nodes)

    def _sent(self) -> dict[str, float]:
        total: dict[str, float] = {}
        links = {id(node.link): node.link for node in self._world.nodes}
        for link in [*links.values(), self._world.store]:
            for kind, size in link.up.num_bytes.items():
                total[kind] = total.get(kind, 0.0) + size
        return total

    def figures(self) -> Figures:
        """Of all steps but calibration."""
        world, steps = self._world, self.steps
        config = world.plan.config
        begin_s, before, lost_before = self._spent_at
        end_s = steps[-1].sealed_s
        seconds = end_s - begin_s
        after, lost_after = self._spent_end
        spent = {name: value - before.get(name, 0.0) for name, value in after.items()}
        lost_s = lost_after - lost_before
        spent["compute"] = max(0.0, spent.get("compute", 0.0) - lost_s)
        spent["lost"] = lost_s
        total_s = max(1e-9, sum(spent.values()))
        tokens = sum(step.tokens for step in steps)
        useful = world.costs.flops_per_step * tokens / config.tokens_per_step
        sent = {kind: (size - self._sent_at.get(kind, 0.0)) / len(steps) for kind, size in self._sent().items()}
        coordinator = world.coordinator
        later = steps[1:] or steps
        return Figures(
            gpus=world.fleet.num_gpus,
            stages=world.plan.num_stages,
            steps=len(steps),
            seconds=seconds,
            tokens_per_s=tokens / seconds,
            step_s=seconds / len(steps),
            mfu=useful / (world.fleet.peak_flops * seconds),
            usd_per_million_tokens=world.fleet.usd_per_hour * seconds / 3600 / (tokens / 1e6),
            time_share={name: spent.get(name, 0.0) / total_s for name in ("compute", "lost", *PHASES_LEFT)},
            computing_share=sum(s.computed_s - s.opened_s for s in steps) / seconds,
            bytes_per_step=dict(sorted(sent.items())),
            faults=dict(sorted(Counter(fault.kind for fault in world.faults.happened).items())),
            redone_items=self.counts["redone"],
            records_per_step=sum(s.records for s in later) / len(later),
            journal_bytes_per_step=sum(s.journal_bytes for s in later) / len(later),
            claims_per_step=(coordinator.num_claims - self._first_claims) / len(steps),
            items_counted=self.items_counted,
            too_small=sum(is_too_small(world, node) for node in world.nodes),
            each_step=tuple(steps),
        )


PHASES_LEFT = ("input", "merge", "idle", "join", "down")


def is_too_small(world: World, node: SimMember) -> bool:
    """Whether the stage that it was placed at needs more memory than its GPU has; nothing in the placement looks at that."""
    if node.stage < 0:
        return False
    replicas = max(1, len(st.members_of(world.state, node.stage)))
    needed = world.costs.peak_bytes(node.stage, replicas, int(node.group.graph_memory_gb * 2**30))
    return needed > node.gpu.memory_gb * 1e9
