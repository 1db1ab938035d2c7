"""Whether other miners can reach this one: the validator is asked to try, and the log says what it found and what to do."""

from __future__ import annotations

import msgspec
from loguru import logger

from subnet.errors import IotaError
from subnet.net.client import SignedClient
from subnet.protocol.reach import ReachAnswer, ReachRequest
from subnet.timing import TIMEOUTS, Deadline
from subnet.words import PROTOCOL_VERSION

_REMEDIES = {
    "refused": "open port {port} (TCP) and forward it to this machine, or name another one: --peer.announce_port",
    "no_answer": "open port {port} (TCP) in router and firewall, or name another one: --peer.announce_port",
    "other_hotkey": "something else listens there: see --peer.host and --peer.announce_port",
    "not_public": "say which address others reach this machine at: --peer.host {source}",
    "unknown_host": "--peer.host must be an address or a name that others can resolve",
}


class Finding(msgspec.Struct, frozen=True):
    """``known`` False: nobody could be asked, so it is assumed."""

    reachable: bool
    known: bool
    text: str


async def find_reach(client: SignedClient, host: str, port: int) -> Finding:
    """Ask the validator; one that can't say leaves it assumed."""
    request = ReachRequest(PROTOCOL_VERSION, host, port)
    deadline = Deadline.after(TIMEOUTS.peer_connect_s + TIMEOUTS.http_request_s / 2)
    try:
        answer = await client.request("POST", "/v1/reach", request, ReachAnswer, deadline=deadline)
    except IotaError as error:
        finding = Finding(True, False, f"nobody says whether others reach {host}:{port}: {error}")
        logger.info(finding.text)
        return finding
    finding = found(answer, host, port)
    logger.log("INFO" if finding.reachable else "WARNING", finding.text)
    return finding


def found(answer: ReachAnswer, host: str, port: int) -> Finding:
    if answer.reachable:
        return Finding(True, True, f"reachable at {host}:{port}")
    remedy = _REMEDIES.get(answer.code, "see --peer.host and --peer.port").format(port=port, source=answer.source[:64])
    reason = answer.reason[:300]
    return Finding(False, True, f"not reachable at {host}:{port}: {reason}; {remedy}; until then through the store")
