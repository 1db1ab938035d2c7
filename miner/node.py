"""The miner process: finds a validator, takes part in its active run, leaves when told, and looks for the next run.

When the validator is gone and another leads the run in a later term, it takes part anew there: state comes back from snapshot
and log, so nothing that the old one said needs to be trusted.

Order of a shutdown: say good-bye (leases go back), stop the pump, close peers, the compute thread, the clients.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

from loguru import logger

from miner.blobs import Blobs
from miner.boundaries import boundaries_of_run
from miner.caps import Caps, line
from miner.compute import ComputeThread
from miner.context import RunContext
from miner.directives import Directives
from miner.find_validator import Answered, LossWatch, ValidatorFinder, still_leads
from miner.hardware import (
    choose_device,
    give_memory_back,
    gpu_number,
    limit_memory,
    matmul_flops,
    memory_taken,
    prepare_torch,
)
from miner.heartbeat import HeartbeatHandle
from miner.idle import Looker, watch_idle
from miner.joining import Convicted
from miner.log_tail import LogLine, LogTail
from miner.member_items import kind_of
from miner.member_links import Links
from miner.page_http import TOKEN_FILE, MinerPage, page_token
from miner.page_view import CapsChange, MinerView, view_of
from miner.page_watch import PageWatch
from miner.reach import find_reach
from miner.run_member import RunMember
from miner.settings import MinerSettings
from miner.tokens import TokenSource
from miner.told import ToldKeeper
from miner.turns import first_of, first_record, plan_of
from subnet.chain.connect import connect_chain
from subnet.errors import NotFound
from subnet.model.data import SampleOrder, decode_manifest
from subnet.model.hardware_class import hardware_class
from subnet.model.memory import boundary_bytes
from subnet.model.own_code import CodeNotAllowed, check_code
from subnet.model.plan import ModelPlan
from subnet.net.base import TransportLimits
from subnet.net.border import listen
from subnet.net.client import SignedClient
from subnet.net.streams import StreamTransport
from subnet.net.tls import Security
from subnet.protocol.messages import AnyPeerFrame
from subnet.protocol.signing import Signer
from subnet.run.events import RunPlanned
from subnet.score.api import ScoreDetail
from subnet.service import Service
from subnet.store.disk import BlobCache
from subnet.store.presigned import BlobClient
from subnet.timing import TIMEOUTS, Deadline

SCORE_FRESH_S = 10.0
CONVICTED_STATUS = 4
"""Exit status of a miner whose hotkey is convicted: to start it again is of no use before an appeal."""


class MinerNode:
    def __init__(self, settings: MinerSettings, signer: Signer, heartbeat: HeartbeatHandle) -> None:
        self._settings, self._signer, self._heartbeat = settings, signer, heartbeat
        self._directory = settings.directory.expanduser()
        self._chain = connect_chain(settings.chain, settings.chain_endpoint, hotkey=signer)
        self._caps = Caps(settings)
        self._security = Security(settings.tls, settings.trusted)
        self._store = BlobClient(upload=self._caps.upload, download=self._caps.download)
        self._told = ToldKeeper(self._directory)
        self._finder = ValidatorFinder(settings, signer, self._chain, on_wait=self._told.waits_for_run)
        self._client: SignedClient | None = None
        self._member: RunMember | None = None
        self._done: set[str] = set()
        self._working = asyncio.Event()
        self._wanted, self._rests = True, "the machine to have been idle for a while" if settings.idle.only else ""
        self._log = LogTail()
        self._watch = PageWatch(settings.device)
        self._turn: asyncio.Task[None] | None = None
        self._score: tuple[float, ScoreDetail] | None = None
        self.finished = asyncio.Event()

    async def run(self) -> None:
        """Run after run, forever, with pauses where the operator wants them or the machine is in use."""
        self._told.say()
        if not self._rests:
            self._working.set()
        while True:
            await self._working.wait()
            self._turn = asyncio.create_task(self._run_after_run(), name="runs")
            try:
                await asyncio.wait({self._turn})
            finally:
                await self._end_turn()
            if not self._turn.cancelled():
                self._turn.result()

    async def _end_turn(self) -> None:
        if self._turn is not None:
            self._turn.cancel()
            await asyncio.wait({self._turn})

    async def _run_after_run(self) -> None:
        """Forever (or until the first has finished, where so set)."""
        successor: Answered | None = None
        while True:
            found = successor or await self._finder.find(self._done)
            self._client, run = found.client, found.hello.run or ""
            logger.info("validator {} at {} leads run {}", found.hello.hotkey, found.client.base_url, run)
            try:
                successor = await self._take_part_unless_lost(found.client, run)
            except CodeNotAllowed as refused:
                logger.error("takes no part in run {}: {}", run, refused)
                successor = None
            finally:
                self._client = None
                await found.client.close()
            if successor is not None:
                logger.warning("the validator is lost; {} leads now", successor.hello.hotkey)
                continue
            self._done.add(run)
            if self._settings.exit_when_finished:
                self.finished.set()
                await asyncio.Event().wait()

    async def _take_part_unless_lost(self, client: SignedClient, run: str) -> Answered | None:
        """Until the run has finished (None), or another validator is to be followed: the answer of that one."""
        directives = Directives(client, run)

        async def find(any_run: bool) -> Answered | None:
            return await self._finder.find_successor(run, directives.cursor.term, done=self._done, any_run=any_run)

        watch = LossWatch(
            streaming=lambda: directives.connected,
            answers=lambda: still_leads(client, self._signer, run, directives.cursor.term),
            successor=find,
        )
        return await first_of(self._take_part(client, run, directives), watch.run())

    async def _take_part(self, client: SignedClient, run: str, directives: Directives) -> None:
        planned = await first_record(directives)
        compute: ComputeThread | None = None
        transport: StreamTransport[AnyPeerFrame] | None = None
        member: RunMember | None = None
        try:
            check_code(planned.model_config)
            plan = plan_of(planned)
            threads = plan.config.precision.num_threads
            compute = ComputeThread(on_start=lambda: prepare_torch(threads), kind_of=kind_of)
            device = choose_device(self._settings.device)
            limit_memory(device, self._caps.vram_bytes)
            golden = await compute.submit("golden", (0,), lambda: hardware_class(plan, device))
            kind = plan.config.precision.compute
            peak = await compute.submit("golden", (0,), lambda: matmul_flops(device, kind, seconds=0.05))
            context = await self._context(client, planned, plan, directives, compute, device)
            context.peak_flops_per_s = self._watch.flops.peak_flops_per_s = peak
            context.on_refused = lambda refusal: self._told.note(client.base_url, run, refusal)
            context.on_let_in = self._told.forget
            links = Links(context)
            transport = self._transport(plan, links, client.receiver)
            await transport.start()
            links.use(transport)
            await self._find_reach(client, transport.port, context)
            member = RunMember(context, client, self._heartbeat, golden, links)
            directives.on_took = member.on_took
            self._member = member
            async with asyncio.TaskGroup() as group:
                watcher = group.create_task(transport.watch(), name="transport")
                status = group.create_task(self._caps.keep_status(lambda: memory_taken(device)), name="status")
                await member.run(transport.port)
                watcher.cancel()
                status.cancel()
            await member.leave()
            context.cache.clear()  # nobody audits a run that has finished
            logger.info("used {}", line(self._caps.report(memory_taken(device))))
            logger.info("run {} has finished; time by kind: {}", run, json.dumps(compute.time_by_kind()))
        finally:
            self._member = None
            if member is not None:
                await member.close()
            if transport is not None:
                await transport.close()
            if compute is not None:
                await asyncio.to_thread(compute.stop, TIMEOUTS.shutdown_grace_s)

    def _transport(self, plan: ModelPlan, links: Links, validator: str) -> StreamTransport[AnyPeerFrame]:
        """The validator may connect as well: that is how it finds out whether others can."""
        settings = self._settings
        return StreamTransport[AnyPeerFrame](
            self._signer,
            AnyPeerFrame,
            links.on_frame,
            host=settings.listen_host or settings.host,
            port=settings.port,
            is_known=lambda hotkey: hotkey == validator or links.is_known(hotkey),
            limits=TransportLimits(boundary_bytes=boundary_bytes(plan)),
            security=self._security,
            upload=self._caps.upload,
            download=self._caps.download,
        )

    async def _find_reach(self, client: SignedClient, port: int, context: RunContext) -> None:
        settings = self._settings
        finding = await find_reach(client, settings.host, settings.announce_port or port)
        context.reachable = self._caps.reachable = finding.reachable
        self._caps.reach = finding.text

    async def _context(
        self,
        client: SignedClient,
        planned: RunPlanned,
        plan: ModelPlan,
        directives: Directives,
        compute: ComputeThread,
        device: str,
    ) -> RunContext:
        settings, directory = self._settings, self._directory
        blobs = Blobs(client, self._store, planned.run_id)
        cache = await asyncio.to_thread(
            BlobCache, directory / "cache", settings.cache_disk_bytes, reserve_bytes=settings.disk_reserve_bytes
        )
        manifest = decode_manifest(bytes(await blobs.get_patiently((planned.data, 0))))
        boundaries = await asyncio.to_thread(
            boundaries_of_run,
            directory / "boundaries",
            planned.run_id,
            memory_bytes=settings.boundary_memory_bytes,
            disk_bytes=settings.boundary_disk_bytes,
            durable=plan.config.audit.on,
            reserve_bytes=settings.disk_reserve_bytes,
        )
        return RunContext(
            settings=settings,
            signer=self._signer,
            planned=planned,
            plan=plan,
            directives=directives,
            blobs=blobs,
            tokens=TokenSource(SampleOrder(plan.config, manifest), blobs, cache),
            cache=boundaries,
            compute=compute,
            device=device,
            chunk_cache=cache,
        )

    # --- the page: implements miner.page_http.MinerDesk ----------------------------------------------------------

    def look(self) -> MinerView:
        context = self._member.context if self._member is not None else None
        return view_of(
            self._signer.hotkey,
            self._settings,
            self._caps.report(0 if context is None else memory_taken(context.device)),
            context,
            validator=self._client.base_url if self._client is not None else "",
            wanted=self._wanted,
            rests=self._rests,
            told=self._told.now,
            machine=self._watch.machine,
            speed=self._watch.flops.speed(),
        )

    def start_log(self) -> Callable[[], None]:
        """Keep the log's last lines for the page; the answer ends it."""
        return self._log.start()

    def logs(self, after: int) -> tuple[LogLine, ...]:
        return self._log.after(after)

    async def watch_machine(self) -> None:
        """For ever, for the page."""
        await self._watch.keep(lambda: self._member.context if self._member is not None else None)

    async def own_score(self) -> ScoreDetail:
        if self._client is None:
            raise NotFound("no validator is followed at the moment", hint="its score is known once it has found one")
        now_s = asyncio.get_running_loop().time()
        if self._score is None or now_s - self._score[0] > SCORE_FRESH_S:
            path, deadline = f"/v1/scores/{self._signer.hotkey}", Deadline.after(TIMEOUTS.http_request_s)
            self._score = now_s, await self._client.request("GET", path, None, ScoreDetail, deadline=deadline)
        return self._score[1]

    def change_caps(self, change: CapsChange) -> None:
        self._caps.upload.change(change.upload_bytes_per_s)
        self._caps.download.change(change.download_bytes_per_s)
        logger.info("limits changed on the page: {}", line(self._caps.report(0)))

    async def set_working(self, working: bool) -> None:
        """What the operator wants. Without work its leases go back, then nothing is done."""
        if working != self._wanted:
            logger.info("{} on the page", "started" if working else "stopped")
            self._wanted = working
            await self._work_or_rest()

    async def set_resting(self, why: str) -> None:
        """``why``: the machine is in use; empty: it is idle."""
        before, self._rests = self._rests, why
        if bool(before) == bool(why):
            return
        logger.info("rests and waits for {}" if why else "works: the machine is idle", why)
        await self._work_or_rest()

    async def _work_or_rest(self) -> None:
        if self._wanted and not self._rests:
            self._working.set()
            return
        self._working.clear()
        await self.leave()
        await self._end_turn()
        await asyncio.to_thread(give_memory_back)

    async def leave(self) -> None:
        """Hand leases back (SIGTERM)."""
        if self._member is not None:
            await self._member.leave()

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
        await self._store.close()
        await self._chain.close()


async def _serve(settings: MinerSettings, signer: Signer, heartbeat: HeartbeatHandle) -> None:
    node = MinerNode(settings, signer, heartbeat)
    service = Service("miner")
    service.on_stop("leave", node.leave)
    service.on_close("node", node.close)
    service.forever("node", node.run)
    if settings.page_port:
        service.forever("page", lambda: _serve_page(node, settings, signer))
        service.forever("machine", node.watch_machine)
    if settings.idle.only:
        number = gpu_number(settings.device)
        service.forever("idle", lambda: watch_idle(settings.idle, Looker(number).look, node.set_resting))

    async def stop_when_finished() -> None:
        await node.finished.wait()
        service.stop("the run has finished")
        await asyncio.Event().wait()

    service.forever("finish", stop_when_finished)
    await service.run()


async def _serve_page(node: MinerNode, settings: MinerSettings, signer: Signer) -> None:
    directory = settings.directory.expanduser()
    token = await asyncio.to_thread(page_token, directory)
    app = MinerPage(node, token, directory / TOKEN_FILE).app(signer.hotkey)
    end_log = node.start_log()
    listener = await listen(app, "127.0.0.1", settings.page_port)
    try:
        logger.info("this miner's page: {}/ (changes take the token in {})", listener.url, directory / TOKEN_FILE)
        await asyncio.Event().wait()
    finally:
        end_log()
        await listener.close()


def run_miner(settings: MinerSettings, signer: Signer, heartbeat: HeartbeatHandle) -> int:
    """The whole process after start-up; returns its exit status."""
    try:
        asyncio.run(_serve(settings, signer, heartbeat))
    except (Convicted, ExceptionGroup) as error:
        convicted = conviction_in(error)
        if convicted is None:
            raise
        logger.error("this hotkey is convicted: {}", convicted)
        return CONVICTED_STATUS
    return 0


def conviction_in(error: BaseException) -> Convicted | None:
    """Why the process ended, if it was that and nothing else."""
    if isinstance(error, Convicted):
        return error
    if isinstance(error, ExceptionGroup) and error.split(Convicted)[1] is None:
        return conviction_in(error.exceptions[0])
    return None
