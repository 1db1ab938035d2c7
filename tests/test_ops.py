"""Problems of a validator, and what is made of them: health that tells the truth, metrics, alerts told once."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from subnet.errors import ConfigError
from subnet.logs import REDACTOR
from subnet.net.border import listen
from subnet.protocol.api import MemberView, RunStatus, RunSummary, StallView, StepView, WaitView
from validator.ops.alerts import AlertBook, Alerter, webhooks_from
from validator.ops.http import OpsApi
from validator.ops.look import LoopLag, disk_of
from validator.ops.metrics import CODES
from validator.ops.problems import Look, Problem, problems
from validator.weights import WeightsReport

WELL = Look(
    leads=True,
    hotkey="5Hotkey",
    started_s_ago=100.0,
    metagraph_age_s=3.0,
    tempo_s=20.0,
    weights=WeightsReport(status="set", block=7, uids=(1,), values=(65535,)),
    weights_set_s_ago=10.0,
    disk_free_bytes=50 << 30,
    disk_bytes=100 << 30,
)
SUMMARY = RunSummary("whale", "whale-1", "running", 0, 5, 100, 6.5, None)
STALL = StallView(0, 90.0, 60.0, (WaitView("stage 2", "a miner", 88.0),))
BROKEN = {
    "metagraph_old": {"metagraph_age_s": None, "chain_trouble": "connection refused"},
    "not_registered": {"registered": False},
    "no_permit": {"permit": False},
    "weights_not_set": {"weights_set_s_ago": 61.0},
    "weights_differ": {"weights": WeightsReport(status="differs", code="not_as_sent", reason="sent 2, stored 1")},
    "store": {"store_trouble": "unreachable: connection refused"},
    "disk_full": {"disk_free_bytes": 1 << 30},
    "disk_low": {"disk_free_bytes": 9 << 30},
    "event_loop": {"loop_lag_s": 6.0},
    "no_term": {"may_speak": False, "run": SUMMARY},
    "spike": {"run": SUMMARY, "spikes": ("step 3: loss 9 is 3 times the median of 50 steps",)},
    "stalled": {"run": msgspec.structs.replace(SUMMARY, state="stalled", stall=STALL)},
    "follow": {"leads": False, "follow_troubles": ("run whale: segment 3 isn't signed by its leader",)},
}


class Served:
    """A validator that is seen as the test says."""

    def __init__(self) -> None:
        self.now = WELL
        self.run: RunStatus | None = None

    def look(self) -> Look:
        return self.now

    def status(self) -> RunStatus | None:
        return self.run

    def followed(self) -> tuple[tuple[str, int, int, int], ...]:
        return (("whale", 4, 120, 1),) if not self.now.leads else ()


def running() -> RunStatus:
    members = tuple(
        MemberView(
            f"5M{i}",
            "1.1",
            stage=i % 2,
            ready_for_step=5 if i else 4,
            leases=2,
            items_done=9,
            seconds_per_item=0.5,
            heard_s_ago=0.1,
        )
        for i in range(4)
    )
    return RunStatus(
        summary=SUMMARY, time_ns=0, members=members, steps=(StepView(4, 6.5, 1.5, 4096, 2.0, 6.6),), tokens_per_s=2048.0,
        num_merges=10, num_voids=1, num_gone=2, num_joined=6, events=(), journal_length=500, journal_head="ab", store_bytes=1 << 20,
    )  # fmt: skip


@pytest.mark.parametrize("code", sorted(BROKEN))
def test_each_problem_is_said_alone_with_its_remedy(code: str):
    found = problems(msgspec.structs.replace(WELL, **BROKEN[code]))
    assert [problem.code for problem in found] == [code]
    assert found[0].summary
    assert found[0].hint


def test_every_code_is_a_metric_and_the_well_have_none():
    assert sorted(BROKEN) == sorted(CODES)
    assert problems(WELL) == ()


def test_a_validator_whose_miners_have_sealed_nothing_yet_is_no_alarm():
    idle = WeightsReport(status="nothing", code="no_scores", reason="no registered miner has sealed work yet")
    assert problems(msgspec.structs.replace(WELL, weights=idle, weights_set_s_ago=None, started_s_ago=1e6)) == ()
    refused = WeightsReport(status="refused", code="NeuronNoValidatorPermit", reason="no permit", hint="add stake")
    look = msgspec.structs.replace(WELL, weights=refused, weights_set_s_ago=None, started_s_ago=1e6)
    assert [(p.code, p.hint) for p in problems(look)] == [("weights_not_set", "add stake")]


def test_the_critical_come_first():
    look = msgspec.structs.replace(WELL, loop_lag_s=6.0, store_trouble="away")
    assert [problem.severity for problem in problems(look)] == ["critical", "warning"]


@pytest.fixture
async def served() -> AsyncIterator[tuple[Served, str, aiohttp.ClientSession]]:
    watched = Served()
    listener = await listen(OpsApi(watched).app, "127.0.0.1", 0)
    async with aiohttp.ClientSession() as session:
        yield watched, listener.url, session
    await listener.close()


async def test_ready_only_while_work_can_be_sealed(served: tuple[Served, str, aiohttp.ClientSession]):
    watched, url, session = served

    async def ask(path: str) -> tuple[int, Any]:
        async with session.get(url + path) as answer:
            return answer.status, await answer.json()

    status, body = await ask("/readyz")
    assert (status, body["status"], body["state"], body["problems"]) == (200, "ok", "idle", [])
    watched.now = msgspec.structs.replace(WELL, permit=False, run=SUMMARY)
    status, body = await ask("/readyz")
    assert (status, body["run"], body["step"]) == (200, "whale", 5), "without a permit runs are led all the same"
    assert [problem["code"] for problem in body["problems"]] == ["no_permit"]
    for code in ("store", "no_term", "follow", "metagraph_old"):
        watched.now = msgspec.structs.replace(WELL, **BROKEN[code])
        status, body = await ask("/readyz")
        assert (status, body["status"]) == (503, "not_ready")
        assert (await ask("/healthz"))[0] == 200, "alive, and no restart would help"
    watched.now = msgspec.structs.replace(WELL, loop_lag_s=70.0)
    assert (await ask("/healthz"))[0] == 503


async def test_metrics_parse_and_say_what_was_seen(served: tuple[Served, str, aiohttp.ClientSession]):
    watched, url, session = served

    async def scrape() -> dict[tuple[str, ...], float]:
        async with session.get(url + "/metrics") as answer:
            assert answer.content_type == "text/plain"
            text = await answer.text()
        return {
            (sample.name, *(f"{k}={v}" for k, v in sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    seen = await scrape()
    assert {seen["iota_problem", f"code={code}"] for code in CODES} == {0.0}
    assert seen["process_open_fds",] > 0
    assert ("iota_run_step",) not in seen
    watched.run, watched.now = running(), msgspec.structs.replace(WELL, **BROKEN["store"])
    seen = await scrape()
    assert seen["iota_problem", "code=store"] == 1.0
    assert seen["iota_store_up",] == 0.0
    assert seen["iota_run_step",] == 5
    assert seen["iota_run_state", "state=running"] == 1
    assert seen["iota_stage_members", "ready=false", "stage=0"] == 1
    assert seen["iota_stage_members", "ready=true", "stage=1"] == 2
    assert seen["iota_members_gone_total",] == 2
    watched.run, watched.now = None, msgspec.structs.replace(WELL, leads=False)
    assert (await scrape())["iota_followed_breaches", "run=whale"] == 1


def problem(code: str, summary: str = "it is") -> Problem:
    return Problem(code, "critical", summary, "mend it")


def test_a_problem_is_told_once_it_has_lasted_and_once_it_is_over():
    book = AlertBook("5Hotkey", hold_s=60.0)
    told: list[tuple[float, str, str]] = []
    for now_s in range(0, 400, 10):
        there = [problem("store", f"away for {now_s} s")] if 20 <= now_s < 200 or now_s in (240, 300) else []
        told += [(now_s, alert.state, alert.summary) for alert in book.look(there, now_s)]
    assert told == [(80, "firing", "away for 80 s"), (360, "resolved", "away for 300 s")], "what comes back isn't over"


def test_what_flickers_is_not_told():
    book = AlertBook("5Hotkey", hold_s=60.0)
    assert not [a for now_s in range(0, 1000, 10) for a in book.look([problem("x")] if now_s % 50 else [], now_s)]


async def test_webhooks_get_each_alert_however_they_stumble(monkeypatch: pytest.MonkeyPatch):
    got: list[dict[str, Any]] = []
    asked: list[int] = []
    statuses = [503, 200, 404]  # tried again; taken; refused for good, so dropped; then all is taken

    async def take(request: web.Request) -> web.Response:
        status = statuses[len(asked)] if len(asked) < len(statuses) else 200
        asked.append(status)
        if status == 200:
            got.append(await request.json())
        return web.Response(status=status)

    app = web.Application()
    app.router.add_post("/hook", take)
    listener = await listen(app, "127.0.0.1", 0)
    monkeypatch.setattr("validator.ops.alerts.Backoff.next_s", lambda self: 0.01)
    there = [problem("store")]
    alerter = Alerter([f"{listener.url}/hook"], "5Hotkey", lambda: there, hold_s=0.0, look_every_s=0.01)
    task = asyncio.create_task(alerter.run())

    async def until(number: int) -> None:
        while len(asked) < number:
            await asyncio.sleep(0.01)

    async with asyncio.timeout(20):
        await until(2)
        there = []
        await until(3)
        there = [problem("disk_full")]
        await until(4)
    task.cancel()
    await asyncio.wait([task])
    await listener.close()
    assert asked[:4] == [503, 200, 404, 200]
    assert [(body["state"], body["code"]) for body in got[:2]] == [("firing", "store"), ("firing", "disk_full")]
    assert got[0]["text"] == got[0]["content"] == "[firing] store: it is; mend it"


def test_webhook_files_are_secret_and_bad_ones_are_named(tmp_path: Path):
    path = tmp_path / "hooks"
    cases = {
        "": "0 addresses",
        "ftp://example.org/x\n": "no http(s) URL",
        "https://example.org/x\n" * 9: "9 addresses",
    }
    for text, said in cases.items():
        path.write_text(text)
        path.chmod(0o600)
        with pytest.raises(ConfigError, match=said.replace("(", r"\(").replace(")", r"\)")):
            webhooks_from(path)
    path.write_text("# team\nhttps://hooks.example.org/T123/very-secret\n")
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        webhooks_from(path)
    path.chmod(0o600)
    assert webhooks_from(path) == ("https://hooks.example.org/T123/very-secret",)
    assert "very-secret" not in REDACTOR.clean(f"posting to {path.read_text()}")
    with pytest.raises(ConfigError, match="can't be read"):
        webhooks_from(tmp_path / "none")


async def test_a_loop_that_stands_still_is_noticed():
    import time

    lag = LoopLag()
    task = asyncio.create_task(lag.run())
    await asyncio.sleep(0.1)
    time.sleep(1.5)  # noqa: ASYNC251 - what must not happen
    async with asyncio.timeout(10):
        while not lag.worst_s:
            await asyncio.sleep(0.05)
    task.cancel()
    assert lag.worst_s > 0.3


def test_the_disk_of_a_directory_that_is_not_there_yet(tmp_path: Path):
    free, whole = disk_of(tmp_path / "not" / "yet")
    assert 0 < free <= whole == os.statvfs(tmp_path).f_blocks * os.statvfs(tmp_path).f_frsize


def test_the_dashboard_shows_only_series_that_there_are():
    text = (Path(__file__).parent.parent / "deploy" / "grafana" / "iota.json").read_text()
    board = json.loads(text)
    source = (Path(__file__).parent.parent / "validator" / "ops" / "metrics.py").read_text()
    named = {
        part for panel in board["panels"] for target in panel.get("targets", []) for part in _names(target["expr"])
    }
    assert len(named) > 15
    for name in named:
        base = name.removesuffix("_total").removesuffix("_info")
        assert f'"{base}"' in source or name.startswith("process_"), name


def _names(expression: str) -> list[str]:
    import re

    return re.findall(r"\b(?:iota|process)_[a-z_]+\b", expression)
