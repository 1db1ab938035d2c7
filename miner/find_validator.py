"""Which validator a miner works for, at the start and after the one it had is gone.

At the start: the first that leads a run, of the URLs it was given, else (or when none of them answers for long) of the permit
holders with a served address, most stake first. Later: whoever leads the same run in a higher term. Always one whose hotkey
holds a permit on the chain.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Container, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from loguru import logger

from miner.settings import MinerSettings
from subnet.chain.base import Chain, Metagraph
from subnet.chain.connect import register_command
from subnet.errors import ConfigError, IotaError, NotFound, Unreachable, VersionUnsupported
from subnet.net.border import os_reason
from subnet.net.client import SignedClient
from subnet.protocol.messages import Hello
from subnet.protocol.signing import Signer
from subnet.protocol.versions import agree
from subnet.timing import TIMEOUTS, Backoff, Deadline

METAGRAPH_EVERY_S = 5.0
MAX_ASKED = 64
"""Validators that are asked at a time."""


@dataclass(frozen=True)
class ValidatorAddress:
    """``hotkey`` empty: whoever answers there, if it holds a permit."""

    url: str
    hotkey: str = ""


@dataclass(frozen=True)
class Answered:
    """A validator that may lead: its client is bound to its hotkey, its clock is learnt."""

    client: SignedClient
    hello: Hello


def addresses(metagraph: Metagraph, settings: MinerSettings, *, everywhere: bool = False) -> list[ValidatorAddress]:
    """Whom to ask, in order: the URLs given; without any, or ``everywhere``, permit holders with a served address."""
    given = [ValidatorAddress(url, settings.validator_hotkey or "") for url in settings.urls]
    if given and not everywhere:
        return given
    found = [
        ValidatorAddress(f"http://{neuron.axon.host}:{neuron.axon.port}", neuron.hotkey)
        for neuron in metagraph.permit_holders()
        if neuron.axon is not None and settings.validator_hotkey in (None, neuron.hotkey)
    ]
    urls = {address.url for address in given}
    return [*given, *(address for address in found if address.url not in urls)][:MAX_ASKED]


async def say_hello(url: str, signer: Signer, answer_s: float = TIMEOUTS.http_request_s) -> Answered:
    """A client bound to the hotkey that hello names, with its clock learnt."""
    client = SignedClient(url, signer)
    try:
        await _connectable(client.base_url, answer_s)
        hello = await client.request("GET", "/v1/hello", None, Hello, deadline=Deadline.after(answer_s), signed=False)
        agree(hello.protocol_min, hello.protocol_max, url)
        client.receiver = hello.hotkey
        client.learn_clock(hello.time_ns)
    except BaseException:
        await client.close()
        raise
    return Answered(client, hello)


async def _connectable(base_url: str, within_s: float) -> None:
    """:class:`Unreachable` at once where nobody listens; a request would try again until its deadline."""
    url = urlsplit(base_url)
    try:
        async with asyncio.timeout(within_s):
            _, writer = await asyncio.open_connection(url.hostname, url.port or (443 if url.scheme == "https" else 80))
            writer.close()
    except (OSError, TimeoutError) as error:
        late = isinstance(error, TimeoutError)  # which is an OSError too
        reason = f"no connection within {within_s:g} s" if late else os_reason(error)
        raise Unreachable(f"{base_url}: {reason}") from error


async def ask(address: ValidatorAddress, metagraph: Metagraph, signer: Signer) -> Answered:
    """Hello, and whether who answers is who is meant and may lead."""
    found = await say_hello(address.url, signer, TIMEOUTS.hello_s)
    hotkey = found.hello.hotkey
    neuron = metagraph.neuron(hotkey)
    error: IotaError | None = None
    if address.hotkey and hotkey != address.hotkey:
        error = ConfigError(
            f"{address.url} answers as {hotkey}, not {address.hotkey}",
            hint="check --validator.url and --validator.hotkey, or what the chain says of it",
        )
    elif neuron is None or not neuron.validator_permit:
        error = NotFound(f"{hotkey} at {address.url} holds no validator permit (yet)")
    if error is not None:
        await found.client.close()
        raise error
    return found


async def ask_all(
    wanted: Sequence[ValidatorAddress], metagraph: Metagraph, signer: Signer
) -> tuple[list[Answered], list[IotaError]]:
    """Everybody at once: who answered, in the order asked, and why the others didn't."""
    found: list[Answered] = []
    errors: list[IotaError] = []
    asked = (ask(address, metagraph, signer) for address in wanted)
    others: list[BaseException] = []
    for answer in await asyncio.gather(*asked, return_exceptions=True):
        if isinstance(answer, Answered):
            found.append(answer)
        elif isinstance(answer, IotaError):
            errors.append(answer)
        else:
            others.append(answer)
    if others:
        await close_but(found)
        raise others[0]
    return found, errors


async def close_but(found: Sequence[Answered], kept: Answered | None = None) -> None:
    for answered in found:
        if answered is not kept:
            await answered.client.close()


class ValidatorFinder:
    """Asks the chain and the validators; reads the metagraph at most every ``METAGRAPH_EVERY_S``.

    Whoever took over is asked first from then on: the URLs given may be those of the one that is gone.
    """

    def __init__(
        self,
        settings: MinerSettings,
        signer: Signer,
        chain: Chain,
        on_wait: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self._settings, self._signer, self._chain = settings, signer, chain
        self._on_wait = on_wait
        self._metagraph: Metagraph | None = None
        self._read_at_s = 0.0
        self._successor: ValidatorAddress | None = None

    async def find(self, done: Container[str] = ()) -> Answered:
        """Until a validator leads a run that isn't ``done``; a mistake of the operator's ends it, the rest is retried."""
        backoff, said, now = Backoff(0.1, 2.0), "", asyncio.get_running_loop().time
        heard_s = now()
        while True:
            try:
                metagraph = await self._read_metagraph()
                everywhere = now() - heard_s >= TIMEOUTS.validator_lost_s
                wanted = self._wanted(metagraph, everywhere=everywhere)
                if not wanted:
                    raise NotFound(
                        "no validator with a permit has announced an address on the chain",
                        hint="or set --validator.url",
                    )
                answered, waits = await self._first_with_run(wanted, metagraph, done)
                if answered is not None:
                    return answered
                reason, heard_s = f"waiting for {waits}", now()
            except (ConfigError, VersionUnsupported):
                raise
            except IotaError as error:
                reason = f"no validator yet: {error}"
            self._on_wait(reason)
            if reason != said:
                said = reason
                logger.info(reason)
            await asyncio.sleep(backoff.next_s())

    async def _first_with_run(
        self, wanted: Sequence[ValidatorAddress], metagraph: Metagraph, done: Container[str]
    ) -> tuple[Answered | None, str]:
        """The first in order that leads a run; else what the first that answers waits for. Raises where nobody answers."""
        waits, errors = "", list[IotaError]()
        for part in (wanted[:1], wanted[1:]):  # most often the first will do: the others aren't bothered
            found, refused = await ask_all(part, metagraph, self._signer)
            best = next((a for a in found if a.hello.run is not None and a.hello.run not in done), None)
            await close_but(found, best)
            if best is not None:
                return best, ""
            errors += refused
            waits = waits or next((answered.hello.waiting_for or "the next run" for answered in found), "")
        if waits:
            return None, waits
        if [address.url for address in wanted] != list(
            self._settings.urls[:1]
        ):  # a foreign server at one of several addresses isn't the operator's mistake
            raise NotFound("; ".join(str(error) for error in errors[:3]))
        raise errors[0]

    async def find_successor(self, run: str, term: int, *, done: Container[str], any_run: bool) -> Answered | None:
        """Who leads ``run`` in a later term than ``term``, whoever has most; with ``any_run`` else who leads another run."""
        metagraph = await self._read_metagraph()
        found, errors = await ask_all(self._wanted(metagraph, everywhere=True), metagraph, self._signer)
        for error in errors:
            logger.debug("hello: {}", error)
        later = [answered for answered in found if answered.hello.run == run and answered.hello.term > term]
        best = max(later, key=lambda answered: answered.hello.term, default=None)
        if best is None and any_run:
            others = (a for a in found if a.hello.term and a.hello.run not in (None, run) and a.hello.run not in done)
            best = next(others, None)
        await close_but(found, best)
        if best is not None:
            self._successor = ValidatorAddress(best.client.base_url, best.hello.hotkey)
        return best

    def _wanted(self, metagraph: Metagraph, *, everywhere: bool) -> list[ValidatorAddress]:
        first = [self._successor] if self._successor is not None else []
        others = addresses(metagraph, self._settings, everywhere=everywhere)
        return [*first, *(address for address in others if address.url not in {it.url for it in first})]

    async def _read_metagraph(self) -> Metagraph:
        now_s = asyncio.get_running_loop().time()
        if self._metagraph is None or now_s - self._read_at_s >= METAGRAPH_EVERY_S:
            self._metagraph = await self._chain.metagraph(self._settings.netuid)
            self._read_at_s = now_s
            self._check_registered(self._metagraph)
        return self._metagraph

    def _check_registered(self, metagraph: Metagraph) -> None:
        settings = self._settings
        if metagraph.neuron(self._signer.hotkey) is None:
            raise ConfigError(
                f"hotkey {self._signer.hotkey} isn't registered on subnet {settings.netuid}",
                hint=register_command(
                    settings.chain,
                    settings.chain_endpoint,
                    settings.netuid,
                    settings.wallet_name,
                    settings.wallet_hotkey,
                    str(settings.wallet_path),
                ),
            )


async def still_leads(client: SignedClient, signer: Signer, run: str, term: int) -> bool:
    """Whether the validator at the client's address answers, is the one it was, and leads (or is about to lead) the run."""
    try:
        found = await say_hello(client.base_url, signer, TIMEOUTS.hello_s)
    except IotaError as error:
        logger.debug("hello: {}", error)
        return False
    await found.client.close()
    hello = found.hello
    return hello.hotkey == client.receiver and hello.run == run and (hello.term == 0 or hello.term >= term)


@dataclass(frozen=True)
class LossWatch:
    """Notices that the validator is lost and looks for its successor; every look outward is a function, for tests."""

    streaming: Callable[[], bool]
    """Whether the directive stream is open."""
    answers: Callable[[], Awaitable[bool]]
    """Whether the validator still leads the run."""
    successor: Callable[[bool], Awaitable[Answered | None]]
    """Who leads now; with True also who leads another run."""
    lost_s: float = TIMEOUTS.validator_lost_s
    given_up_s: float = TIMEOUTS.validator_given_up_s
    poll_s: float = 1.0

    async def run(self) -> Answered:
        """Returns only with a successor. A validator that comes back before there is one is as good as never lost."""
        now = asyncio.get_running_loop().time
        heard_s, lost, backoff = now(), False, Backoff(self.poll_s, 5 * self.poll_s)
        while True:
            await asyncio.sleep(backoff.next_s() if lost else self.poll_s)
            if self.streaming():
                heard_s, lost = now(), False
                continue
            if now() - heard_s < self.lost_s:
                continue
            if await self.answers():
                if lost:
                    logger.info("the validator answers again")
                heard_s, lost = now(), False
                continue
            if not lost:
                lost = True
                backoff.reset()
                logger.warning("the validator is silent for {:.0f} s: looking for another leader", now() - heard_s)
            try:
                found = await self.successor(now() - heard_s >= self.given_up_s)
            except (ConfigError, VersionUnsupported):
                raise
            except IotaError as error:
                logger.debug("no other leader: {}", error)
                continue
            if found is not None:
                return found
