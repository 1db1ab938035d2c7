"""The validator's process: started in order, stopped in reverse, its directory locked meanwhile.

A journal that can't be written or a lost leadership ends the process with one line that says why.
"""

from __future__ import annotations

import asyncio
import gc
import signal

from loguru import logger

from subnet.allocator import bound_heap
from subnet.chain.connect import connect_chain
from subnet.model.own_code import allow
from subnet.net.border import Listener, listen
from subnet.protocol.signing import RequestVerifier, Signer, load_wallet
from subnet.service import Service
from subnet.timing import TIMEOUTS, Deadline, check_nesting
from validator.directory_lock import directory_lock
from validator.drain import drain_routes
from validator.follow_node import serve_follower
from validator.http_api import HttpApi
from validator.http_home import more_routes
from validator.http_pages import PageApi
from validator.journals import Journals
from validator.lead_from import lead_from
from validator.node import ValidatorNode
from validator.ops.look import LeaderView, LoopLag
from validator.ops.serve import attach
from validator.page_desk import desk_of
from validator.presence import GC_THRESHOLDS
from validator.settings import ValidatorSettings
from validator.store_choice import make_store
from validator.store_health import first_look


async def _serve(settings: ValidatorSettings, signer: Signer) -> None:
    chain = connect_chain(settings.chain, settings.chain_endpoint, hotkey=signer)
    store = await make_store(settings, signer.hotkey)
    service = Service("validator")
    service.on_close("chain", chain.close)
    service.on_close("store", store.close)
    listener: Listener | None = None
    try:
        await first_look(store, settings.directory.expanduser())
        await store.open(deadline=Deadline.after(TIMEOUTS.store_open_s))
        if settings.lead_from:
            metagraph = await chain.metagraph(settings.netuid)
            permits = {neuron.hotkey: neuron.validator_permit for neuron in metagraph.neurons}
            directory, journals = settings.directory.expanduser(), Journals(settings.journal_url)
            await lead_from(store, directory, only=settings.lead_runs, permits=permits, journals=journals)
        node = ValidatorNode(settings, signer, chain, store)
        await node.side.begin()
        verifier = RequestVerifier(signer.hotkey, is_known=node.is_known)
        page = PageApi(desk_of(node))
        api = HttpApi(node, verifier, more=[*more_routes(node), *drain_routes(node.draining), *page.routes()])
        api.app.on_shutdown.append(page.close)
        lag = LoopLag(node.clock)
        view = LeaderView(node, lag)
        await attach(service, settings, view, lag, signer.hotkey)
        listener = await listen(api.app, settings.host, settings.port, handlers=api.handlers)
        await node.side.announce()
    except BaseException:
        if listener is not None:
            await listener.close()
        await store.close()
        await chain.close()
        raise
    service.on_close("http", listener.close)
    service.forever("runs", node.drive_runs)
    service.forever("idle store", view.idle_store.run)
    service.forever("drain", lambda: node.draining.run(service))
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, node.draining.ask)
    service.forever("metagraph", node.side.watch)
    service.forever("policy", node.policy_desk.watch)
    service.forever("store", store.maintain)
    service.forever("finished runs", node.finished_runs.tidy_forever)
    if settings.set_weights:
        service.forever("weights", node.side.set_weights)
    logger.info("validator {} serves at {}; the run's page: {}/", signer.hotkey, listener.url, listener.url)
    await service.run()


def run_validator(settings: ValidatorSettings) -> int:
    """The whole process; returns its exit status."""
    check_nesting()
    allow(settings.allow_code, settings.private_code)
    bound_heap()
    gc.set_threshold(*GC_THRESHOLDS)
    signer = load_wallet(settings.wallet_name, settings.wallet_hotkey, settings.wallet_path.expanduser())
    with directory_lock(settings.directory.expanduser()):
        asyncio.run(serve_follower(settings, signer) if settings.follow else _serve(settings, signer))
    return 0
