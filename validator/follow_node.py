"""The process of a validator that follows: reads journals, checks, audits, scores and sets weights; leads nothing, stores nothing
but its own findings.

Started and stopped like one that leads, with the same chain, scores and weights. The store going away delays it; a leader that
says two things stops being followed; nothing that a leader or a miner sends makes it believe more than it has checked.
"""

from __future__ import annotations

import asyncio
from typing import NoReturn

from loguru import logger

from subnet.audit.process import AuditProcess
from subnet.chain.base import Chain
from subnet.chain.connect import connect_chain
from subnet.net.border import Listener, listen
from subnet.protocol.signing import RequestVerifier, Signer
from subnet.run.state import config
from subnet.service import Service
from subnet.store.base import OwnerStore
from subnet.timing import SYSTEM_CLOCK, Clock
from validator.audit_blocks import follow_blocks
from validator.audit_runner import AuditRunner
from validator.chain_side import ChainSide
from validator.follow_api import follower_app
from validator.follow_audits import FollowAudits
from validator.follow_findings import FindingsShelf
from validator.follow_leader import LeaderLine
from validator.follow_policy import PolicyDoubts
from validator.follow_reader import FollowReader
from validator.follow_run import FollowedRun
from validator.follow_withheld import WithheldWatch
from validator.ops.look import FollowerView, LoopLag
from validator.ops.serve import attach
from validator.policy_desk import PolicyDesk
from validator.policy_keeper import PolicyKeeper, counting_of
from validator.scoring import ScoreBook
from validator.settings import ValidatorSettings
from validator.store_choice import make_store

LOOK_S = 0.5


class BlockNotes:
    """Where :func:`validator.audit_blocks.follow_blocks` writes."""

    def __init__(self) -> None:
        self.block: int | None = None
        self.block_hashes: dict[int, str] = {}


class FollowerNode:
    def __init__(
        self,
        settings: ValidatorSettings,
        signer: Signer,
        chain: Chain,
        store: OwnerStore,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.settings, self.signer, self.clock = settings, signer, clock
        self._store, self._chain = store, chain
        self.directory = settings.directory.expanduser() / "follow"
        self.policies = PolicyKeeper(
            settings.directory.expanduser(), settings.policy, signer.hotkey, clock.wall_ns() / 1e9
        )
        self.scores = ScoreBook(self.policies.timeline(), leader_audits=False)
        self.side = ChainSide(
            settings,
            signer,
            chain,
            lambda: self.scores.scores(clock.wall_ns() / 1e9),
            policy=lambda: self.policies.policy(clock.wall_ns() / 1e9),
        )
        self.policy_desk = PolicyDesk(
            self.policies,
            signer.hotkey,
            chain,
            lambda: self.side.metagraph,
            clock,
            tell=lambda line: self.scores.change(counting_of(line)),
            effect=lambda line: None,
        )
        self.line = LeaderLine(signer, lambda: self.side.metagraph)
        self.blocks = BlockNotes()
        self.reader = FollowReader(
            store,
            self.directory,
            self.scores,
            only=settings.follow_runs,
            clock=clock,
            permits=lambda: self.side.permits,
        )
        self.withheld = WithheldWatch(self.line, self.reader.runs.values, lambda: self.reader.away, clock)
        self.policy_doubts = PolicyDoubts(
            self.reader.runs.values, lambda: self.policies.policy(clock.wall_ns() / 1e9).digest
        )
        self.audits: dict[str, FollowAudits] = {}
        """By run id: of those that have audits, and something to redo."""

    def is_known(self, hotkey: str) -> bool:
        return self.side.is_known(hotkey) or self.policy_desk.may_change(hotkey)

    # --- audits --------------------------------------------------------------------------------------------------

    async def audit_runs(self) -> NoReturn:
        """Forever: own audits of every run that has any."""
        try:
            while True:
                for run in list(self.reader.runs.values()):
                    await self._audit(run)
                await asyncio.sleep(LOOK_S)
        finally:
            for audits in self.audits.values():
                await audits.close()

    async def _audit(self, run: FollowedRun) -> None:
        audits = self.audits.get(run.run_id)
        if audits is None:
            if run.state.run is None or not config(run.state).audit.on or (run.finished and not has_work(run)):
                return
            audits = self.audits[run.run_id] = self._auditor(run)
        audits.look()
        if run.finished and audits.idle:
            del self.audits[run.run_id]
            await audits.close()

    def _auditor(self, run: FollowedRun) -> FollowAudits:
        shelf = FindingsShelf(self._store, run.run_id, run.directory, lambda: run.signed_head)
        runner = AuditRunner(
            run.run_id,
            self._store,
            run.directory / "audits",
            AuditProcess(self.settings.audit_memory_bytes, tolerant=True),
            lambda hotkey, first_step, end_step: [],
            disk_bytes=self.settings.audit_disk_bytes,
            shelf=shelf,
        )
        return FollowAudits(run, runner, shelf, self.line, self.signer, self.blocks, self.clock, self._permitted)

    def _permitted(self) -> bool:
        return self.side.permits.get(self.signer.hotkey, False)

    async def follow_chain(self) -> None:
        await follow_blocks(self._chain, self.blocks, self._wanted_blocks)

    def _wanted_blocks(self) -> set[int]:
        return {block for audits in self.audits.values() for block in audits.wanted_blocks}


def has_work(run: FollowedRun) -> bool:
    return bool(run.todo.windows or run.todo.cases or run.promises.due())


async def serve_follower(settings: ValidatorSettings, signer: Signer) -> None:
    chain = connect_chain(settings.chain, settings.chain_endpoint, hotkey=signer)
    store = await make_store(settings, signer.hotkey)
    service = Service("follower")
    service.on_close("chain", chain.close)
    service.on_close("store", store.close)
    listener: Listener | None = None
    try:
        node = FollowerNode(settings, signer, chain, store)
        await node.side.begin()
        app = follower_app(node, RequestVerifier(signer.hotkey, is_known=node.is_known))
        lag = LoopLag(node.clock)
        await attach(service, settings, FollowerView(node, lag), lag, signer.hotkey)
        listener = await listen(app, settings.host, settings.port)
        await node.side.announce()
    except BaseException:
        if listener is not None:
            await listener.close()
        await store.close()
        await chain.close()
        raise
    service.on_close("http", listener.close)
    service.on_close("copies", node.reader.close)
    service.forever("journals", node.reader.run)
    service.forever("withheld", node.withheld.run)
    service.forever("audits", node.audit_runs)
    service.forever("blocks", node.follow_chain)
    service.forever("metagraph", node.side.watch)
    service.forever("policy", node.policy_desk.watch)
    service.forever("leaders' policies", node.policy_doubts.run)
    if settings.set_weights:
        service.forever("weights", node.side.set_weights)
    logger.info("validator {} follows {}; the run's page: {}/", signer.hotkey, settings.store_url, listener.url)
    await service.run()
