"""A second validator, a process that shares nothing with the first but the store and the chain: it finds the same by itself."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
from test_swarm import NO_AUDITS, ROOT, RUN, RUN_S, START_S

from iota.swarm import LocalSwarm, SwarmOptions
from subnet.errors import NotFound, Refused, Unreachable
from subnet.net.client import SignedClient
from subnet.protocol.follow_api import FollowerStatus
from subnet.protocol.messages import Hello
from subnet.protocol.signing import load_wallet
from subnet.run.runfile import parse_run
from subnet.score.api import ScoreList
from subnet.timing import Deadline

pytestmark = pytest.mark.timeout(900)
T = TypeVar("T")
AUDIT = """[audit]
rate = 0.5
before_seal = "probation"
probation_items = 4
window_steps = 2
"""


def get(url: str, path: str, kind: type[T]) -> T:
    async def work() -> T:
        async with SignedClient(url) as client:
            return await client.request("GET", path, None, kind, deadline=Deadline.after(10), signed=False)

    return asyncio.run(work())


def until(what: str, deadline: Deadline, found: Callable[[], T | None]) -> T:
    while True:
        try:
            result = found()
        except (Unreachable, Refused) as error:
            if isinstance(error, Refused) and error.code != NotFound.code:
                raise
            result = None
        if result is not None:
            return result
        deadline.check(what)
        time.sleep(0.25)


def test_a_follower_checks_audits_scores_and_sets_weights(tmp_path: Path) -> None:
    book = (ROOT / "iota" / "assets" / "moby_dick.txt").read_text(encoding="utf-8")
    (tmp_path / "book.txt").write_text(book[:60_000], encoding="utf-8")
    config = parse_run(RUN.replace('name = "calm"', 'name = "followed"').replace(NO_AUDITS, AUDIT), tmp_path)
    options = SwarmOptions(device="cpu", measure_costs=False, start_s=START_S, spare_miners=0, spare_validators=1)
    with LocalSwarm(tmp_path / "swarm", config, 2, options) as swarm:
        url = swarm.start_follower()
        began = until("waiting for the follower", Deadline.after(RUN_S), lambda: get(url, "/v1/status", FollowerStatus))
        swarm.kill("validator-1")
        assert swarm.wait_end("validator-1", Deadline.after(30)) == -signal.SIGKILL
        assert swarm.start_follower() == url
        root = swarm.wait_finished(Deadline.after(RUN_S))

        def caught_up() -> FollowerStatus | None:
            status = get(url, "/v1/status", FollowerStatus)
            done = status.summary.state == "finished" and not any(view.to_redo for view in status.followed)
            return status if done else None

        status = until("waiting for the follower", Deadline.after(RUN_S), caught_up)
        assert status.role == "follower"
        assert status.journal_length > began.journal_length
        assert status.summary.root == root
        assert status.breaches == ()
        assert status.distrusted == ()
        assert status.own_audits["passed"] > 0
        assert status.own_audits["failed"] == status.own_audits["refused"] == 0
        assert get(url, "/v1/hello", Hello).term == 0  # it leads nothing

        theirs = get(swarm.validator_url, "/v1/scores", ScoreList).scores
        ours = get(url, "/v1/scores", ScoreList).scores
        assert {score.hotkey for score in ours} == {swarm.miner_hotkey(number) for number in range(2)}
        assert {s.hotkey: s.total for s in ours} == pytest.approx({s.hotkey: s.total for s in theirs}, abs=1e-3)
        assert {s.hotkey: s.sealed_work for s in ours} == {s.hotkey: s.sealed_work for s in theirs}

        hotkeys = [
            load_wallet(name, "default", swarm.directory / "wallets").hotkey for name in ("validator", "validator-1")
        ]

        def both_set() -> dict[str, tuple[int, ...]] | None:
            metagraph, receipts = swarm.chain_state()
            uids = {hotkey: metagraph.neuron(hotkey).uid for hotkey in hotkeys}
            return {h: receipts[uid].uids for h, uid in uids.items()} if set(uids.values()) <= set(receipts) else None

        weights = until("waiting for both validators' weights", Deadline.after(RUN_S), both_set)
        assert len(set(weights.values())) == 1
        assert len(weights[hotkeys[0]]) == 2
