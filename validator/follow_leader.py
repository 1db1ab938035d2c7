"""What a follower says to the validator that leads a run: which evidence its seed wants opened, what its replays gave.

Where the leader is to be had comes from the chain alone. A refusal is told apart from silence: the first is the leader's word
and noted against it, the second is waited out.
"""

from __future__ import annotations

from collections.abc import Callable

from subnet.chain.base import Metagraph
from subnet.errors import NotFound, Refused
from subnet.net.client import SignedClient
from subnet.protocol.audit_api import Accepted, AuditsRequest, WitnessRequest
from subnet.protocol.messages import Hello
from subnet.protocol.signing import Signer
from subnet.timing import TIMEOUTS, Deadline


class LeaderLine:
    """Signed requests to whoever leads, one client at a time."""

    def __init__(self, signer: Signer, metagraph: Callable[[], Metagraph | None]) -> None:
        self._signer, self._metagraph = signer, metagraph
        self._client: SignedClient | None = None

    async def ask_audit(self, leader: str, request: AuditsRequest) -> None:
        """:class:`Refused` where the leader says no; retryable errors where it can't be asked now."""
        await self._post(leader, "/v1/audits", request)

    async def testify(self, leader: str, request: WitnessRequest) -> None:
        await self._post(leader, "/v1/witness", request)

    async def _post(self, leader: str, path: str, body: AuditsRequest | WitnessRequest) -> None:
        deadline = Deadline.after(TIMEOUTS.http_request_s)
        try:
            client = await self._connected(leader, deadline)
            await client.request("POST", path, body, Accepted, deadline=deadline)
        except Refused:
            raise
        except BaseException:
            await self.close()
            raise

    async def _connected(self, leader: str, deadline: Deadline) -> SignedClient:
        metagraph = self._metagraph()
        neuron = metagraph.neuron(leader) if metagraph is not None else None
        if neuron is None or neuron.axon is None:
            raise NotFound(f"the chain has no address of {leader}, which leads")
        url = f"http://{neuron.axon.host}:{neuron.axon.port}"
        if self._client is not None and (self._client.base_url, self._client.receiver) == (url, leader):
            return self._client
        await self.close()
        client = SignedClient(url, self._signer, leader)
        try:
            hello = await client.request("GET", "/v1/hello", None, Hello, deadline=deadline, signed=False)
            if hello.hotkey != leader:
                raise NotFound(f"{url} answers as {hello.hotkey}, not as {leader}, which leads")
            client.learn_clock(hello.time_ns)
        except BaseException:
            await client.close()
            raise
        self._client = client
        return client

    async def close(self) -> None:
        if self._client is not None:
            client, self._client = self._client, None
            await client.close()
