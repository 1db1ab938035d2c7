"""``iota miner status``: what each miner of this machine does or waits for, from its own files and, while it runs, its page."""

from __future__ import annotations

import time
import urllib.error
import urllib.request

import msgspec

from iota.home.places import Miner
from iota.home.service import Unit
from miner.claim import running
from miner.told import Told, in_words, read_told
from subnet.errors import NotFound, Unreachable

PAGE_S = 5.0
LIMIT_BYTES = 1 << 20


class Doing(msgspec.Struct, frozen=True, kw_only=True):
    """Of a running miner, from its page; empty where it has none."""

    state: str = ""
    waiting_for: str = ""
    run: str = ""
    stage: int | None = None
    step: int = 0


class MinerStatus(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    settings: str
    directory: str
    hotkey: str
    process: int | None
    starts_by_itself: bool
    doing: Doing | None
    told: Told | None
    """What it was told when it asked to be let in last; kept over restarts."""


class _Part(msgspec.Struct):
    run: str
    stage: int | None
    step: int


class _View(msgspec.Struct):
    state: str
    waiting_for: str
    part: _Part | None = None


def status_of(miner: Miner, unit: Unit) -> MinerStatus:
    process = running(miner.directory)
    name, hotkey, _ = miner.wallet
    return MinerStatus(
        name=miner.name,
        settings=str(miner.path),
        directory=str(miner.directory),
        hotkey=f"{name}/{hotkey}",
        process=process,
        starts_by_itself=unit.installed(miner.name),
        doing=_doing(miner) if process is not None else None,
        told=read_told(miner.directory),
    )


def _doing(miner: Miner) -> Doing | None:
    if not miner.page_port:
        return None
    try:
        view = msgspec.json.decode(page_answer(miner.page_port, "/v1/miner"), type=_View)
    except (Unreachable, NotFound, msgspec.MsgspecError):
        return None
    part = view.part
    if part is None:
        return Doing(state=view.state, waiting_for=view.waiting_for)
    return Doing(state=view.state, waiting_for=view.waiting_for, run=part.run, stage=part.stage, step=part.step)


def page_answer(port: int, path: str) -> bytes:
    """JSON of a miner's page on this machine; :class:`Unreachable` where none answers."""
    url = f"http://127.0.0.1:{port}"
    try:
        with urllib.request.urlopen(f"{url}{path}", timeout=PAGE_S) as answer:
            return answer.read(LIMIT_BYTES)
    except urllib.error.HTTPError as error:
        raise NotFound(f"{url}{path} answers {error.code}", hint="is it a miner's page?") from error
    except (OSError, ValueError) as error:
        raise Unreachable(f"no miner's page at {url}: {error}", hint="start it with --page.port") from error


def words(status: MinerStatus, now_s: float | None = None) -> list[str]:
    """Lines for people."""
    now_s = time.time() if now_s is None else now_s
    runs = "not running" if status.process is None else f"runs (process {status.process})"
    by_itself = ", starts by itself" if status.starts_by_itself else ""
    lines = [f"{status.name}: {runs}{by_itself}; hotkey {status.hotkey}"]
    doing = status.doing
    if doing is not None:
        where = f" · run {doing.run}" if doing.run else ""
        where += f", stage {doing.stage}, step {doing.step}" if doing.stage is not None else ""
        lines.append(f"  {doing.state}{where}" + (f": waits for {doing.waiting_for}" if doing.waiting_for else ""))
    if status.told is not None:
        lines.append(f"  {in_words(status.told, now_s)}")
    lines.append(f"  settings {status.settings} · directory {status.directory}")
    return lines
