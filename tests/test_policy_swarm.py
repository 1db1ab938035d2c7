"""A swarm whose owner changes the policy while a run goes on: the validator is killed, and everybody counts alike after it."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from test_audit_swarm import RUN, RUN_S, START_S, audited

from iota.cli.main import main
from iota.remote import Remote
from iota.score_recompute import recompute_journal
from iota.store_check import StoreAddress
from iota.swarm import LocalSwarm, SwarmOptions
from subnet.errors import Refused, Unreachable
from subnet.policy.api import PolicyView
from subnet.policy.policy import SubnetPolicy, WeightsRules
from subnet.policy.score import ScorePolicy
from subnet.policy.text import dump_policy
from subnet.protocol.follow_api import FollowerStatus
from subnet.run import events as ev
from subnet.run.config import NO_AUDITS
from subnet.run.runfile import parse_run
from subnet.timing import Deadline

ROOT = Path(__file__).resolve().parent.parent
BEGUN = SubnetPolicy(score=ScorePolicy(half_life_s=1800.0))
WANTED = SubnetPolicy(score=ScorePolicy(half_life_s=5400.0), weights=WeightsRules(burn_share=0.25))
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def told(swarm: LocalSwarm) -> list[ev.PolicyChanged]:
    path = swarm.directory / "validator" / "runs" / "off" / "journal.db"
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        rows = [data for (data,) in connection.execute("SELECT data FROM records ORDER BY number")]
    events = [msgspec.msgpack.decode(data, type=ev.Record).event for data in rows]
    return [event for event in events if isinstance(event, ev.PolicyChanged)]


def until(found: Callable[[], bool], what: str, deadline: Deadline) -> None:
    while not found():
        deadline.check(what)
        time.sleep(0.3)


def test_a_policy_changes_under_a_run_and_survives_a_kill(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "book.txt").write_text(
        (ROOT / "iota" / "assets" / "moby_dick.txt").read_text(encoding="utf-8")[:60_000], encoding="utf-8"
    )
    config = audited(parse_run(RUN.replace("steps = 4", "steps = 60"), tmp_path), "off", NO_AUDITS)
    options = SwarmOptions(device="cpu", measure_costs=False, start_s=START_S, policy=BEGUN, spare_validators=1)
    with LocalSwarm(tmp_path / "swarm", config, 2, options) as swarm:
        swarm.wait_until(lambda status: status.summary.step >= 2, Deadline.after(RUN_S))
        (first,) = told(swarm)
        assert (first.digest, first.effective_block) == (BEGUN.digest, 0)

        path, wallets = tmp_path / "policy.toml", swarm.directory / "wallets"
        path.write_text(dump_policy(WANTED), encoding="utf-8")
        where = ["--validator.url", swarm.validator_url]
        wallet = ["--wallet.name", "owner", "--wallet.path", str(wallets)]
        assert main(["policy", "apply", str(path), *where, *wallet]) == 0, capsys.readouterr().err
        said = capsys.readouterr().out
        assert "score.half_life_s: 1800.0 -> 5400.0" in said
        assert f"by {swarm.owner().hotkey}: in force in" in said
        swarm.kill("validator")
        swarm.start_validator()

        def view() -> PolicyView | None:
            try:
                return swarm.remote().policy(Deadline.after(10))
            except Unreachable:
                return None

        def in_force() -> bool:
            now = view()
            return now is not None and now.in_force.policy == WANTED

        until(in_force, "the new policy", Deadline.after(RUN_S))
        swarm.wait_finished(Deadline.after(RUN_S))
        assert [event.digest for event in told(swarm)] == [BEGUN.digest, WANTED.digest], "told twice, or not at all"

        scores = swarm.remote().scores(Deadline.after(30))
        assert scores.policy == WANTED.score
        directory = swarm.directory / "validator" / "runs" / "off"
        again = recompute_journal(str(directory), StoreAddress("unused"), "", at_s=scores.time_s)
        assert again.scores == scores.scores, "a recount from the journal has other scores"
        assert [c.score for c in again.policies] == [ScorePolicy(), BEGUN.score, WANTED.score]
        hotkey = scores.scores[0].hotkey
        assert main(["score", "explain", hotkey, *where]) == 0
        assert f"counted with policy {WANTED.digest[:12]} since 20" in capsys.readouterr().out

        def burns() -> bool:
            metagraph, weights = swarm.chain_state()
            owner = metagraph.owner_uid
            if owner is None:
                return False
            for uid, receipt in weights.items():
                shares = dict(zip(receipt.uids, receipt.values, strict=True))
                if uid != owner and shares.get(owner, 0) / max(1, sum(shares.values())) == pytest.approx(
                    0.25, abs=0.01
                ):
                    return True
            return False

        until(burns, "a quarter of the weights burned", Deadline.after(RUN_S))

        url = swarm.start_follower("validator-1")
        status: list[FollowerStatus] = []

        def doubts() -> bool:
            try:
                found = Remote(url).status(Deadline.after(10))
            except (Unreachable, Refused):
                return False
            assert isinstance(found, FollowerStatus)
            status[:] = [found]
            return any(view.doubts for view in found.followed)

        until(doubts, "a follower of another policy to say so", Deadline.after(RUN_S))
        assert f"its leader counts with policy {WANTED.digest[:12]}" in status[0].followed[0].doubts[0]
