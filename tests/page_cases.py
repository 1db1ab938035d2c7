"""A long, big run for the page: members of a calm journal, a curve of thousands of steps, random disruptions; really served."""

from __future__ import annotations

import asyncio
import random
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from long_run import LongRun

from subnet.model.plan import ModelPlan, ModelUnits
from subnet.net.border import Listener, listen
from subnet.net.http import create_app
from subnet.protocol.api import MemberView, RunStatus, RunSubmission, RunSummary, StoreCosts
from subnet.protocol.audit_api import AuditCosts
from subnet.protocol.messages import StoreUse
from subnet.protocol.signing import RequestVerifier
from subnet.run import events as ev
from subnet.run.apply import apply
from subnet.run.config import ModelSection, PipelineSection, RunConfig, RunSection
from subnet.run.state import RunState, new_state
from subnet.timing import SYSTEM_CLOCK, Clock, ManualClock
from subnet.words import Member, TensorSpec
from validator.history import History
from validator.http_pages import PageApi
from validator.merge_lines import MergeLine, MergeLines
from validator.page_desk import PageDesk
from validator.page_feed import PageFeed
from validator.page_sight import RunSight, facts_of_entry
from validator.refusals import Refusals
from validator.run_registry import RunEntry, StoredRun
from validator.score_api import ScoreDesk
from validator.scoring import ScoreBook

START_NS = 1_700_000_000 * 10**9
SECOND_NS = 10**9
LAYERS = 24


def fp64(value: float) -> int:
    return struct.unpack("<Q", struct.pack("<d", value))[0]


def fp32(value: float) -> int:
    return struct.unpack("<I", struct.pack("<f", value))[0]


def entry_of(name: str, steps: int, stages: int) -> RunEntry:
    config = RunConfig(
        run=RunSection(name=name, steps=max(1, steps)),
        model=ModelSection(config={"model_type": "llama"}),
        pipeline=PipelineSection(stages=stages, microbatches=128, microbatch_rows=4),
    )
    layer = (TensorSpec("w", (2048, 24_576)),)
    units = ((TensorSpec("e", (128_256, 2048)),), *(layer for _ in range(LAYERS)), (TensorSpec("n", (2048,)),))
    flops = tuple(6.0 * sum(spec.num_elements for spec in unit) for unit in units)
    cuts = tuple(LAYERS * stage // stages for stage in range(stages))
    plan = ModelPlan(config, {}, ModelUnits(units, flops, None), cuts)
    submission = RunSubmission(1, b"", {}, units, flops, tuple(1.0 for _ in units), None, "", "", "")
    return RunEntry(StoredRun(f"{name}-1", name, 0, "owner", submission), config, plan, Path())


@dataclass
class PlayedRun:
    """Implements :class:`validator.page_sight.RunSight`; ``play(n)`` goes on by n steps."""

    name: str = "big"
    num_members: int = 500
    num_stages: int = 6
    num_steps: int = 10_000
    seed: int = 7
    history: History = field(default_factory=History)
    lines: MergeLines = field(default_factory=MergeLines)
    kept: list[bytes] = field(default_factory=list[bytes])
    views: dict[Member, MemberView] = field(default_factory=dict[Member, MemberView])
    step: int = 0
    time_ns: int = START_NS
    waiting_for: str = ""

    def __post_init__(self) -> None:
        self.entry = entry_of(self.name, self.num_steps, self.num_stages)
        self.run_id, self.facts = self.entry.stored.run_id, facts_of_entry(self.entry)
        self.rng = random.Random(self.seed)
        self.state: RunState | None = new_state()
        self.scores = ScoreBook()
        book = self.scores.begin(self.entry.stored.run_id)
        calm = LongRun(members=self.num_members, stages=self.num_stages, microbatches=128, steps=2)
        for record in calm.stream(200_000):
            event = record.event
            if isinstance(event, ev.StepPlanned) and event.step == 1:
                break
            self._keep(msgspec.structs.replace(record, time_ns=self.time_ns))
            apply(self.state, event)
            book.note(msgspec.structs.replace(record, time_ns=self.time_ns))
            self.lines.note(record)
        for member, info in self.state.members.items():
            self.views[member] = self._view(member, info.stage)
        self.number = len(self.kept)

    def _view(self, member: Member, stage: int) -> MemberView:
        rng = self.rng
        state = rng.choices(["working", "ready", "behind", "silent"], [90, 6, 3, 1])[0]
        return MemberView(
            hotkey=member.hotkey,
            incarnation=f"{member.term}.{member.number}",
            stage=stage,
            ready_for_step=self.step - (state == "behind"),
            leases=rng.randrange(1, 4) if state == "working" else 0,
            items_done=rng.randrange(50_000),
            seconds_per_item=rng.lognormvariate(-0.3, 0.45),
            heard_s_ago=rng.uniform(3.2, 5.0) if state == "silent" else 0.2,
        )

    def _keep(self, record: ev.Record) -> None:
        self.kept.append(msgspec.msgpack.encode(record))

    def say(self, event: ev.AnyEvent) -> None:
        record = ev.Record(self.number, self.time_ns, event)
        self.number += 1
        self.history.fold(record)
        self._keep(record)

    def loss(self, step: int) -> float:
        return 2.35 + 8.6 / (1 + step / 55) ** 0.62 + self.rng.gauss(0, 0.035) * (1 + 3 / (1 + step / 100))

    def play(self, count: int, *, calm: bool = False) -> PlayedRun:
        for _ in range(count):
            step, rng = self.step, self.rng
            self.say(ev.StepPlanned(step, 128, 0, None))
            self.time_ns += int(rng.gauss(7.4, 0.3) * SECOND_NS)
            if not calm and rng.random() < 0.012:
                self.disturb()
            holdout = tuple(fp32(self.loss(step) + 0.06) for _ in range(2)) if step % 100 == 0 else ()
            loss, norm = fp64(self.loss(step)), fp64(0.4 + 2 / (1 + step / 30))
            self.say(ev.StepSealed(step, 128, norm, fp32(1.0), loss, 128 * 4 * 128, holdout))
            self.step += 1
        assert self.state is not None
        self.state.next_step = self.step
        return self

    def disturb(self, why: str = "") -> Member:
        """Somebody dies in the middle of its work, and is replaced."""
        member = self.rng.choice(sorted(self.views))
        stage = self.views.pop(member).stage
        self.say(ev.Gone(member, why or self.rng.choice(["lost", "silent", "lost", "left"])))
        self.say(ev.Voided(self.step, stage, member, "gone"))
        self.time_ns += int(self.rng.uniform(2, 9) * SECOND_NS)
        again = Member(member.hotkey, member.term, member.number + 1_000)
        self.say(ev.Joined(again, "cold", stage, "boot", "10.0.0.1", 8091))
        self.views[again] = self._view(again, stage)
        return member

    def move(self, share: float = 0.3) -> None:
        """Some members have done items since."""
        for member, view in list(self.views.items()):
            if self.rng.random() < share:
                done = view.items_done + self.rng.randrange(1, 4)
                self.views[member] = msgspec.structs.replace(view, items_done=done, leases=self.rng.randrange(4))

    # --- RunSight ----------------------------------------------------------------------------------------------

    def summary(self) -> RunSummary:
        loss = self.history.steps[-1].loss if self.history.steps else None
        state = "running" if self.views else "waiting"
        return RunSummary(
            self.name, f"{self.name}-1", state, 0, self.step, self.num_steps, loss, None, self.waiting_for
        )

    def status(self) -> RunStatus:
        found = self.history
        use = StoreUse(puts=self.step * 90, gets=self.step * 200, bytes_up=self.step << 24, bytes_down=self.step << 25)
        return RunStatus(
            summary=self.summary(),
            time_ns=self.time_ns,
            members=tuple(sorted(self.views.values(), key=lambda view: (view.stage, view.hotkey))),
            steps=(),
            tokens_per_s=found.tokens_per_s(),
            num_merges=self.step * self.num_stages,
            num_voids=found.num_voids,
            num_gone=found.num_gone,
            num_joined=found.num_joined + self.num_members,
            events=tuple(found.lines)[-50:],
            journal_length=self.number,
            journal_head="4be1c9d27a3f",
            store_bytes=180 << 30,
            weights="set 41 blocks ago: 500 miners",
            store=StoreCosts(use, StoreUse(), use, 0.0123 * self.step, 2.9),
            audits=AuditCosts(self.step // 3, 2, 0, 30.0 * self.step, 4.0, 910.0 * self.step, self.step << 20, 9 << 20),
        )

    def peak_flops_per_s(self) -> float | None:
        return 2e12 * self.num_members

    def merges(self) -> tuple[MergeLine, ...]:
        return self.lines.lines()

    def journal_span(self) -> tuple[int, int]:
        return self.number - len(self.kept), self.number

    def records(self, first: int, end: int) -> Sequence[bytes]:
        base = self.number - len(self.kept)
        return self.kept[first - base : end - base]


def find_in(runs: dict[str, PlayedRun]):
    from subnet.errors import NotFound

    def find(name: str) -> RunSight:
        if name not in runs:
            raise NotFound(f"no run is called {name!r}", hint=f"known runs: {', '.join(runs) or 'none'}")
        return runs[name]

    return find


@asynccontextmanager
async def served(
    *runs: PlayedRun, max_viewers: int = 64, every_s: float = 1.0, clock: Clock = SYSTEM_CLOCK
) -> AsyncIterator[tuple[Listener, PageFeed]]:
    """The page over real HTTP. Scores are those of the moment when the calm part of the run ended."""
    by_name = {run.name: run for run in runs}
    scores = ScoreDesk(
        runs[0].scores if runs else ScoreBook(), lambda: None, Refusals(), ManualClock(wall_ns=START_NS + 10**9)
    )
    desk = PageDesk(find_in(by_name), lambda: tuple(run.summary() for run in runs), scores, lambda: "", clock)
    page = PageApi(desk, PageFeed(desk, max_viewers=max_viewers, every_s=every_s))
    verifier = RequestVerifier("5C4hrfjw9DjXZTzV3MwzrrAr9P1MJhSrvWGWqi1eSuyUpnhM", is_known=lambda hotkey: False)
    app = create_app(page.routes(), verifier)
    app.on_shutdown.append(page.close)
    listener = await listen(app, "127.0.0.1", 0)
    try:
        yield listener, page.feed
    finally:
        await listener.close()
        await asyncio.sleep(0)
