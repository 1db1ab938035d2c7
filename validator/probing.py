"""One short connection to a suspect member's address says whether its process is dead, or nothing."""

from __future__ import annotations

import asyncio
import errno

from subnet.timing import TIMEOUTS
from validator.watch import Probe


async def probe(host: str, port: int, timeout_s: float = TIMEOUTS.probe_s) -> Probe:
    """``REFUSED`` only where the machine itself says that nobody listens."""
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(host, port)
    except TimeoutError:
        return Probe.UNANSWERED
    except OSError as error:
        return Probe.REFUSED if error.errno == errno.ECONNREFUSED else Probe.UNANSWERED
    writer.close()
    return Probe.ANSWERED
