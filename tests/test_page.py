"""What the page is served: bounded answers about runs of any size, live updates, and nothing that changes anything."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import aiohttp
import pytest
from journal_cases import records_of
from page_cases import PlayedRun, fp64, served

from miner.page_http import PAGES as MINER_PAGES
from subnet.net.pages import paths_of
from subnet.run import events as ev
from subnet.timing import ManualClock
from subnet.words import Member
from validator.curve import MAX_HOLDOUTS, MAX_MARK_BUCKETS, MAX_POINTS, Curve
from validator.history import History
from validator.http_pages import PAGES
from validator.journal_text import MAX_QUERY_CHARS, SCANNED_AT_ONCE, line_of
from validator.marks import KINDS
from validator.merge_lines import MAX_MERGES, MergeLines
from validator.page_desk import COSTLY_PER_S
from validator.page_feed import QUEUE_MESSAGES, Viewer, event_bytes


@pytest.fixture(scope="module")
def run() -> PlayedRun:
    return PlayedRun(num_members=40, num_stages=3, num_steps=10_000).play(6_000)


async def answer(url: str, path: str) -> tuple[int, object]:
    async with aiohttp.ClientSession(url) as session, session.get(path) as response:
        return response.status, await response.json()


# --- the curve -------------------------------------------------------------------------------------------------------


def test_a_curve_is_thinned_to_so_many_points_and_none_of_its_extremes_is_lost(run: PlayedRun):
    curve = Curve()
    curve.sync(run.history)
    for points in (1, 7, 1_000, MAX_POINTS):
        view = curve.view(run.history, points)
        assert len(view.step) == points
        assert {len(view.loss), len(view.time_s), len(view.tokens), len(view.tokens_per_s)} == {points}
        assert view.step[-1] == run.history.steps[-1].step
        assert min(view.loss_min) == pytest.approx(min(step.loss for step in run.history.steps), abs=1e-5)
        assert max(view.loss_max) == pytest.approx(max(step.loss for step in run.history.steps), abs=1e-5)
        assert view.tokens[-1] == sum(step.tokens for step in run.history.steps)
        assert len(view.holdout) <= MAX_HOLDOUTS
        assert len(view.marks) <= MAX_MARK_BUCKETS + len(KINDS)
        assert sum(mark.count for mark in view.marks) == run.history.num_marks
    whole = curve.view(run.history, MAX_POINTS, first=5_900)
    assert whole.step == list(range(5_900, 6_000))
    assert whole.loss == whole.loss_min == whole.loss_max
    speed = whole.tokens[1] - whole.tokens[0]
    assert whole.tokens_per_s[1] == pytest.approx(speed / (whole.time_s[1] - whole.time_s[0]), rel=0.01)


def test_a_curve_follows_its_history_step_by_step_and_through_a_rewind():
    run, curve = PlayedRun(num_members=6, num_stages=2).play(30), Curve()
    curve.sync(run.history)
    run.play(5)
    curve.sync(run.history)
    assert (list(curve.step), curve.epoch) == (list(range(35)), 0)
    assert [point.step for point in curve.since(31, 50)] == [32, 33, 34]
    assert [point.step for point in curve.since(-1, 2)] == [33, 34]
    run.say(ev.Rewound(20, 1, 1))
    run.step = 20
    run.play(2)
    curve.sync(run.history)
    assert (list(curve.step), curve.epoch) == (list(range(22)), 1)
    assert curve.view(run.history, 100).marks[-1].kind == "rewound"


def test_a_run_without_a_step_has_an_empty_curve_and_a_loss_that_is_no_number_is_null():
    run, curve = PlayedRun(num_members=4, num_stages=2), Curve()
    curve.sync(run.history)
    assert curve.view(run.history, 10).step == []
    run.say(ev.StepPlanned(0, 4, 0, None))
    run.say(ev.StepSealed(0, 4, fp64(0.0), 0, fp64(float("nan")), 512))
    curve.sync(run.history)
    assert json.loads(event_bytes("x", curve.view(run.history, 10)).split(b"data: ")[1])["loss"] == [None]


def test_marks_of_disruptions_survive_a_copy_of_the_fold_and_stop_at_the_end():
    history, member = History(), Member("5abc", 1, 2)
    for number, event in enumerate((
        ev.TermStarted(1, "leader", "n"),
        ev.Joined(member, "cold", 1, "boot", "h", 1),
        ev.StepPlanned(4, 4, 0, None),
        ev.Voided(4, 1, member, "gone"),
        ev.Gone(member, "silent"),
    )):  # fmt: skip
        history.fold(ev.Record(number, 10**9 * number, event))
    again = History.load(history.dump())
    for one in (history, again):
        one.fold(ev.Record(5, 10**10, ev.TermStarted(2, "leader", "n")))
        one.fold(ev.Record(6, 10**10, ev.RunFinished(5, "root")))
        one.fold(ev.Record(7, 10**10, ev.Gone(member, "left")))
    assert [(mark.step, mark.kind) for mark in again.marks] == [(-1, "joined"), (4, "void"), (4, "lost"), (4, "leader")]
    assert again.dump() == history.dump()


def test_merges_are_counted_with_their_checks():
    lines, sealed, checked = MergeLines(), 0, 0
    for record in records_of(36):
        lines.note(record)
        sealed += isinstance(record.event, ev.StageSealed)
        checked += isinstance(record.event, ev.Checked) and record.event.ok
    found = lines.lines()
    assert 0 < len(found) <= MAX_MERGES
    assert sum(line.sealed for line in found) == sealed
    assert all(line.contributors and line.partitions == line.num_partitions for line in found if line.sealed)
    assert 0 < sum(line.passed for line in found) <= checked


# --- over HTTP ---------------------------------------------------------------------------------------------------------


async def test_files_come_from_a_table_with_a_strict_policy_and_change_by_their_tag():
    async with served() as (listener, _), aiohttp.ClientSession(listener.url) as session:
        async with session.get("/") as response:
            text, headers = await response.text(), response.headers
        assert response.content_type == "text/html"
        assert "script-src 'self'" in headers["Content-Security-Policy"]
        assert "unsafe" not in headers["Content-Security-Policy"]
        assert headers["X-Content-Type-Options"] == "nosniff"
        async with session.get("/", headers={"If-None-Match": headers["ETag"]}) as response:
            assert response.status == 304
        found = paths_of(PAGES)
        for path in found:
            async with session.get(f"/page/{path.name}") as response:
                assert (response.status, await response.read()) == (200, path.read_bytes())
        for wrong in ("/page/..%2Fnode.py", "/page/node.py", "/page/%2Fetc%2Fpasswd"):
            async with session.get(wrong) as response:
                assert response.status == 404
        assert all(f"/page/{path.name}" in text for path in found if path.suffix == ".js")


def test_the_page_asks_nobody_else_and_has_no_script_or_style_inside():
    for path in [*paths_of(PAGES), *paths_of(MINER_PAGES)]:
        text = path.read_text(encoding="utf-8")
        if path.name.startswith("uplot") or path.suffix == ".svg":
            continue
        assert "http://" not in text.replace("http://www.w3.org/", "")
        assert "https://" not in text
        assert not any(word in text for word in ("innerHTML", "insertAdjacentHTML", "document.write", "eval("))
        if path.suffix == ".html":
            assert " style=" not in text
            assert all(part.startswith(" ") for part in text.split("<script")[1:])
            assert not any(f" on{event}=" in text for event in ("click", "load", "error", "input"))


async def test_answers_about_a_run_are_bounded_and_paged(run: PlayedRun):
    async with served(run) as (listener, _):
        url, base = listener.url, "/v1/page/runs/big"
        status, runs = await answer(url, "/v1/page/runs")
        assert (status, runs[0]["name"]) == (200, "big")
        status, overview = await answer(url, base)
        assert len(overview["members"]) == overview["num_members"] == len(run.views)
        assert {row[3] for row in overview["members"]} <= {"working", "ready", "behind", "silent"}
        status, history = await answer(url, f"{base}/history?points=300")
        assert (status, len(history["step"]), history["num_steps"]) == (200, 300, 6_000)
        status, refusal = await answer(url, f"{base}/history?points={MAX_POINTS + 1}")
        assert (status, refusal["code"]) == (400, "bad_input")
        assert str(MAX_POINTS) in refusal["hint"]
        status, refusal = await answer(url, "/v1/page/runs/other")
        assert (status, refusal["code"], refusal["hint"]) == (404, "not_found", "known runs: big")
        seen, before = 0, ""
        while before is not None:
            _, page = await answer(url, f"{base}/disruptions?limit=50{before}")
            assert len(page["marks"]) <= 50
            seen += len(page["marks"])
            before = None if page["before"] is None else f"&before={page['before']}"
        assert seen == run.history.num_marks
        assert (await answer(url, f"{base}/disruptions?limit=9999"))[0] == 400


async def test_the_journal_is_searched_piece_by_piece_to_its_beginning(run: PlayedRun):
    async with served(run) as (listener, _):
        found, pages, before = [], 0, ""
        while before is not None:
            _, page = await answer(listener.url, f"/v1/page/runs/big/journal?limit=50&q=gone+silent{before}")
            assert page["scanned"] <= SCANNED_AT_ONCE
            found += [line["number"] for line in page["lines"]]
            pages += 1
            before = None if page["before"] is None else f"&before={page['before']}"
        silent = [
            record for record in map(line_of, run.kept) if record.kind == "Gone" and record.text.endswith("silent")
        ]
        assert set(found) >= {line.number for line in silent}
        assert found == sorted(found, reverse=True)
        assert len(found) == len(set(found))
        assert pages > len(run.kept) // SCANNED_AT_ONCE
        status, refusal = await answer(listener.url, f"/v1/page/runs/big/journal?q={'x' * (MAX_QUERY_CHARS + 1)}")
        assert (status, refusal["code"]) == (400, "bad_input")


async def test_answers_that_cost_something_are_rationed_and_what_is_known_is_not(run: PlayedRun):
    clock = ManualClock()
    async with served(run, clock=clock) as (listener, _):
        base = "/v1/page/runs/big"
        known = [await answer(listener.url, f"{base}/history?points={points}") for points in range(1, COSTLY_PER_S + 1)]
        assert {status for status, _ in known} == {200}
        for path in (f"{base}/history?points=999", f"{base}/journal?limit=1"):
            status, refusal = await answer(listener.url, path)
            assert (status, refusal["code"], refusal["retry_after"]) == (503, "busy", 1.0)
        assert await answer(listener.url, f"{base}/history?points={COSTLY_PER_S}") == known[-1]
        clock.advance(1.0)
        assert (await answer(listener.url, f"{base}/journal?limit=1"))[0] == 200


async def test_scores_and_their_reasons(run: PlayedRun):
    async with served(run) as (listener, _):
        _, scores = await answer(listener.url, "/v1/page/scores")
        assert scores["num_scores"] == len(scores["rows"]) == 40
        _, detail = await answer(listener.url, f"/v1/page/scores/{scores['rows'][0][0]}")
        assert [term["name"] for term in detail["terms"]][-2:] == ["worth", "score"]
        assert (await answer(listener.url, "/v1/page/scores/%3Cscript%3E"))[0] == 400


async def test_nothing_is_changed_by_the_page(run: PlayedRun):
    async with served(run) as (listener, _), aiohttp.ClientSession(listener.url) as session:
        for path in ("/", "/v1/page/runs", "/v1/page/runs/big", "/v1/page/scores"):
            for method in ("POST", "PUT", "DELETE"):
                async with session.request(method, path) as response:
                    assert response.status == 405


# --- live ----------------------------------------------------------------------------------------------------------------


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[tuple[str, dict]]:
    kind = ""
    async for line in response.content:
        if line.startswith(b"event: "):
            kind = line[7:].strip().decode()
        elif line.startswith(b"data: "):
            yield kind, json.loads(line[6:])


async def test_a_viewer_hears_the_whole_run_first_and_then_what_is_new():
    run = PlayedRun(num_members=12, num_stages=3).play(40)
    async with served(run, every_s=0.02) as (listener, feed), aiohttp.ClientSession(listener.url) as session:
        async with session.get("/v1/page/runs/big/live") as response:
            assert response.content_type == "text/event-stream"
            stream = events(response)
            kind, first = await anext(stream)
            assert (kind, len(first["members"])) == ("overview", 12)
            gone = run.disturb("silent")
            run.play(3, calm=True)
            steps, marks, left = [], [], []
            async with asyncio.timeout(20):
                async for kind, update in stream:
                    assert kind == "update"
                    assert "facts" not in update.get("set", {})
                    steps += [step[0] for step in update.get("steps", [])]
                    marks += [mark[1] for mark in update.get("marks", [])]
                    left += update.get("gone", [])
                    if steps and left:
                        break
            assert (steps, marks) == ([40, 41, 42], ["lost", "void", "joined"])
            assert left == [f"{gone.hotkey}#{gone.term}.{gone.number}"]
            run.play(200, calm=True)
            async with asyncio.timeout(20):
                async for _, update in stream:
                    if update.get("reload"):
                        assert "steps" not in update
                        break
        async with asyncio.timeout(20):
            while feed.viewers:
                await asyncio.sleep(0.01)


async def test_too_many_viewers_are_refused_and_another_site_too(run: PlayedRun):
    async with served(run, max_viewers=1) as (listener, feed), aiohttp.ClientSession(listener.url) as session:
        async with session.get("/v1/page/runs/other/live") as refused:
            assert (refused.status, len(feed.viewers)) == (404, 0)
        async with session.get("/v1/page/runs/big/live") as response:
            await anext(events(response))
            async with session.get("/v1/page/runs/big/live") as refused:
                said = await refused.json()
            assert (refused.status, said["code"], said["retry_after"]) == (503, "too_many_viewers", 30.0)
            async with session.get("/v1/page/runs/big/live", headers={"Sec-Fetch-Site": "cross-site"}) as refused:
                assert (refused.status, (await refused.json())["code"]) == (401, "unauthorized")


async def test_a_slow_viewer_is_told_and_dropped_and_the_others_go_on():
    slow, quick = Viewer("big"), Viewer("big")
    for number in range(QUEUE_MESSAGES + 1):
        message = event_bytes("update", {"n": number})
        slow.push(message)
        assert quick.push(message)
        assert await quick.queue.get() == message
    assert slow.ended is not None
    assert slow.ended.code == "slow_viewer"
    assert slow.queue.qsize() == 1
    assert b"event: bye" in slow.queue.get_nowait()
    assert not slow.push(b"more")


async def test_the_end_of_the_validator_is_said_to_every_viewer(run: PlayedRun):
    async with served(run) as (listener, feed), aiohttp.ClientSession(listener.url) as session:
        async with session.get("/v1/page/runs/big/live") as response:
            stream = events(response)
            await anext(stream)
            await feed.close()
            kind, said = await anext(stream)
            assert (kind, said["code"]) == ("bye", "closing")
            assert [event async for event in stream] == []


async def test_a_finished_run_is_read_from_its_journal_once(tmp_path):
    from long_run import LongRun
    from page_cases import entry_of

    from subnet.errors import NotFound
    from subnet.timing import SYSTEM_CLOCK
    from validator.journal_store import JournalStore
    from validator.page_sight import overview_of, read_finished

    entry = entry_of("past", 5, 2)
    entry.directory = tmp_path
    with pytest.raises(NotFound, match="no journal"):
        read_finished(entry, SYSTEM_CLOCK)
    journal = JournalStore(entry.journal_path)
    for record in LongRun(steps=5).stream(10_000):
        journal.stage(record.event, record.time_ns)
    await journal.commit()
    length = len(journal)
    journal.close()
    sight = await asyncio.to_thread(read_finished, entry, SYSTEM_CLOCK)
    found = overview_of(sight)
    assert (found.summary.state, found.summary.step, found.journal_length) == ("finished", 5, length)
    assert [step.step for step in sight.history.steps] == list(range(5))
    assert line_of(sight.records(length - 1, length)[0]).kind == "StepSealed"
    assert found.merges[-1].sealed


async def test_queued_finished_and_unknown_runs_of_a_registry(tmp_path):
    from types import SimpleNamespace

    from lead_cases import submission
    from long_run import LongRun

    from subnet.errors import NotFound
    from subnet.timing import SYSTEM_CLOCK
    from validator.journal_store import JournalStore
    from validator.page_desk import desk_of
    from validator.run_registry import RunRegistry

    registry = RunRegistry(tmp_path)
    past, queued = registry.add("owner", submission("past")), registry.add("owner", submission("next"))
    journal = JournalStore(past.journal_path)
    for record in LongRun(steps=3).stream(10_000):
        journal.stage(record.event, record.time_ns)
    await journal.commit()
    journal.close()
    registry.finish(past)
    side = SimpleNamespace(weights_said="")
    node = SimpleNamespace(registry=registry, session=None, side=side, score_desk=None, clock=SYSTEM_CLOCK)
    node.runs = lambda: tuple(entry.summary(registry.place_of(entry.name)) for entry in registry.entries.values())
    desk = desk_of(node)  # type: ignore[arg-type]
    sight = await desk.sight("past")
    assert (await desk.sight("past")) is sight
    assert (desk.overview(sight).summary.state, desk.history(sight, 10, 0, 99).step) == ("finished", [0, 1, 2])
    assert (await desk.journal(sight, None, 5, "stepsealed")).lines[0].kind == "StepSealed"
    waiting = desk.overview(await desk.sight("next"))
    assert (waiting.summary.state, waiting.num_members, waiting.journal_length) == ("queued", 0, 0)
    assert len(waiting.facts.stages) == len(queued.plan.cuts)
    with pytest.raises(NotFound, match="other"):
        await desk.sight("other")
