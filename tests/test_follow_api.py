"""A follower answers like a validator that leads, with what it found out itself; the same commands read both."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from follow_cases import Published, journal_of
from lead_cases import FIRST, SECOND, Keys
from test_follow import other_segment

from iota.cli.main import main
from iota.live import follower_lines
from iota.remote import Remote
from subnet.errors import Refused
from subnet.net.border import listen
from subnet.protocol import wire
from subnet.protocol.api import RunStatus
from subnet.protocol.follow_api import FollowerStatus, OwnAudit
from subnet.protocol.signing import RequestVerifier
from subnet.timing import Deadline, ManualClock
from validator.follow_api import follower_app
from validator.follow_checks import Found
from validator.follow_reader import LIST_S, RECHECK_S, FollowReader
from validator.log_publisher import segment_key
from validator.policy_desk import PolicyDesk
from validator.policy_keeper import PolicyKeeper
from validator.scoring import ScoreBook


class Served:
    """A follower's interface over HTTP, without its process."""

    def __init__(self, directory: Path) -> None:
        self.published = Published(Keys(), journal_of(5))
        self.clock, self.scores, self.directory, self.signer = (
            ManualClock(),
            ScoreBook(leader_audits=False),
            directory,
            SECOND,
        )
        self.reader = FollowReader(self.published.keys, directory, self.scores, clock=self.clock)
        self.side = SimpleNamespace(weights_said="weights set at block 7 for 2 uids", registrations={}, metagraph=None)
        self.policies = PolicyKeeper(directory / "own", None, SECOND.hotkey, 0.0)
        self.policy_desk = PolicyDesk(
            self.policies,
            SECOND.hotkey,
            None,  # type: ignore[arg-type]
            lambda: None,
            self.clock,
            tell=lambda line: None,
            effect=lambda line: None,
        )
        self.url = ""

    async def catch_up(self, seconds: float = LIST_S + 60) -> None:
        self.clock.advance(seconds)
        while await self.reader.look():
            pass

    async def status(self) -> FollowerStatus:
        status = await asyncio.to_thread(Remote(self.url).status, Deadline.after(10))
        assert isinstance(status, FollowerStatus)
        return status


@pytest.fixture
async def served(tmp_path: Path) -> AsyncGenerator[Served]:
    follower = Served(tmp_path)
    app = follower_app(follower, RequestVerifier(SECOND.hotkey, is_known=lambda hotkey: False))  # type: ignore[arg-type]
    listener = await listen(app, "127.0.0.1", 0)
    follower.url = listener.url
    yield follower
    await listener.close()


async def test_before_there_is_a_run(served: Served) -> None:
    served.reader.away = "the store is down"
    with pytest.raises(Refused, match="no run is followed") as caught:
        await served.status()
    assert caught.value.code == "not_found"
    assert "the store is down" in str(caught.value)
    assert await asyncio.to_thread(Remote(served.url).runs, Deadline.after(10)) == ()


async def test_the_status_is_that_of_the_run_with_what_was_found_in_it(served: Served) -> None:
    served.published.send(5)
    await served.catch_up()
    (run,) = served.reader.runs.values()
    run.found_later(Found("undrawn", "window 0 was audited without somebody"))
    run.judge(OwnAudit(run.run_id, 0, 0, 0, 0, run.number, 5, passed=(next(iter(run.state.members)),)))
    status = await served.status()
    assert (status.role, status.summary.name, status.journal_length) == ("follower", run.name, run.number)
    assert status.num_breaches == {"undrawn": 1}
    assert [breach.code for breach in status.breaches] == ["undrawn"]
    assert status.own_audits["passed"] == 1
    assert status.weights == served.side.weights_said
    assert status.summary.state == "running"
    served.reader.away = "the store is down"
    view = (await served.status()).followed[0]
    assert (view.trouble_code, view.trouble) == ("store", "the log store can't be read: the store is down")
    assert (await served.status()).summary.waiting_for == view.trouble


async def test_a_proof_is_named_in_the_status(served: Served) -> None:
    served.published.send(4)
    await served.catch_up()
    served.published.keys.keys[segment_key(served.published.run_id, 3)] = wire.encode(
        other_segment(served.published, 3)
    )
    await served.catch_up(RECHECK_S + 1)
    status = await served.status()
    assert [hotkey for hotkey, _, _ in status.distrusted] == [FIRST.hotkey]
    assert status.followed[0].trouble_code == "two_heads"
    lines = "\n".join(follower_lines(status))
    assert f"{FIRST.hotkey} signed two journals" in lines


async def test_the_commands_read_it(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    served.published.send()
    await served.catch_up()
    for command in (["run", "status"], ["run", "list"], ["score", "list"], ["score", "explain", "nobody"]):
        assert await asyncio.to_thread(main, [*command, "--validator.url", served.url]) == 0, command
    said = capsys.readouterr().out
    (run,) = served.reader.runs.values()
    assert run.name in said
    assert "records checked" in said
    assert await asyncio.to_thread(main, ["run", "status", "--json", "--validator.url", served.url]) == 0
    status = msgspec.json.decode(capsys.readouterr().out, type=FollowerStatus)
    assert status.followed[0].segments == len(served.published.segments)


def test_a_leader_s_status_is_none_of_a_follower() -> None:
    summary = {
        "name": "a",
        "run_id": "a-1",
        "state": "running",
        "place": 0,
        "step": 1,
        "steps": 2,
        "loss": None,
        "root": None,
    }
    zeros = dict.fromkeys(("num_merges", "num_voids", "num_gone", "num_joined", "journal_length", "store_bytes"), 0)
    given = {"summary": summary, "time_ns": 1, "members": [], "steps": [], "tokens_per_s": 0.0, "events": [], **zeros}
    status = msgspec.convert({**given, "journal_head": ""}, FollowerStatus)
    assert type(status.led()) is RunStatus
    assert status.led().summary.name == "a"
