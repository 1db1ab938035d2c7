"""A miner goes to who leads its run: a later term with a permit, never an older or an equal one, and back if it comes back."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest
from aiohttp import web

from miner.find_validator import Answered, LossWatch, ValidatorFinder, addresses, say_hello, still_leads
from miner.node import first_of
from miner.settings import MinerSettings
from subnet.chain.base import Axon, Metagraph, Neuron
from subnet.errors import ConfigError, Unreachable
from subnet.net.border import Listener, listen
from subnet.net.client import SignedClient
from subnet.net.http import Call, Route, answer, create_app
from subnet.protocol.messages import Hello
from subnet.protocol.signing import RequestVerifier, Signer
from subnet.timing import SYSTEM_CLOCK, TIMEOUTS
from subnet.words import PROTOCOL_VERSION

ME = Signer.from_uri("//Miner")
ONE, TWO, THREE = (Signer.from_uri(f"//V{number}") for number in range(3))


@dataclass
class Validators:
    """Servers that say hello, and the chain that names them."""

    listeners: dict[str, Listener] = field(default_factory=dict)
    says: dict[str, Hello] = field(default_factory=dict)
    permits: set[str] = field(default_factory=set)
    num_asked: dict[str, int] = field(default_factory=dict)

    async def add(self, signer: Signer, run: str | None, term: int, *, permit: bool = True) -> str:
        async def hello(call: Call) -> web.StreamResponse:
            self.num_asked[signer.hotkey] = self.num_asked.get(signer.hotkey, 0) + 1
            return answer(self.says[signer.hotkey])

        self.say(signer, run, term)
        if permit:
            self.permits.add(signer.hotkey)
        app = create_app(
            [Route("GET", "/v1/hello", hello, signed=False)], RequestVerifier(signer.hotkey, is_known=lambda _: False)
        )
        self.listeners[signer.hotkey] = await listen(app, "127.0.0.1", 0)
        return self.listeners[signer.hotkey].url

    def say(self, signer: Signer, run: str | None, term: int) -> None:
        now_ns = SYSTEM_CLOCK.wall_ns()
        self.says[signer.hotkey] = Hello(
            PROTOCOL_VERSION, PROTOCOL_VERSION, now_ns, signer.hotkey, term, 0, run, "a run"
        )

    async def end(self, signer: Signer) -> None:
        await self.listeners.pop(signer.hotkey).close()

    async def metagraph(self, netuid: int, **_: object) -> Metagraph:
        def neuron(uid: int, hotkey: str, axon: Axon | None) -> Neuron:
            return Neuron(
                uid=uid,
                hotkey=hotkey,
                coldkey="c",
                stake=100.0 - uid,
                validator_permit=hotkey in self.permits,
                last_update=0,
                registered_at_block=0,
                axon=axon,
            )

        served = [(hotkey, Axon(it.host, it.port)) for hotkey, it in self.listeners.items()]
        neurons = [neuron(uid, hotkey, axon) for uid, (hotkey, axon) in enumerate([*served, (ME.hotkey, None)])]
        return Metagraph(netuid=netuid, block=1, tempo=20, owner_hotkey="", neurons=tuple(neurons))

    def finder(self, **settings: object) -> ValidatorFinder:
        return ValidatorFinder(MinerSettings(**settings), ME, self)  # type: ignore[arg-type]


@asynccontextmanager
async def validators() -> AsyncIterator[Validators]:
    made = Validators()
    try:
        yield made
    finally:
        for listener in made.listeners.values():
            await listener.close()


async def hotkey_of(found: Awaitable[Answered | None]) -> str | None:
    answered = await found
    if answered is None:
        return None
    await answered.client.close()
    assert answered.client.receiver == answered.hello.hotkey
    return answered.hello.hotkey


# --- at the start --------------------------------------------------------------------------------------------------


async def test_the_first_by_stake_that_leads_a_run() -> None:
    async with validators() as there:
        await there.add(ONE, "run", 1)
        await there.add(TWO, "run", 2)
        assert await hotkey_of(there.finder().find()) == ONE.hotkey
        assert TWO.hotkey not in there.num_asked  # the others aren't bothered
        assert await hotkey_of(there.finder(validator_hotkey=TWO.hotkey).find()) == TWO.hotkey
        there.say(ONE, None, 0)
        assert await hotkey_of(there.finder().find()) == TWO.hotkey
        there.say(ONE, "done", 1)
        assert await hotkey_of(there.finder().find({"done"})) == TWO.hotkey
        await there.end(ONE)
        assert await hotkey_of(there.finder().find()) == TWO.hotkey


async def test_urls_are_asked_in_their_order() -> None:
    async with validators() as there:
        dead = await there.add(ONE, "run", 1)
        second, third = await there.add(TWO, "run", 1), await there.add(THREE, "run", 1)
        await there.end(ONE)
        finder = there.finder(validator_url=dead, more_validator_urls=(third, second))
        assert await hotkey_of(finder.find()) == THREE.hotkey
        assert MinerSettings(validator_url=dead, more_validator_urls=(dead, third)).urls == (dead, third)
        assert MinerSettings().urls == ()


async def test_a_mistake_of_the_operators_ends_the_search() -> None:
    async with validators() as there:
        url = await there.add(ONE, "run", 1)
        with pytest.raises(ConfigError, match="answers as"):
            await there.finder(validator_url=url, validator_hotkey=TWO.hotkey).find()
        stranger = ValidatorFinder(MinerSettings(), Signer.from_uri("//Stranger"), there)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="isn't registered"):
            await stranger.find()


async def test_who_holds_no_permit_is_waited_for() -> None:
    async with validators() as there:
        url = await there.add(ONE, "run", 1, permit=False)
        search = asyncio.create_task(there.finder(validator_url=url).find())
        while there.num_asked.get(ONE.hotkey, 0) < 2:
            await asyncio.sleep(0.01)
        assert not search.done()
        search.cancel()
        await asyncio.wait({search})


async def test_addresses_of_the_chain_come_after_those_given() -> None:
    async with validators() as there:
        await there.add(ONE, "run", 1)
        url = await there.add(TWO, "run", 1)
        metagraph, settings = await there.metagraph(1), MinerSettings(validator_url=url)
        assert [a.url for a in addresses(metagraph, settings)] == [url]
        assert [a.url for a in addresses(metagraph, settings, everywhere=True)] == [
            url,
            there.listeners[ONE.hotkey].url,
        ]


async def test_the_chain_is_asked_when_no_url_given_has_answered_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A miner that is started again with the address of a validator that is gone."""
    async with validators() as there:
        dead = await there.add(ONE, "run", 1)
        await there.add(TWO, "run", 2)
        await there.end(ONE)
        search = asyncio.create_task(there.finder(validator_url=dead).find())
        await asyncio.sleep(0.05)
        assert not search.done()
        search.cancel()
        await asyncio.wait({search})
        monkeypatch.setattr("miner.find_validator.TIMEOUTS", replace(TIMEOUTS, validator_lost_s=0.01))
        assert await hotkey_of(there.finder(validator_url=dead).find()) == TWO.hotkey


async def test_a_silent_address_is_no_answer() -> None:
    with pytest.raises(Unreachable, match="refused"):
        await say_hello("http://127.0.0.1:9", ME, 1.0)
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(1)
        with pytest.raises(Unreachable):
            await say_hello(f"http://127.0.0.1:{deaf.getsockname()[1]}", ME, 0.05)


# --- after a loss --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("run", "term", "permit", "followed"),
    [
        ("run", 3, True, True),
        ("run", 2, True, False),
        ("run", 1, True, False),
        ("run", 0, True, False),
        ("run", 3, False, False),
        ("other", 3, True, False),
        (None, 0, True, False),
    ],
)
async def test_only_a_later_term_of_the_same_run_is_followed(
    run: str | None, term: int, permit: bool, followed: bool
) -> None:
    async with validators() as there:
        await there.add(TWO, run, term, permit=permit)
        found = there.finder(validator_url="http://127.0.0.1:9").find_successor("run", 2, done=(), any_run=False)
        assert await hotkey_of(found) == (TWO.hotkey if followed else None)


async def test_the_latest_term_is_followed_and_another_run_only_at_last() -> None:
    async with validators() as there:
        await there.add(ONE, "next", 1)
        await there.add(TWO, "run", 3)
        await there.add(THREE, "run", 4)
        find = there.finder().find_successor
        assert await hotkey_of(find("run", 2, done=(), any_run=True)) == THREE.hotkey
        assert await hotkey_of(find("run", 4, done=(), any_run=False)) is None
        assert await hotkey_of(find("run", 4, done=(), any_run=True)) == ONE.hotkey
        assert await hotkey_of(find("run", 4, done={"next"}, any_run=True)) is None


async def test_who_took_over_is_asked_first_from_then_on() -> None:
    async with validators() as there:
        dead = await there.add(ONE, "run", 1)
        finder = there.finder(validator_url=dead)
        await there.end(ONE)
        await there.add(TWO, "run", 2)
        assert await hotkey_of(finder.find_successor("run", 1, done=(), any_run=False)) == TWO.hotkey
        there.say(TWO, "next", 1)
        assert await hotkey_of(finder.find({"run"})) == TWO.hotkey


async def test_whether_it_still_leads() -> None:
    async with validators() as there:
        url = await there.add(ONE, "run", 2)
        client = SignedClient(url, ME, ONE.hotkey)
        assert await still_leads(client, ME, "run", 2)
        assert not await still_leads(client, ME, "run", 3)  # an older leader that woke up
        assert not await still_leads(client, ME, "other", 2)
        client.receiver = TWO.hotkey
        assert not await still_leads(client, ME, "run", 2)  # another took its address
        client.receiver = ONE.hotkey
        there.say(ONE, "run", 0)
        assert await still_leads(client, ME, "run", 2)  # it has just started again
        await there.end(ONE)
        assert not await still_leads(client, ME, "run", 2)
        await client.close()


class Scene:
    """What a loss watch sees, look by look: (streaming, answers, successor)."""

    def __init__(self, *looks: tuple[bool, bool, object]) -> None:
        self.looks = list(looks)
        self.num_searches = 0

    def watch(self, given_up_s: float = 1e9) -> LossWatch:
        return LossWatch(self.streaming, self.answers, self.successor, lost_s=0.0, given_up_s=given_up_s, poll_s=0.001)

    def streaming(self) -> bool:
        self.now = self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]
        return self.now[0]

    async def answers(self) -> bool:
        return self.now[1]

    async def successor(self, any_run: bool) -> Answered | None:
        self.num_searches += 1
        self.any_run = any_run
        found = self.now[2]
        if isinstance(found, Exception):
            raise found
        return found  # type: ignore[return-value]


FOUND = Answered(None, None)  # type: ignore[arg-type]


async def test_a_lost_validator_is_looked_for_until_there_is_a_successor() -> None:
    searches = [(False, False, None), (False, False, Unreachable("chain")), (False, False, FOUND)]
    scene = Scene((True, False, FOUND), (False, True, FOUND), *searches)
    assert await scene.watch().run() is FOUND
    assert scene.num_searches == 3  # never while it streams or answers
    assert not scene.any_run


async def test_one_that_comes_back_is_not_left() -> None:
    scene = Scene((False, False, None), (False, True, FOUND), (True, False, FOUND))
    task = asyncio.create_task(scene.watch().run())
    while len(scene.looks) > 1 or scene.num_searches < 1:
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.01)
    assert not task.done()
    assert scene.num_searches == 1
    task.cancel()
    await asyncio.wait({task})


async def test_after_a_long_time_any_run_will_do() -> None:
    scene = Scene((False, False, FOUND))
    assert await scene.watch(given_up_s=0.0).run() is FOUND
    assert scene.any_run


async def test_a_mistake_in_the_search_is_not_swallowed() -> None:
    with pytest.raises(ConfigError):
        await Scene((False, False, ConfigError("deregistered"))).watch().run()


# --- leaving off ---------------------------------------------------------------------------------------------------


async def forever(ended: list[str]) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        ended.append("cleaned up")


async def returns(value: object = None) -> object:
    return value


async def fails(*_: object) -> None:
    raise Unreachable("broken")


async def test_the_work_has_cleaned_up_before_the_successor_is_followed() -> None:
    ended: list[str] = []
    assert await first_of(forever(ended), returns(FOUND)) is FOUND  # type: ignore[arg-type]
    assert ended == ["cleaned up"]
    assert await first_of(returns(), forever(ended)) is None  # type: ignore[arg-type]
    assert len(ended) == 2


@pytest.mark.parametrize("pair", [lambda e: (fails(), forever(e)), lambda e: (forever(e), fails())])
async def test_errors_pass(pair: Callable[[list[str]], tuple]) -> None:
    ended: list[str] = []
    with pytest.raises(Unreachable, match="broken"):
        await first_of(*pair(ended))
    assert ended == ["cleaned up"]


# --- flags ---------------------------------------------------------------------------------------------------------


def test_urls_of_validators_as_flags() -> None:
    from neurons.miner import build_parser, settings_from

    urls = ["http://a:1", "http://b:2", "http://c:3"]
    flags = ["--validator.url", *urls[:2], "--validator.url", urls[2]]
    assert settings_from(build_parser().parse_args(flags)).urls == tuple(urls)
    assert settings_from(build_parser().parse_args(["--validator.url", urls[0]])).validator_url == urls[0]
    assert settings_from(build_parser().parse_args([])).urls == ()


def test_lead_from_as_a_flag() -> None:
    from neurons.validator import build_parser, settings_from

    def settings(*flags: str):
        return settings_from(build_parser().parse_args(flags))

    plain = settings()
    assert (plain.lead_from, plain.store_url) == (False, "http://127.0.0.1:9945")
    lead = settings("--lead-from", "http://s:1", "--lead-run", "a", "--lead-run", "b")
    assert (lead.lead_from, lead.store_url, lead.lead_runs) == (True, "http://s:1", ("a", "b"))
    assert settings("--lead-from", "http://s:1/", "--store.url", "http://s:1").lead_from
    with pytest.raises(ConfigError, match="differ"):
        settings("--lead-from", "http://s:1", "--store.url", "http://s:2")
    with pytest.raises(ConfigError, match="no effect"):
        settings("--lead-run", "a")
