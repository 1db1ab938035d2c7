"""A hotkey that sends signed requests as fast as they are answered, on several connections; prints what came of them.

python -m benchmarks.flood HOST PORT RECEIVER URI [SECONDS]
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
import time
from collections import Counter

from benchmarks.fleet_wire import Poster, request_bytes
from subnet.protocol import messages as msg
from subnet.protocol import wire
from subnet.protocol.signing import Signer
from subnet.words import PROTOCOL_VERSION

CONNECTIONS = 8
BODY = wire.encode(msg.Heartbeat(PROTOCOL_VERSION, "nobody", 1))


class Flood:
    def __init__(self, host: str, port: int, receiver: str, signer: Signer) -> None:
        self._host, self._port, self._receiver, self._signer = host, port, receiver, signer
        self.statuses: Counter[int] = Counter()
        self.codes: Counter[str] = Counter()
        self.retry_after_s = 0.0

    async def connection(self) -> None:
        """For ever: opened again whenever it is closed."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                _, poster = await loop.create_connection(Poster, self._host, self._port)
            except OSError:
                await asyncio.sleep(0.1)
                continue
            while poster.is_open:
                data = request_bytes(self._signer, self._receiver, "POST", "/v1/heartbeat", BODY)
                answer: asyncio.Future[tuple[int, bytes]] = loop.create_future()
                poster.send(data, lambda status, body, answer=answer: answer.set_result((status, body)))
                self._count(*await answer)

    def _count(self, status: int, body: bytes) -> None:
        self.statuses[status] += 1
        if status >= 400:
            refusal = wire.decode(body, msg.Refusal, limit_bytes=1 << 16, what="a refusal")
            self.codes[refusal.code] += 1
            self.retry_after_s = max(self.retry_after_s, refusal.retry_after or 0.0)


async def _run(flood: Flood, seconds: float) -> None:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    tasks = [asyncio.create_task(flood.connection()) for _ in range(CONNECTIONS)]
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(seconds)
    for one in tasks:
        one.cancel()
    await asyncio.wait(tasks)


def main(arguments: list[str]) -> int:
    host, port, receiver, uri, *rest = arguments
    flood = Flood(host, int(port), receiver, Signer.from_uri(uri))
    began_s = time.monotonic()
    asyncio.run(_run(flood, float(rest[0]) if rest else 3600.0))
    seconds = time.monotonic() - began_s
    found = {"seconds": seconds, "statuses": dict(flood.statuses), "codes": dict(flood.codes)}
    print(json.dumps({**found, "retry_after_s": flood.retry_after_s}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
