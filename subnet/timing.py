"""The only source of clocks, deadlines and seeded randomness; every wait of the system is a row of :data:`TIMEOUTS`.

A blocking call takes a :class:`Deadline`, an absolute monotonic time; passing it down never makes it later.
``python -m subnet.timing > docs/timeouts.md`` writes the table of waits and the order in which they nest.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, fields
from typing import Protocol

from blake3 import blake3

from subnet.errors import ConfigError, DeadlinePassed


class Clock(Protocol):
    def now_s(self) -> float:
        """Monotonic seconds, for ages and deadlines."""
        ...

    def wall_ns(self) -> int:
        """Nanoseconds since 1970, for nonces, expiries and logs."""
        ...


class SystemClock:
    def now_s(self) -> float:
        return time.monotonic()

    def wall_ns(self) -> int:
        return time.time_ns()


class ManualClock:
    """Stands still until told; for tests and simulations."""

    def __init__(self, now_s: float = 1000.0, wall_ns: int = 1_700_000_000_000_000_000) -> None:
        self._now_s = now_s
        self._wall_ns = wall_ns

    def now_s(self) -> float:
        return self._now_s

    def wall_ns(self) -> int:
        return self._wall_ns

    def advance(self, seconds: float) -> None:
        self._now_s += seconds
        self._wall_ns += round(seconds * 1e9)


SYSTEM_CLOCK = SystemClock()


@dataclass(frozen=True, slots=True)
class Deadline:
    """An absolute time on ``clock`` by which something must be over."""

    at_s: float
    clock: Clock = SYSTEM_CLOCK

    @classmethod
    def after(cls, seconds: float, clock: Clock = SYSTEM_CLOCK) -> Deadline:
        return cls(clock.now_s() + seconds, clock)

    def remaining_s(self) -> float:
        return max(0.0, self.at_s - self.clock.now_s())

    @property
    def expired(self) -> bool:
        return self.clock.now_s() >= self.at_s

    def sooner(self, seconds: float) -> Deadline:
        """This deadline, or ``seconds`` from now if that is earlier."""
        return Deadline(min(self.at_s, self.clock.now_s() + seconds), self.clock)

    def check(self, what: str) -> None:
        if self.expired:
            raise DeadlinePassed(f"{what}: the deadline has passed")

    @asynccontextmanager
    async def limit(self, what: str) -> AsyncGenerator[None]:
        """Cancel the body at the deadline and raise :class:`DeadlinePassed`; the wait itself is in real seconds."""
        remaining_s = self.remaining_s()
        scope = asyncio.timeout(remaining_s)
        try:
            async with scope:
                yield
        except TimeoutError as error:
            if not scope.expired():
                raise
            raise DeadlinePassed(f"{what}: not done within {remaining_s:.3g} s") from error


SLOWEST_BYTES_PER_S = 64 << 10
"""A transfer may take as long as its bytes do at this speed, beside what every transfer may take."""


def carrying_s(base_s: float, num_bytes: float, mbit_per_s: float) -> float:
    """How long something may take that may take ``base_s`` anyhow and has bytes to move over a link of so many Mbit/s."""
    return base_s + 8e-6 * num_bytes / mbit_per_s


def transfer_deadline(base_s: float, num_bytes: float) -> Deadline:
    """For a transfer of so many bytes in all: ``base_s``, and what they take at ``SLOWEST_BYTES_PER_S``."""
    return Deadline.after(base_s + num_bytes / SLOWEST_BYTES_PER_S)


class Backoff:
    """Growing waits with jitter: the n-th is in [1/2, 1] of min(cap, base * 2^n)."""

    def __init__(self, base_s: float = 0.1, cap_s: float = 5.0, rng: random.Random | None = None) -> None:
        self._base_s = base_s
        self._cap_s = cap_s
        self._rng = rng if rng is not None else random.Random()
        self._tries = 0

    def next_s(self) -> float:
        whole_s = min(self._cap_s, self._base_s * 2.0 ** min(self._tries, 60))
        self._tries += 1
        return whole_s * (0.5 + 0.5 * self._rng.random())

    def reset(self) -> None:
        self._tries = 0


def seeded(*parts: str | int | bytes) -> random.Random:
    """A generator that depends on the parts and nothing else; ``("a", "bc")`` and ``("ab", "c")`` differ."""
    hasher = blake3(b"iota/seeded/1\0")
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode()
        kind = b"b" if isinstance(part, bytes) else b"s" if isinstance(part, str) else b"i"
        hasher.update(kind + len(data).to_bytes(8, "little") + data)
    return random.Random(hasher.digest())


def _wait(seconds: float, doc: str) -> float:
    return field(default=seconds, metadata={"doc": doc})


@dataclass(frozen=True)
class Timeouts:
    """Every wait of the system, in seconds."""

    heartbeat_interval_s: float = _wait(1, "A miner's heartbeat process speaks this often.")
    member_silence_s: float = _wait(5, "A member that nobody has heard for this long is gone.")
    probe_s: float = _wait(1, "A member whose connection was reset must answer a probe within this time.")
    not_accumulated_s: float = _wait(5, "The answer to a revoked lease; later the member's partial is void.")
    commit_s: float = _wait(20, "The answer to `Freeze`: the commitment to a partial.")
    owner_s: float = _wait(
        20,
        "An owner publishes its merged partition; later contributors go via the store. Grows with bytes, as said below.",
    )
    fingerprint_s: float = _wait(20, "The answer to `Reveal`: the fingerprints of a partial.")
    check_s: float = _wait(30, "The answer to the fingerprints: a replica's check of the merged sum.")
    receipt_flush_s: float = _wait(1, "Receipts are sent at the latest this long after the first.")
    lease_floor_s: float = _wait(5, "No lease's clock is shorter, whatever its expected time.")
    member_hung_s: float = _wait(20, "A member whose heartbeats come but whose main process stands still is gone.")
    loop_blocked_s: float = _wait(5, "The validator's event loop stands still for this long: dump its stacks.")
    stall_floor_s: float = _wait(40, "No seal in 10 median steps and this time: name who is waited for.")
    stall_first_s: float = _wait(120, "The same before the first step of a run has been sealed.")
    http_request_s: float = _wait(10, "One try of a request to the validator.")
    answer_head_s: float = _wait(
        2, "Of an answer that isn't ours so much is read as comes within this time: it may be a stream that never ends."
    )
    store_request_s: float = _wait(30, "One try of a transfer from or to the store.")
    store_open_s: float = _wait(120, "A validator without an index of its store has read what the last one left there.")
    journal_answer_s: float = _wait(
        10, "The journal's database answers a commit within this time, or it is connected anew."
    )
    drain_s: float = _wait(
        900, "A validator that is drained ends after this time, whether the open step is sealed or not."
    )
    journal_away_s: float = _wait(120, "A leader waits so long for its journal's database, says nothing, then ends.")
    journal_open_s: float = _wait(
        30, "At a start: for the journal's database, and for whoever wrote the journal before."
    )
    store_probe_s: float = _wait(3, "The store answers the validator's look at it within this time, or it is away.")
    stream_keepalive_s: float = _wait(5, "The validator says something on each stream this often.")
    stream_idle_s: float = _wait(15, "A stream that said nothing for this long is opened anew.")
    hello_s: float = _wait(5, "The answer to a hello, where a miner asks several validators which one leads.")
    validator_lost_s: float = _wait(
        12, "A miner whose validator neither streams nor says hello for this long looks for another leader of the run."
    )
    validator_given_up_s: float = _wait(
        120, "And after this long goes with a validator that leads another run, where one does."
    )
    leadership_check_s: float = _wait(
        5, "A leader looks this often whether the log store has a segment that another wrote."
    )
    blob_piece_s: float = _wait(5, "A piece of a blob asked of a replica; later the replica is passed over.")
    hedge_s: float = _wait(2, "A blob that the first source hasn't given by then is asked of the next one too.")
    peer_connect_s: float = _wait(3, "Connection and handshake between two miners.")
    peer_send_s: float = _wait(10, "A frame is with the other miner's kernel within this time, or its sender says so.")
    peer_need_retry_s: float = _wait(1, "A missing boundary is asked for again this often.")
    chain_request_s: float = _wait(30, "One call to the chain.")
    chain_write_s: float = _wait(120, "A call that waits for its inclusion in a block of the chain.")
    chain_close_s: float = _wait(
        2, "A connection to the chain is closed within this time; one more after a second try."
    )
    executor_item_s: float = _wait(600, "One work item on the compute thread; longer means that it hangs.")
    evidence_s: float = _wait(20, "What an audit wants is in the store within this time, or its maker doesn't open it.")
    audit_run_s: float = _wait(1800, "One replay of a case in the audit worker.")
    witness_s: float = _wait(300, "A witness has fetched a case and says what its replay gave; then the next is asked.")
    shutdown_s: float = _wait(10, "From the first signal to the end of the process.")
    shutdown_grace_s: float = _wait(5, "Of that, for handing work back before the tasks are cancelled.")
    url_ttl_s: float = _wait(300, "How long a presigned URL is good for.")
    request_age_s: float = _wait(10, "A signed request older than this is stale.")
    request_skew_s: float = _wait(2, "A signed request from further in the future is refused.")

    def __post_init__(self) -> None:
        for item in fields(self):
            if not getattr(self, item.name) > 0:
                raise ConfigError(f"{item.name} = {getattr(self, item.name)!r} is not allowed", hint="allowed: above 0")


TIMEOUTS = Timeouts()

NESTING: tuple[tuple[str, float, str, str], ...] = (
    ("heartbeat_interval_s", 3, "member_silence_s", "two lost heartbeats are no death"),
    ("probe_s", 1, "member_silence_s", "a probe is the short way to the same verdict"),
    ("member_silence_s", 2, "member_hung_s", "a main process that is only slow isn't taken for dead"),
    ("receipt_flush_s", 3, "member_silence_s", "a held-back receipt never looks like silence"),
    ("not_accumulated_s", 1, "commit_s", "revocations end before a freeze gives up"),
    ("peer_connect_s", 1, "peer_send_s", "a send survives one reconnection"),
    ("peer_need_retry_s", 3, "peer_send_s", "asking again comes before giving up"),
    ("receipt_flush_s", 2, "lease_floor_s", "a finished item is reported before its lease ends"),
    ("stream_keepalive_s", 2, "stream_idle_s", "one lost keep-alive doesn't end a stream"),
    ("hello_s", 2, "validator_lost_s", "one unanswered hello is no loss"),
    ("http_request_s", 1, "validator_lost_s", "a slow answer is no loss"),
    ("answer_head_s", 2, "http_request_s", "what came is said before the try ends"),
    ("validator_lost_s", 5, "validator_given_up_s", "a validator that restarts finds its miners waiting"),
    ("http_request_s", 1, "store_request_s", "a grant is asked for within a transfer"),
    ("store_request_s", 3, "url_ttl_s", "a grant outlives the retries of its transfer"),
    ("request_skew_s", 1, "request_age_s", "the window of a nonce lies mostly in the past"),
    ("shutdown_grace_s", 1, "shutdown_s", "handing back leaves time to close"),
    ("commit_s", 1, "stall_floor_s", "each step of a merge ends before a stall is called"),
    ("check_s", 1, "stall_floor_s", "each step of a merge ends before a stall is called"),
    ("chain_request_s", 2, "chain_write_s", "weights are planned and read back around the wait for a block"),
    ("chain_close_s", 2, "shutdown_grace_s", "both tries to close fit into the end of the process"),
    ("loop_blocked_s", 1, "stall_floor_s", "a validator that stands still itself is told apart from a stalled run"),
    ("stall_floor_s", 1, "stall_first_s", "the first step has models to load and states to restore"),
    ("executor_item_s", 1, "audit_run_s", "the replay of a partial has several items"),
    ("store_request_s", 4, "witness_s", "a witness fetches what it replays, with retries"),
    ("witness_s", 1, "audit_run_s", "a witness redoes one member's sum, an audit up to all of a stage"),
    ("lease_floor_s", 1, "executor_item_s", "a lease is dealt again before the executor is replaced"),
)
"""(inner, factor, outer, why): inner * factor must be below outer."""


def check_nesting(timeouts: Timeouts = TIMEOUTS) -> None:
    """Called at start-up: raise :class:`ConfigError` unless every inner wait ends before its outer one."""
    for inner, factor, outer, why in NESTING:
        inner_s, outer_s = getattr(timeouts, inner), getattr(timeouts, outer)
        if not inner_s * factor < outer_s:
            times = "" if factor == 1 else f" * {factor:g}"
            raise ConfigError(
                f"{inner}{times} = {inner_s * factor:g} s must be below {outer} = {outer_s:g} s",
                hint=f"so that {why}",
            )


_GROWING = (
    "What has bytes to move is waited for longer: the wait above, and the bytes over a link of `merge.slowest_mbit` (run file,",
    "20 Mbit/s unless it says otherwise). The bytes follow from the journal (`validator/merge_waits.py`), so all validators",
    "wait equally long: `commit_s`, `check_s`, the wait of a trace: the packed sum of the stage; `owner_s`, and the wait through",
    "the store after it: the most that one contributor sends and the most that one owner gets; a snapshot: 12 bytes a parameter;",
    "a lease: its boundary, and those before it on the same link. A miner's own transfers end after their wait and their bytes",
    "at 64 KiB/s. At 20 Mbit/s a stage of 10M parameters (M = 16) adds 8 s to `commit_s`, one of 275M 220 s.",
)


def render_timeouts_markdown(timeouts: Timeouts = TIMEOUTS) -> str:
    lines = [
        "# Timeouts",
        "",
        "Made from the code by `python -m subnet.timing > docs/timeouts.md`; a test compares the two.",
        "",
        "| wait | seconds | what |",
        "|---|---|---|",
    ]
    lines += [
        f"| `{item.name}` | {getattr(timeouts, item.name):g} | {item.metadata['doc']} |" for item in fields(timeouts)
    ]
    lines += ["", *_GROWING, "", "Checked at start-up:", ""]
    for inner, factor, outer, why in NESTING:
        times = "" if factor == 1 else f" · {factor:g}"
        lines.append(f"- `{inner}`{times} < `{outer}`: {why}.")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(render_timeouts_markdown())
