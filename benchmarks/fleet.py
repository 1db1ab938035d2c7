"""A fleet of simulated miners in one process against a real validator: joins, follows, reports each second, dies and returns.

python -m benchmarks.fleet SETTINGS.json     # prints one JSON line with what was measured
"""

from __future__ import annotations

import asyncio
import heapq
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from blake3 import blake3

from benchmarks.fleet_members import (
    Claimed,
    Compute,
    SimMember,
    Work,
    due_claims,
    name,
    partitions_to_store,
)
from benchmarks.fleet_settings import FleetSettings
from benchmarks.fleet_sight import ViewChecker, percentiles
from benchmarks.fleet_store import FleetStore
from benchmarks.fleet_wire import Poster, Stream, request_bytes
from subnet.protocol import messages as msg
from subnet.protocol import wire
from subnet.protocol.copies import is_copy_part
from subnet.protocol.signing import Signer, sign_statement
from subnet.run import events as ev
from subnet.run import state as st
from subnet.run.apply import apply_record
from subnet.run.events import Batch, Record
from subnet.run.state_codec import state_bytes
from subnet.words import PROTOCOL_VERSION, Cursor

TICK_S = 0.004
REPORT_EVERY_S = 1.0
JOINS_PER_S = 150.0
RETURN_S = 3.0
RECEIPTS = "receipts/1"
_record = msgspec.msgpack.Decoder(Record)
_batch = msgspec.msgpack.Decoder(Batch)


class Fleet:
    def __init__(self, settings: FleetSettings) -> None:
        self.settings = settings
        self.rng = random.Random(1)
        self.signers = [Signer.from_uri(uri) for uri in settings.hotkeys]
        self.sims: dict[str, SimMember] = {signer.hotkey: SimMember(signer) for signer in self.signers}
        self.posters: dict[str, Poster] = {}
        self.streams: dict[str, Stream] = {}
        self.state = st.new_state()
        self.work = Work(settings.item_s)
        self.filler = b""
        self.due: list[tuple[float, int, SimMember]] = []
        self.tasks: set[asyncio.Task[Any]] = set()
        self.measuring = False
        self.answered_s: list[float] = []
        self.seen_s: list[float] = []
        self.slip_s: list[float] = []
        self.counts = dict.fromkeys(
            ("sent", "skipped", "refused", "lost", "receipts", "killed", "events", "event_bytes", "items", "steps"), 0
        )
        self.step_bytes: list[int] = []
        self._bytes_at_step = 0
        self._bytes = 0
        url = f"http://{settings.host}:{settings.port}"
        samples = settings.samples if settings.view else 0
        self.checker = ViewChecker(url, settings.receiver, settings.run, samples, lambda: self.state)
        self.store = FleetStore(url, settings.receiver, settings.run)

    # --- the shared fold -------------------------------------------------------------------------------------------

    def take(self, frame: bytes) -> None:
        if is_copy_part(frame):
            raise RuntimeError("the shared fold was sent a copy")
        batch = _batch.decode(frame)
        for raw in batch.records:
            record = _record.decode(raw)
            apply_record(self.state, record)
            self._bytes += len(memoryview(raw))
            self.on_event(record.event)
        if self.measuring:
            self.counts["events"] += len(batch.records)
            self.counts["event_bytes"] += len(frame)
        self.checker.look()

    def on_event(self, event: ev.AnyEvent) -> None:
        now_s = time.monotonic()
        match event:
            case ev.Leased():
                sim = self.sims.get(event.member.hotkey)
                if sim is not None and sim.member == event.member:
                    self.work.leased(sim, event)
                    self.work.begin(sim, now_s)
            case ev.Backwarded():
                self._seen(event, backward=True, now_s=now_s)
            case ev.Forwarded():
                self._seen(event, backward=False, now_s=now_s)
            case ev.Joined():
                self._joined(event)
            case ev.StepPlanned():
                self.work.new_step(st.num_stages(self.state))
                for sim in self.sims.values():
                    sim.forget_work()
            case ev.StepSealed():
                if self.measuring:
                    self.counts["steps"] += 1
                    self.step_bytes.append(self._bytes - self._bytes_at_step)
                self._bytes_at_step = self._bytes
            case ev.Revoking():
                found = st.item(self.state, event.step, event.microbatch, event.stage)
                sim = self.sims.get(found.member.hotkey) if found is not None and found.member is not None else None
                if sim is not None:
                    key = (event.microbatch, event.generation, True)
                    claim = msg.NotAccumulatedClaim(event.step, event.microbatch, event.stage, event.generation)
                    sim.receipts.setdefault(key, Claimed(claim))
            case _:
                pass

    def _seen(self, event: ev.Backwarded | ev.Forwarded, *, backward: bool, now_s: float) -> None:
        found = st.item(self.state, event.step, event.microbatch, event.stage)
        if found is None or found.member is None:
            return
        sim = self.sims.get(found.member.hotkey)
        claimed = sim.receipts.pop((event.microbatch, event.generation, backward), None) if sim is not None else None
        if claimed is not None and claimed.said_s is not None and self.measuring:
            self.seen_s.append(now_s - claimed.said_s)
            self.counts["items"] += backward

    def _joined(self, event: ev.Joined) -> None:
        sim = self.sims.get(event.member.hotkey)
        if sim is None or sim.boot != event.boot:
            return
        sim.member, sim.stage = event.member, event.stage
        self._spawn(self._stream(sim))
        heapq.heappush(self.due, (time.monotonic() + self.rng.random(), event.member.number, sim))

    # --- connections -----------------------------------------------------------------------------------------------

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            print(f"fleet: {task.exception()!r}", file=sys.stderr, flush=True)

    async def _stream(self, sim: SimMember) -> None:
        s, hotkey = self.settings, sim.signer.hotkey
        target = f"/v1/directives?run={s.run}&term=0&after=0{s.view}"
        data = request_bytes(sim.signer, s.receiver, "GET", target, b"")
        stream = Stream(data, lambda: self._stream_ended(sim), self.checker.taker(sim))
        self.streams[hotkey] = stream
        await asyncio.get_running_loop().create_connection(lambda: stream, s.host, s.port)

    def _stream_ended(self, sim: SimMember) -> None:
        if not sim.dead and self.sims.get(sim.signer.hotkey) is sim:
            self.counts["lost"] += 1
            asyncio.get_running_loop().call_later(0.5, lambda: None if sim.dead else self._spawn(self._stream(sim)))

    async def _poster(self, sim: SimMember) -> Poster:
        poster = self.posters.get(sim.signer.hotkey)
        if poster is None or not poster.is_open:
            poster = Poster()
            self.posters[sim.signer.hotkey] = poster
            await asyncio.get_running_loop().create_connection(lambda: poster, self.settings.host, self.settings.port)
        return poster

    # --- joining and dying -------------------------------------------------------------------------------------------

    async def join(self, sim: SimMember) -> None:
        s = self.settings
        request = msg.JoinRequest(
            PROTOCOL_VERSION, s.run, sim.boot, "127.0.0.1", sim.listen(), s.hardware_class, Cursor(0, 0)
        )
        sim.filler = str(wire.blob_hash(self.filler))
        while not sim.dead and sim.member is None:
            poster = await self._poster(sim)
            answer: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()
            data = request_bytes(sim.signer, s.receiver, "POST", "/v1/join", wire.encode(request))
            poster.send(data, lambda status, body, answer=answer: _set(answer, (status, body)))
            status, body = await answer
            if status == 200:
                said = wire.decode(body, msg.JoinAnswer, limit_bytes=1 << 16, what="join")
                if said.accepted or (said.refusal is not None and said.refusal.code == "boot_seen"):
                    return
            await asyncio.sleep(0.5)

    def kill(self, sim: SimMember) -> None:
        """As kill -9: sockets are reset, the port refuses; its hotkey comes back with a new boot id."""
        sim.dead = True
        sim.forget_work()
        sim.close()
        for known in (self.posters.pop(sim.signer.hotkey, None), self.streams.pop(sim.signer.hotkey, None)):
            if known is not None:
                known.abort()
        self.counts["killed"] += 1
        again = SimMember(sim.signer)
        self.sims[sim.signer.hotkey] = again
        asyncio.get_running_loop().call_later(RETURN_S, lambda: self._spawn(self.join(again)))

    async def churn(self) -> None:
        per_s = self.settings.churn_per_minute * len(self.sims) / 60
        while per_s > 0:
            await asyncio.sleep(self.rng.expovariate(per_s))
            live = [sim for sim in self.sims.values() if sim.member is not None and not self.checker.is_sample(sim)]
            if live:
                self.kill(self.rng.choice(live))

    # --- reporting ---------------------------------------------------------------------------------------------------

    async def tick_forever(self) -> None:
        while True:
            self._computed(time.monotonic())
            while self.due and self.due[0][0] <= time.monotonic():
                due_s, number, sim = heapq.heappop(self.due)
                if sim.dead:
                    continue
                heapq.heappush(self.due, (due_s + REPORT_EVERY_S, number, sim))
                self._report(sim, due_s)
            await asyncio.sleep(TICK_S)

    def _computed(self, now_s: float) -> None:
        work = self.state.work
        if work is None:
            return
        for sim, compute in self.work.finished(now_s):
            found = work.items[sim.stage].get(compute.microbatch)
            mine = found is not None and found.member == sim.member and found.generation == compute.generation
            if mine and found is not None and found.status == st.LIVE:
                self.work.receipt(sim, work.step, compute, len(work.items))
                self._hand_on(sim, compute, len(work.items), now_s)
            self.work.begin(sim, now_s)

    def _hand_on(self, sim: SimMember, compute: Compute, num_stages: int, now_s: float) -> None:
        """What was made goes to whoever has the next lease."""
        m, stage = compute.microbatch, sim.stage
        last = stage == num_stages - 1
        if compute.backward or last:
            if stage > 0:
                self._give(m, stage - 1, now_s, backward=True)
        else:
            self._give(m, stage + 1, now_s, backward=False)
            if m in self.work.backwarded[stage + 1]:
                sim.backwards.append(Compute(m, compute.generation, backward=True))

    def _give(self, m: int, stage: int, now_s: float, *, backward: bool) -> None:
        assert self.state.work is not None
        found = self.state.work.items[stage].get(m)
        if found is None or found.member is None or found.status != st.LIVE:
            return
        sim = self.sims.get(found.member.hotkey)
        if sim is None or sim.member != found.member:
            return
        if not backward:
            sim.forwards.append(Compute(m, found.generation, backward=False))
        elif found.forwarded or (m, found.generation, False) in sim.receipts:
            sim.backwards.append(Compute(m, found.generation, backward=True))
        self.work.begin(sim, now_s)

    def _report(self, sim: SimMember, due_s: float) -> None:
        poster = self.posters.get(sim.signer.hotkey)
        if poster is None or not poster.is_open:
            self._spawn(self._poster(sim))
            return
        if poster.is_busy:
            self.counts["skipped"] += self.measuring
            return
        now_s = time.monotonic()
        for key in partitions_to_store(self.state, sim):
            sim.storing.add(key)
            self._spawn(self._store_partition(sim, key))
        claims = due_claims(self.state, sim, now_s)
        path, body = self._message(sim, claims)
        data = request_bytes(sim.signer, self.settings.receiver, "POST", path, body)
        began_s = time.monotonic()
        measured = self.measuring

        def answered(status: int, _: bytes) -> None:
            if measured:
                self.answered_s.append(time.monotonic() - began_s)
                self.counts["refused"] += status not in (200, 204)

        if measured:
            self.counts["sent"] += 1
            self.counts["receipts"] += len(claims)
            self.slip_s.append(began_s - due_s)
        poster.send(data, answered)

    def _message(self, sim: SimMember, claims: Sequence[msg.AnyClaim]) -> tuple[str, bytes]:
        if not claims or sim.member is None:
            beat = msg.Heartbeat(PROTOCOL_VERSION, sim.boot, time.monotonic_ns() // 10**8)
            return "/v1/heartbeat", wire.encode(beat)
        receipts = [wire.encode(c) for c in claims if isinstance(c, msg.ForwardReceipt | msg.BackwardReceipt)]
        root = wire.merkle_root(receipts) if receipts else b""
        signature = sign_statement(sim.signer, RECEIPTS, root) if receipts else b""
        cursor = Cursor(self.state.term, self.state.number)
        report = msg.Report(PROTOCOL_VERSION, self.settings.run, sim.member, cursor, tuple(claims), root, signature)
        return "/v1/reports", wire.encode(report)

    async def _store_partition(self, sim: SimMember, key: tuple[int, int, int, int]) -> None:
        """A merged partition goes into the store by a grant, as a miner's would; small, since nobody reads it."""
        step, group, version, partition = key
        data = bytes.fromhex(name("partition", *key)) * 4
        blob = await self.store.put(sim.signer, data)
        sim.merged[key] = msg.MergedClaim(step, group, version, partition, blob, blob, len(data), f"{partition + 1:x}")

    # --- the whole of it -----------------------------------------------------------------------------------------------

    async def run(self) -> dict[str, Any]:
        s = self.settings
        loop = asyncio.get_running_loop()
        first = self.signers[0]
        data = request_bytes(first, s.receiver, "GET", f"/v1/directives?run={s.run}&term=0&after=0", b"")
        whole = Stream(data, lambda: None, self.take)
        await loop.create_connection(lambda: whole, s.host, s.port)
        try:
            await self._start()
            await asyncio.sleep(s.warm_s)
            return await self._measure()
        finally:
            for task in list(self.tasks):
                task.cancel()
            whole.abort()
            for known in (*self.posters.values(), *self.streams.values()):
                known.abort()
            for sim in self.sims.values():
                sim.close()
            await self.store.close()

    async def _start(self) -> None:
        s = self.settings
        self._spawn(self.tick_forever())
        self.filler = b"filler" * 8
        begin_s = time.monotonic()
        for number, sim in enumerate(list(self.sims.values())):
            self._spawn(self.join(sim))
            await asyncio.sleep(max(0.0, begin_s + number / JOINS_PER_S - time.monotonic()))
        while sum(sim.member is not None for sim in self.sims.values()) < len(self.sims):
            if time.monotonic() > begin_s + s.start_s:
                raise RuntimeError("not everybody joined in time")
            await asyncio.sleep(0.1)
        await self.store.put(self.signers[0], self.filler)

    async def _measure(self) -> dict[str, Any]:
        churn = asyncio.create_task(self.churn())
        bytes_before = {hotkey: stream.num_bytes for hotkey, stream in self.streams.items()}
        cpu, began_s = time.process_time(), time.monotonic()
        self.measuring = True
        await asyncio.sleep(self.settings.measure_s)
        self.measuring = False
        seconds = time.monotonic() - began_s
        churn.cancel()
        streamed = sum(s.num_bytes - bytes_before.get(hotkey, 0) for hotkey, s in self.streams.items())
        self.checker.look(now=True)
        figures = {
            "members": len(self.sims),
            "seconds": seconds,
            **self.counts,
            **percentiles("answer", self.answered_s),
            **percentiles("seen", self.seen_s),
            **percentiles("slip", self.slip_s),
            "items_per_s": self.counts["items"] / seconds,
            "events_per_s": self.counts["events"] / seconds,
            "stream_bytes_per_member_s": streamed / max(1, len(self.streams)) / seconds,
            "step_bytes": self.step_bytes,
            "views_compared": self.checker.num_compared,
            "views_different": self.checker.different,
            "clients_cpu": (time.process_time() - cpu) / seconds,
        }
        await asyncio.sleep(1.5)  # what was said is journaled and has come back
        return {**figures, "number": self.state.number, "state": blake3(state_bytes(self.state)).hexdigest()}


def _set(future: asyncio.Future[tuple[int, bytes]], value: tuple[int, bytes]) -> None:
    if not future.done():
        future.set_result(value)


def main(arguments: list[str]) -> int:
    settings = msgspec.json.decode(Path(arguments[0]).read_bytes(), type=FleetSettings)
    print(json.dumps(asyncio.run(Fleet(settings).run())), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
