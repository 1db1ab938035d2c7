"""An active run: journal, log publisher, coordinator, and what it tells the rest of the validator (scores, status, export)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec
from loguru import logger

from subnet.chain.base import Metagraph
from subnet.errors import Busy, IotaError
from subnet.policy.policy import SubnetPolicy
from subnet.protocol import wire
from subnet.protocol.api import MemberView, RunStatus, RunSummary, StoreCosts
from subnet.protocol.messages import SIGNED_CLAIMS, Heartbeat, Report
from subnet.run.events import Record, RunControlled, StageSealed, StepSealed, WindowAudited, WindowClosed
from subnet.run.state import RunState, end_step, works
from subnet.words import Member
from validator.audit_cases import CaseShelf
from validator.audit_watch import AuditWatch
from validator.coordinator import Coordinator
from validator.decide import waiting_for
from validator.inbox import Inbox
from validator.intake import back_off_left
from validator.journal_store import JournalStore
from validator.log_publisher import LogPublisher
from validator.merge_lines import MergeLines
from validator.policy import with_rules
from validator.presence import Dumps, LoopWatchdog, PresentClock, collect_forever
from validator.progress import ProgressWatch
from validator.projection import SessionProjection
from validator.retention import AUDIT_WINDOW_STEPS, audit_window, expiries, receipts_from
from validator.run_registry import RunEntry, run_planned
from validator.score_files import recount
from validator.session_audits import SessionAudits
from validator.store_costs import store_costs
from validator.tasks import RunTasks

if TYPE_CHECKING:
    from validator.node import ValidatorNode

TIDY_EVERY_S = 30.0
MOST_WAITING = 20_000
"""Claims that wait while the journal can't be written."""
MAX_PEAK_FLOPS = 1e18
"""More than any device has: who says more is not believed."""


class RunSession:
    def __init__(self, entry: RunEntry, node: ValidatorNode) -> None:
        self.entry, self._node = entry, node
        self.journal = JournalStore(entry.journal_to_lead())
        publisher = LogPublisher(entry.stored.run_id, self.journal, node.store, node.signer, node.clock)
        self.audits = SessionAudits(
            entry.stored.run_id, entry.config, node.store, self.journal, entry.directory / "audits", node.settings
        )
        self.tasks = RunTasks(entry.plan, node.store, self.audits.runner)
        self.book = node.scores.begin(entry.stored.run_id)
        self._projection, self.merges = SessionProjection(self.book), MergeLines()
        self._tidy = asyncio.Event()
        self.clock = PresentClock(node.clock, absent=lambda: bool(self.journal.trouble))
        self._inbox = Inbox()
        self._dumps = Dumps(entry.directory / "stalls")
        self.progress = ProgressWatch(self.clock, self._dumps)
        self.coordinator = Coordinator(
            journal=self.journal,
            publisher=publisher,
            tasks=self.tasks,
            signer=node.signer,
            clock=self.clock,
            on_record=self._on_record,
            projection=self._projection,
            inbox=self._inbox,
        )
        self.over = False
        self._peaks: dict[Member, float] = {}
        self.words = asyncio.Lock()
        """Held while a word of the run's owner is journaled."""
        self._told_policies = set[tuple[str, float]]()
        self.take_policy(node.policies.policy(node.clock.wall_ns() / 1e9))
        self.audits.attach(self.coordinator, self.clock)
        if node.metagraph is not None:
            self.take_metagraph(node.metagraph)

    async def run(self) -> None:
        """Until the run has finished and its last record is in the log store."""
        if self._projection.lost:
            await recount(self.book, self.entry.stored.run_id, self.journal, self._node.store)
        self.coordinator.begin(run_planned(self.entry), self.entry.stored.submission.hardware_class)
        self.tell_policies()
        driver = asyncio.create_task(self.coordinator.run(), name="coordinator")
        finished = asyncio.create_task(self._until_finished(), name="until finished")
        tidier = asyncio.create_task(self._tidy_forever(), name="retention")
        with LoopWatchdog(self._dumps) as watchdog:
            watchers = {
                asyncio.create_task(self.clock.tick_forever(), name="clock"),
                asyncio.create_task(watchdog.turn_forever(), name="loop watchdog"),
                asyncio.create_task(self.progress.look_forever(self.coordinator), name="progress watchdog"),
                asyncio.create_task(collect_forever(), name="garbage"),
            }
            if self.audits.on:
                watchers.add(asyncio.create_task(self.audits.follow_chain(self._node.chain), name="audit blocks"))
            tasks = {driver, finished, tidier, *watchers}
            try:
                ended, _ = await asyncio.wait({driver, finished, *watchers}, return_when=asyncio.FIRST_COMPLETED)
                for task in ended:
                    await task
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)

    async def _until_finished(self) -> None:
        await self.coordinator.finished.wait()
        while self.journal.acknowledged < len(self.journal) and self.coordinator.core.quorum:
            await asyncio.sleep(0.05)
        while self.coordinator.state.members:
            # Members fetch the end from the stream; they leave by themselves, or are gone.
            await asyncio.sleep(0.2)

    async def _tidy_forever(self) -> None:
        """End holds in the store that nothing needs any more, and look how much it holds."""
        done: dict[str, int] = {}
        receipts = 0
        while True:
            if (horizon := receipts_from(self.coordinator.state)) >= receipts + AUDIT_WINDOW_STEPS:
                self.journal.forget_receipts(horizon)
                receipts = horizon
            try:
                window = audit_window(self.tasks.store_bytes, self.tasks.store_budget_bytes)
                for retention, below in expiries(self.coordinator.state, window).items():
                    if below > done.get(retention, 0):
                        await self.tasks.expire(retention, self.entry.stored.run_id, below)
                        done[retention] = below
                await self.tasks.look()
            except IotaError as error:
                logger.warning("retention: {}", error)
            self._tidy.clear()
            try:
                async with asyncio.timeout(TIDY_EVERY_S):
                    await self._tidy.wait()
            except TimeoutError:
                continue

    async def close(self) -> None:
        self.over = True
        await self.coordinator.close()
        await self.audits.close()

    # --- scores ------------------------------------------------------------------------------------------------

    def _on_record(self, record: Record) -> None:
        event = record.event
        self.audits.note(record)
        self.book.note(record)
        self.merges.note(record)
        if isinstance(event, StageSealed | StepSealed | RunControlled):
            self.progress.sealed()
        if isinstance(event, WindowAudited):
            self._tidy.set()
        if isinstance(event, StepSealed):
            horizon = max(0, event.step - AUDIT_WINDOW_STEPS)
            if horizon and horizon % AUDIT_WINDOW_STEPS == 0:
                self._tidy.set()
            if self.entry.config.pipeline.boundaries == "store":
                self._tidy.set()  # each step puts a good deal of evidence there

    # --- policy ------------------------------------------------------------------------------------------------

    def tell_policies(self) -> bool:
        """Have the journal say what the validator counts with; False where the run is over."""
        state = self.coordinator.state
        if state.run is None or state.finished is not None:
            return False
        for event in self._node.policies.untold(self.book.told, self._node.clock.wall_ns() / 1e9):
            if (event.digest, event.effective_s) not in self._told_policies:
                self._told_policies.add((event.digest, event.effective_s))
                self.coordinator.tell(event)
        return True

    def take_policy(self, policy: SubnetPolicy) -> None:
        """What a mismatch costs from now on."""
        coordinator = self.coordinator
        audit = with_rules(coordinator.policy.audit, policy.audit)
        coordinator.policy = msgspec.structs.replace(coordinator.policy, audit=audit)

    # --- receipts ----------------------------------------------------------------------------------------------

    def receipts_root(self, report: Report) -> bytes:
        return wire.merkle_root([wire.encode(c) for c in report.claims if isinstance(c, SIGNED_CLAIMS)])

    def require_room(self) -> None:
        """:class:`Busy` while the journal's database is away and enough claims wait for it: members say them again."""
        if self.journal.trouble and len(self._inbox.claims) >= MOST_WAITING:
            raise Busy("the validator's journal can't be written now", retry_after_s=2.0)

    def keep_receipts(self, hotkey: str, report: Report) -> None:
        self.journal.stage_receipts(self.coordinator.state.next_step, hotkey, wire.encode(report))

    # --- audits, as the desk sees them -------------------------------------------------------------------------

    @property
    def audit_state(self) -> RunState:
        return self.coordinator.state

    @property
    def audit_watch(self) -> AuditWatch:
        return self.coordinator.watch.audits

    @property
    def shelf(self) -> CaseShelf:
        return self.audits.shelf

    @property
    def closed_windows(self) -> dict[int, WindowClosed]:
        return self.audits.windows

    def wake(self) -> None:
        self.coordinator.wake()

    def take_metagraph(self, metagraph: Metagraph) -> None:
        """Which registration each hotkey has now: a new one begins its probation anew."""
        self.audit_watch.registered = {neuron.hotkey: neuron.registered_at_block for neuron in metagraph.neurons}

    # --- membership --------------------------------------------------------------------------------------------

    def has_member(self, hotkey: str) -> bool:
        return any(member.hotkey == hotkey for member in self.coordinator.state.members)

    def suspect_hotkey(self, hotkey: str) -> None:
        for member in list(self.coordinator.state.members):
            if member.hotkey == hotkey:
                self.coordinator.suspect(member)

    # --- what people see ---------------------------------------------------------------------------------------

    @property
    def run_name(self) -> str:
        return self.entry.name

    def back_off_left(self, hotkey: str) -> float:
        """Seconds until a hotkey that was gone silently may join again; 0 or less: it may."""
        coordinator = self.coordinator
        return back_off_left(coordinator.state, hotkey, self.clock.now_s(), coordinator.watch, coordinator.policy)

    def waiting_for(self) -> str:
        coordinator = self.coordinator
        if self.journal.trouble:
            return f"the journal's database: {self.journal.trouble}"
        said = waiting_for(coordinator.state, coordinator.watch, self.clock.now_s())
        more = self.audits.waiting_for(coordinator.state)
        return f"{said}; {more}" if said and more else said

    def summary(self, place: int = 0) -> RunSummary:
        state, history = self.coordinator.state, self.coordinator.history
        last = history.steps[-1].loss if history.steps else None
        stall = None if state.finished else self.progress.view()
        status = "finished" if state.finished else "waiting" if not state.members else "running"
        status = "paused" if state.paused and not state.finished else status
        status = "stalled" if stall is not None and status == "running" else status
        return RunSummary(
            self.entry.name,
            self.entry.stored.run_id,
            status,
            place,
            max(0, state.next_step),
            self.entry.config.run.steps if state.run is None else end_step(state),
            last,
            history.root,
            "" if state.finished else self.waiting_for(),
            stall if status == "stalled" else None,
        )

    def status(self, num_steps: int, *, weights: str, place: int) -> RunStatus:
        history = self.coordinator.history
        steps = tuple(history.steps)[-num_steps:] if num_steps else ()
        return RunStatus(
            summary=self.summary(place),
            time_ns=self._node.clock.wall_ns(),
            members=tuple(self._member_views()),
            steps=steps,
            tokens_per_s=history.tokens_per_s(),
            num_merges=history.num_merges,
            num_voids=history.num_voids,
            num_gone=history.num_gone,
            num_joined=history.num_joined,
            events=tuple(history.lines)[-50:],
            journal_length=len(self.journal),
            journal_head=self.journal.head,
            store_bytes=self.tasks.store_bytes,
            weights=weights,
            final_holdout_loss=history.final_holdout,
            final_holdout_items=history.final_items,
            store=self._store_costs(),
            audits=self.audits.costs(self.coordinator.state, self.coordinator.receipted_s),
        )

    def _store_costs(self) -> StoreCosts:
        """The submission came under the run's name, everything since under its id."""
        uses = [self._node.store.meter.use(label) for label in (self.entry.stored.run_id, self.entry.name)]
        return store_costs(uses, self.tasks.store_bytes, self.entry.config.prices)

    def heard(self, hotkey: str, beat: Heartbeat) -> Member | None:
        """A heartbeat; the live member that it is of. What it says of its device is kept to be shown."""
        member = self.coordinator.heard(hotkey, beat.boot, beat.ticks)
        if member is not None and 0.0 < beat.peak_flops_per_s < MAX_PEAK_FLOPS:
            self._peaks[member] = beat.peak_flops_per_s
        return member

    def peak_flops_per_s(self) -> float | None:
        """Of all members together, as each says; None while one of them hasn't said."""
        members = self.coordinator.state.members
        self._peaks = {member: peak for member, peak in self._peaks.items() if member in members}
        return sum(self._peaks.values()) if members and len(self._peaks) == len(members) else None

    def _member_views(self) -> list[MemberView]:
        state, watch, now = self.coordinator.state, self.coordinator.watch, self.clock.now_s()
        views: list[MemberView] = []
        for member, info in sorted(state.members.items(), key=lambda pair: (pair[1].stage, pair[0])):
            leases = sum(len(work.held.get(member, ())) for work in works(state))
            ready = info.version if info.version is not None else -2
            speed = watch.speed(member)
            known = [s for s in (speed.forward_s, speed.backward_s) if s is not None]
            heard = watch.silent_for(member, now)
            views.append(
                MemberView(
                    hotkey=member.hotkey,
                    incarnation=f"{member.term}.{member.number}",
                    stage=info.stage,
                    ready_for_step=ready,
                    leases=leases,
                    items_done=self.book.items_done(member.hotkey),
                    seconds_per_item=sum(known) if known else None,
                    heard_s_ago=heard,
                )
            )
        return views
