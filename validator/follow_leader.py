"""What a follower says to the validator that leads a run: which evidence its seed wants opened, what its replays gave.

Where the leader is to be had comes from the chain alone. A refusal is told apart from silence: the first is the leader's word
and noted against it, the second is waited out. Each request has a connection of its own: they are few, and independent.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from urllib.parse import quote

from subnet.chain.base import Metagraph
from subnet.errors import NotFound
from subnet.net.client import SignedClient
from subnet.protocol.api import RunStatus
from subnet.protocol.audit_api import Accepted, AuditsRequest, WitnessRequest
from subnet.protocol.messages import Hello
from subnet.protocol.signing import Signer
from subnet.timing import TIMEOUTS, Deadline

MAX_PARALLEL = 4
LIMIT_ANSWER_BYTES = 8 << 20


class LeaderLine:
    """Requests to whoever leads; ``metagraph``: as it is now."""

    def __init__(self, signer: Signer, metagraph: Callable[[], Metagraph | None]) -> None:
        self._signer, self._metagraph = signer, metagraph
        self._slots = asyncio.Semaphore(MAX_PARALLEL)

    async def ask_audit(self, leader: str, request: AuditsRequest) -> None:
        """:class:`Refused` where the leader says no; retryable errors where it can't be asked now."""
        await self._post(leader, "/v1/audits", request)

    async def testify(self, leader: str, request: WitnessRequest) -> None:
        await self._post(leader, "/v1/witness", request)

    async def step_of(self, leader: str, run: str) -> int:
        """The step that the leader says its run is at: nothing is signed, and nothing is proven by it."""
        async with self._connected(leader) as (client, deadline):
            path = f"/v1/status?steps=0&run={quote(run, safe='')}"
            status: RunStatus = await client.request("GET", path, None, RunStatus, deadline=deadline, signed=False)
            return status.summary.step

    async def _post(self, leader: str, path: str, body: AuditsRequest | WitnessRequest) -> None:
        async with self._connected(leader) as (client, deadline):
            await client.request("POST", path, body, Accepted, deadline=deadline)

    @asynccontextmanager
    async def _connected(self, leader: str) -> AsyncGenerator[tuple[SignedClient, Deadline]]:
        metagraph = self._metagraph()
        neuron = metagraph.neuron(leader) if metagraph is not None else None
        if neuron is None or neuron.axon is None:
            raise NotFound(f"the chain has no address of {leader}, which leads")
        url = f"http://{neuron.axon.host}:{neuron.axon.port}"
        client = SignedClient(url, self._signer, leader, answer_limit_bytes=LIMIT_ANSWER_BYTES)
        async with self._slots, client:
            deadline = Deadline.after(TIMEOUTS.http_request_s)
            hello = await client.request("GET", "/v1/hello", None, Hello, deadline=deadline, signed=False)
            if hello.hotkey != leader:
                raise NotFound(f"{url} answers as {hello.hotkey}, not as {leader}, which leads")
            client.learn_clock(hello.time_ns)
            yield client, deadline
