"""Work items on the compute thread: forward, backward, evaluation and replay; each output is hashed where it was made.

A gradient is added in the very job that computed it, under the partial of the incarnation and epoch the job was started
for; a void in the meantime changes the epoch, so what was added late counts for nothing.
"""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass

from blake3 import blake3
from loguru import logger

from miner.compute import BACKWARD, FORWARD, REPLAY, Priority
from miner.context import RunContext
from miner.flight import FlightWindow
from miner.lane_parts import add_seconds, finish_lane, is_next, note_part
from miner.local_view import BoundaryKey, MadeFrom
from miner.owed import may_add
from miner.owes import Compute, Drop, DropLane
from subnet.engine.stage_executor import ItemFailed, PartialBroken
from subnet.errors import InputError, NotFound
from subnet.model.boundary_check import is_unusable
from subnet.run.schedule import terms_of
from subnet.run.state import num_parts as num_parts_of
from subnet.timing import TIMEOUTS, Deadline
from subnet.words import ItemKey


@dataclass(frozen=True)
class _Done:
    output: memoryview | None
    hash: str
    loss_bits: int | None
    compute_s: float
    added: bool


class _Addition:
    """One gradient's way into the sum: it is added or refused, whichever is first; both sides ask under one lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._state = "computing"

    def begin(self) -> bool:
        """Compute thread: the gradient is there; may it be added?"""
        with self._lock:
            if self._state == "computing":
                self._state = "adding"
            return self._state == "adding"

    def refuse(self) -> bool:
        """Event loop: whether it will not be added any more."""
        with self._lock:
            if self._state == "computing":
                self._state = "refused"
            return self._state == "refused"


class ItemWork:
    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._additions: dict[Compute, _Addition] = {}
        self._flight: tuple[object, FlightWindow] | None = None

    def refuse(self, owe: Compute) -> bool:
        """Keep a queued or running gradient out of the sum; False if it is being added or was."""
        addition = self._additions.get(owe)
        return addition is None or addition.refuse()

    @property
    def flight(self) -> FlightWindow:
        """Of the stage that is held; measured anew for another one."""
        stage = self._context.held_stage()
        if self._flight is None or self._flight[0] is not stage:
            self._context.local.lane_flight = 0
            microbatches = stage.plan.config.pipeline.microbatches
            self._flight = (stage, FlightWindow(stage.plan.num_stages - stage.stage + 1, microbatches))
        return self._flight[1]

    def held_back(self, owe: Compute) -> bool:
        """Whether a forward waits until an earlier one has its backward (one forward, one backward); parts of lanes are
        owed by that rule."""
        if owe.backward or owe.evaluation or owe.generation is None or owe.part:
            return False
        retained = {(item.step, item.microbatch) for item in self._context.held_stage().executor.retained}
        queued = {
            (job.step, job.microbatch)
            for job in self._context.local.jobs
            if isinstance(job, Compute) and not job.backward and not job.evaluation and job.generation is not None
        }
        return (owe.step, owe.microbatch) not in retained and len(retained | queued) >= self.flight.limit

    async def run(self, owe: Compute) -> None:
        """Compute the item and note what came of it; raises only what a later try may cure."""
        context, local = self._context, self._context.local
        item = ItemKey(owe.step, owe.microbatch, owe.stage)
        num_parts = num_parts_of(context.run_state, owe.microbatch)
        made = BoundaryKey(owe.step, owe.microbatch, owe.stage, False, owe.part)
        stage, last = context.held_stage(), context.plan.is_last(owe.stage)
        deadline = Deadline.after(TIMEOUTS.store_request_s)
        needs_tokens = context.plan.needs_tokens(owe.stage)
        tokens = await context.tokens.rows(item, deadline, owe.part) if needs_tokens else None
        entry = BoundaryKey(owe.step, owe.microbatch, owe.stage - 1, False, owe.part)
        gradient = BoundaryKey(owe.step, owe.microbatch, owe.stage + 1, True, owe.part)
        x = await self._boundary(entry) if owe.stage else None
        grad = None
        loop = asyncio.get_running_loop()
        if owe.backward and not last:
            self.flight.returned(made, loop.time())
            grad = await self._boundary(gradient)
        used = MadeFrom(
            x=local.boundaries.get(entry, "") if x is not None else "",
            gradient=local.boundaries.get(gradient, "") if grad is not None else "",
            generation=owe.generation or 0,
        )
        member = context.member
        mine = owe.backward and owe.generation is not None
        if member is None or (mine and not may_add(context.run_state, member, local, owe)):
            return
        if owe.part and not is_next(local, owe):
            return
        adds = mine and owe.part == num_parts
        key = context.partial_key(owe.step, owe.epoch) if adds else None
        addition = self._additions.setdefault(owe, _Addition())

        terms = terms_of(context.run_state.terms, owe.step)

        def work() -> _Done:
            stage.executor.terms = terms
            if not owe.backward:
                keeps = owe.part > 0 or (not owe.evaluation and owe.generation is not None)
                forward = stage.executor.forward(item, x, tokens, keep_graph=keeps and not last, part=owe.part)
                return _Done(forward.output, _hash(forward.output), forward.loss_bits, forward.compute_s, False)
            result = stage.executor.backward(item, grad, x, tokens, partial=key, admit=addition.begin, part=owe.part)
            added = key is not None and result.stats is not None
            return _Done(result.output, _hash(result.output), result.loss_bits, result.compute_s, added)

        try:
            done = await context.compute.submit(owe, _priority(owe), work)
        except ItemFailed as failed:
            logger.warning("{} failed: {}", item, failed)
            local.lanes.pop((owe.step, owe.microbatch), None)
            if owe.generation is not None:
                local.failures[owe.step, owe.microbatch, owe.generation] = (failed.hash, failed.reason)
            return
        except PartialBroken:
            # The sum can't be trusted; a new incarnation starts without it, and what was added is dealt again.
            logger.exception("an addition was interrupted: taking a new incarnation")
            context.new_incarnation()
            return
        except InputError:
            if owe.part:
                await self.drop_lane(DropLane(owe.step, owe.microbatch, owe.stage))
            if not await self._denounce({entry: x, gradient: grad}):
                raise
            return
        finally:
            self._additions.pop(owe, None)
        if owe.backward:
            self.flight.finished(done.compute_s)
        elif owe.generation is not None and not owe.evaluation and not last:
            self.flight.forwarded(made, loop.time(), done.compute_s)
        if not owe.part:
            self._note(owe, done, used, member == context.member)
        elif member == context.member:
            local.lane_flight = self.flight.limit
            local.lane_slots = context.settings.lane_memory_bytes // max(1, stage.executor.lane_bytes)
            self._note_part(owe, done, used, num_parts)

    async def _denounce(self, inputs: dict[BoundaryKey, memoryview | None]) -> bool:
        """Whether one of them is no numbers; then it goes, and is shown if it is what its maker has receipted."""
        context, found = self._context, False
        for key, data in inputs.items():
            hash_ = context.local.boundaries.get(key)
            if data is None or hash_ is None or not context.plan.config.audit.on:
                continue
            if await asyncio.to_thread(is_unusable, context.plan, hash_, data):
                context.keep_unusable(key, hash_, data)
                context.local.boundaries.pop(key, None)
                context.cache.drop(key)
                found = True
        if found:
            context.wake()
        return found

    def _note(self, owe: Compute, done: _Done, used: MadeFrom, same_member: bool) -> None:
        local = self._context.local
        key = BoundaryKey(owe.step, owe.microbatch, owe.stage, owe.backward)
        local.made_from[key] = used
        if done.output is not None:
            self._context.cache.put(key, done.output, done.hash, own=True)
            local.boundaries[key] = done.hash
        local.compute_s[key] = done.compute_s
        if done.loss_bits is not None:
            local.losses[owe.step, owe.microbatch] = done.loss_bits
        if owe.evaluation and done.output is None:
            local.evaluated.add((owe.step, owe.microbatch))
        if done.added and same_member and owe.generation is not None:
            local.added[owe.step, owe.microbatch, owe.epoch] = owe.generation

    def _note_part(self, owe: Compute, done: _Done, used: MadeFrom, num_parts: int) -> None:
        """With the last part of a lane what its receipt names; a lane of an earlier incarnation is gone."""
        context, local = self._context, self._context.local
        key = BoundaryKey(owe.step, owe.microbatch, owe.stage, owe.backward, owe.part)
        local.made_from[key] = used
        if done.output is not None:
            context.cache.put(key, done.output, done.hash, own=True)
            local.boundaries[key] = done.hash
        add_seconds(local, owe, done.compute_s)
        note_part(local, owe)
        if not owe.backward or owe.part < num_parts:
            return
        if done.loss_bits is not None:
            local.losses[owe.step, owe.microbatch] = done.loss_bits
        for whole, data, own in finish_lane(local, owe, num_parts, context.plan.num_stages):
            context.cache.put(whole, data, local.boundaries[whole], own=own)
        if done.added and owe.generation is not None:
            local.added[owe.step, owe.microbatch, owe.epoch] = owe.generation

    async def drop_lane(self, owe: DropLane) -> None:
        """Its weights and moments go; it may begin anew, from its recorded boundaries."""
        stage, item = self._context.held_stage(), ItemKey(owe.step, owe.microbatch, owe.stage)
        await self._context.compute.submit(owe, (0,), lambda: stage.executor.drop_lane(item))
        self._context.local.lanes.pop((owe.step, owe.microbatch), None)

    def drop(self, owe: Drop) -> None:
        """A boundary that its maker has receipted otherwise goes, with what was made of it; nothing of it is under way."""
        context = self._context
        for key in context.local.drop_item(owe.key, owe.stage):
            context.cache.drop(key)
        stage, item = context.stage, ItemKey(owe.key.step, owe.key.microbatch, owe.stage)
        if stage is not None:
            executor = stage.executor
            context.compute.submit("drop", (0,), lambda: (executor.drop_graph(item), executor.drop_lane(item)))
        logger.warning("{}: its input {} isn't what was receipted; it is had again", item, owe.key)
        context.wake()

    async def _boundary(self, key: BoundaryKey) -> memoryview:
        data = await self._context.cache.get(key)
        if data is None:
            self._context.local.lose(key)
            raise NotFound(f"boundary {key} is no longer held")
        return data


def _hash(data: memoryview | None) -> str:
    return blake3(data).hexdigest() if data is not None else ""


def _priority(owe: Compute) -> Priority:
    """Lanes come on abreast, so that one fills the other's bubbles."""
    if owe.generation is None:
        return (REPLAY, owe.step, owe.part, owe.microbatch)
    if owe.evaluation:
        return (FORWARD, 1 << 62, owe.microbatch)
    return (BACKWARD if owe.backward else FORWARD, owe.step, owe.part, owe.microbatch)


def kind_of(key: object) -> str:
    """What a job is called where time is counted."""
    if not isinstance(key, Compute):
        return type(key).__name__ if not isinstance(key, str) else key
    if key.generation is None:
        return "replay"
    if key.evaluation:
        return "evaluation"
    return "backward" if key.backward else "forward"
