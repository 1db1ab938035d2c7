"""A whole chain in one directory: state = fold of the log of extrinsics, and blocks that follow the clock.

An extrinsic is on disk (SQLite, WAL, ``synchronous=FULL``) before it changes anything, so ``kill -9`` at any moment
loses no answer that was given; what was logged but not answered is found again at the next start. Block numbers come
from the time since genesis and never go back, whatever the clock does. One thread may use a :class:`LocalNode`.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from subnet.chain.base import Commitment, Hyperparameters, Metagraph, WeightsReceipt
from subnet.chain.extrinsics import (
    DOMAIN,
    Account,
    ChainInfo,
    Extrinsic,
    Outcome,
    SignedExtrinsic,
    decode_extrinsic,
)
from subnet.chain.genesis import DEFAULT_LOCAL_GENESIS, Genesis
from subnet.chain.local_epochs import advance, settle
from subnet.chain.local_rules import admit, apply_extrinsic
from subnet.chain.local_state import (
    ChainState,
    empty_block_hash,
    genesis_state,
    view_commitments,
    view_hyperparameters,
    view_metagraph,
    view_weights,
)
from subnet.chain.refusals import ChainRefused
from subnet.chain.sealed import public_key
from subnet.errors import ConfigError, Corrupt, NotFound, OutOfSpace
from subnet.protocol.signing import verify_signature
from subnet.timing import SYSTEM_CLOCK, Clock

FORMAT = 2
"""Version of the database; a change makes old directories unreadable, which is said when they are opened."""
SNAPSHOT_EVERY = 512
"""Extrinsics between two snapshots: bounds the time to start."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS extrinsics (number INTEGER PRIMARY KEY, block INTEGER NOT NULL,
    payload BLOB NOT NULL, signature BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS anchors (block INTEGER PRIMARY KEY, hash BLOB NOT NULL);
"""


class _Snapshot(msgspec.Struct, frozen=True):
    number: int
    """Extrinsics folded into ``state``."""
    state: ChainState


class LocalNode:
    """The chain itself, without its HTTP server. Open it with :meth:`open`, use it from one thread, close it."""

    def __init__(self, db: sqlite3.Connection, clock: Clock, started_ns: int, snapshot: _Snapshot) -> None:
        self._db = db
        self._clock = clock
        self._started_ns = started_ns
        self._number = snapshot.number
        self._snapshot_number = snapshot.number
        self._recorded_block = 0
        self._unsaved_anchors: list[tuple[int, bytes]] = []
        self.state = snapshot.state
        self._seal_key = public_key(self.state.seal_secret)

    @classmethod
    def open(
        cls, directory: Path, genesis: Genesis = DEFAULT_LOCAL_GENESIS, *, clock: Clock = SYSTEM_CLOCK
    ) -> LocalNode:
        """Continue the chain in ``directory``, or start one there from ``genesis``."""
        path = directory / "chain.sqlite"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            db = sqlite3.connect(path, timeout=1.0, isolation_level=None, check_same_thread=False)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"can't open the chain in {directory}: {error}") from error
        try:
            db.execute("PRAGMA locking_mode=EXCLUSIVE")
            db.execute("PRAGMA journal_mode=WAL")
            db.execute("PRAGMA synchronous=FULL")
            db.executescript(_SCHEMA)
            started_ns = _start(db, genesis, clock)
            node = cls(db, clock, started_ns, _newest_snapshot(db, genesis, started_ns))
            node._replay()
        except sqlite3.OperationalError as error:
            db.close()
            hint = "another process serves it?" if "locked" in str(error) else ""
            raise ConfigError(f"can't open the chain in {directory}: {error}", hint=hint) from error
        except sqlite3.DatabaseError as error:
            db.close()
            raise Corrupt(f"{path} is damaged: {error}", hint="move it away to start a new chain") from error
        except BaseException:
            db.close()
            raise
        return node

    def close(self) -> None:
        """Leave the newest state on disk, so that the next start replays nothing."""
        try:
            if self._number > self._snapshot_number:
                self._save_snapshot()
        finally:
            self._db.close()

    # ---- time

    def _target_block(self) -> int:
        """The block that is being built at this time."""
        elapsed_ns = self._clock.wall_ns() - self._started_ns
        return max(0, int(elapsed_ns // round(self.state.genesis.block_time_s * 1e9))) + 1

    def seconds_to_block(self, number: int) -> float:
        """Time until block ``number`` is finished."""
        finished_ns = self._started_ns + number * round(self.state.genesis.block_time_s * 1e9)
        return max(0.0, (finished_ns - self._clock.wall_ns()) / 1e9)

    def tick(self) -> int:
        """Let the blocks pass that are due; returns the newest finished one."""
        target = max(self._target_block(), self.state.block)
        if target > self._recorded_block:
            self._advance(target)
            with _transaction(self._db):
                self._record()
            self._recorded_block, self._unsaved_anchors = target, []
        return self.state.block - 1

    def _record(self) -> None:
        """Write what follows from time alone: where the chain is, and the hashes of the blocks that were closed."""
        self._db.executemany("INSERT OR REPLACE INTO anchors VALUES (?, ?)", self._unsaved_anchors)
        _put_meta(self._db, "block", self.state.block)

    def _advance(self, block: int) -> None:
        closing = self.state.block
        closed = advance(self.state, block)
        if closed is not None:
            self._unsaved_anchors.append((closing, closed))

    def _replay(self) -> None:
        rows = self._db.execute(
            "SELECT number, block, payload, signature FROM extrinsics WHERE number >= ? ORDER BY number",
            (self._number,),
        ).fetchall()
        for number, block, payload, signature in rows:
            if number != self._number:
                raise Corrupt(f"the chain's log misses extrinsic {self._number}")
            self._advance(block)
            signed = SignedExtrinsic(payload=payload, signature=signature)
            self._fold(decode_extrinsic(payload), signed)
        self._advance(_get_int(self._db, "block"))
        self.tick()

    # ---- writing

    def submit(self, signed: SignedExtrinsic) -> Outcome:
        """Check, log, apply. A refusal by the call's own rules is logged too: it has cost the nonce."""
        extrinsic = decode_extrinsic(signed.payload)
        self.tick()
        if not verify_signature(extrinsic.signer, DOMAIN + signed.payload, signed.signature):
            raise ChainRefused("BadProof")
        admit(self.state, extrinsic)
        if self._number - self._snapshot_number >= SNAPSHOT_EVERY:
            self._save_snapshot()
        row = (self._number, self.state.block, signed.payload, signed.signature)
        with _transaction(self._db):
            self._db.execute("INSERT INTO extrinsics VALUES (?, ?, ?, ?)", row)
        outcome = self._fold(extrinsic, signed)
        if isinstance(outcome, ChainRefused):
            raise outcome
        return outcome

    def _fold(self, extrinsic: Extrinsic, signed: SignedExtrinsic) -> Outcome | ChainRefused:
        self._number += 1
        try:
            return apply_extrinsic(self.state, extrinsic, signed.digest)
        except ChainRefused as refused:
            return refused

    def _save_snapshot(self) -> None:
        blob = msgspec.msgpack.encode(_Snapshot(number=self._number, state=self.state))
        with _transaction(self._db):
            self._record()
            _put_meta(self._db, "snapshot", blob)
        self._snapshot_number = self._number

    # ---- reading

    def info(self) -> ChainInfo:
        block = self.tick()

        return ChainInfo(
            genesis=self.state.genesis_hash,
            block=block,
            block_time_s=self.state.genesis.block_time_s,
            seal_key=self._seal_key,
        )

    def block_hash(self, number: int) -> str:
        newest = self.tick()
        if not 0 <= number <= newest:
            error = NotFound(f"block {number} isn't finished; the newest is {newest}")
            error.retry_after_s = self.seconds_to_block(number) if number > newest else None
            raise error
        if number == 0:
            return self.state.genesis_hash
        row = self._db.execute(
            "SELECT block, hash FROM anchors WHERE block <= ? ORDER BY block DESC LIMIT 1", (number,)
        ).fetchone()
        block, digest = row if row is not None else (0, bytes.fromhex(self.state.genesis_hash))
        return (digest if block == number else empty_block_hash(digest, number)).hex()

    def account(self, address: str) -> Account:
        self.tick()
        return Account(nonce=self.state.nonces.get(address, 0), balance=self.state.balances.get(address, 0))

    def _known(self, netuid: int) -> int:
        self.tick()
        if netuid not in self.state.subnets:
            raise ChainRefused("SubnetNotExists", f"there is no subnet {netuid}")
        return netuid

    def metagraph(self, netuid: int) -> Metagraph:
        return view_metagraph(self.state, self._known(netuid))

    def hyperparameters(self, netuid: int) -> Hyperparameters:
        return view_hyperparameters(self.state, self._known(netuid))

    def weights(self, netuid: int, uid: int, mechanism: int) -> WeightsReceipt | None:
        return view_weights(self.state, self._known(netuid), uid, mechanism)

    def commitments(self, netuid: int) -> dict[str, Commitment]:
        return view_commitments(self.state, self._known(netuid))


@contextmanager
def _transaction(db: sqlite3.Connection) -> Generator[None]:
    """BEGIN, then COMMIT or ROLLBACK; a disk that is full or gone is said as such."""
    try:
        db.execute("BEGIN IMMEDIATE")
        yield
        db.execute("COMMIT")
    except sqlite3.OperationalError as error:
        raise OutOfSpace(f"the chain's disk refuses: {error}", hint="free some space") from error
    finally:
        if db.in_transaction:
            db.execute("ROLLBACK")


def _get_meta(db: sqlite3.Connection, key: str) -> object:
    row = db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
    return None if row is None else row[0]


def _get_int(db: sqlite3.Connection, key: str) -> int:
    value = _get_meta(db, key)
    return value if isinstance(value, int) else 0


def _put_meta(db: sqlite3.Connection, key: str, value: object) -> None:
    db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))


def _start(db: sqlite3.Connection, genesis: Genesis, clock: Clock) -> int:
    """Write the genesis of a new directory, or check that the directory's chain began with the same one."""
    encoded = msgspec.msgpack.encode(genesis)
    if _get_meta(db, "format") is None:
        started_ns = clock.wall_ns()
        with _transaction(db):
            _put_meta(db, "genesis", encoded)
            _put_meta(db, "started_ns", started_ns)
            _put_meta(db, "seal_secret", os.urandom(32))
            _put_meta(db, "format", FORMAT)
        return started_ns
    if _get_meta(db, "format") != FORMAT:
        raise ConfigError("this directory holds a chain of another version", hint="move it away to start anew")
    if _get_meta(db, "genesis") != encoded:
        raise ConfigError(
            "this directory holds a chain with other genesis parameters",
            hint="give the genesis it began with, or another directory",
        )
    return _get_int(db, "started_ns")


def _newest_snapshot(db: sqlite3.Connection, genesis: Genesis, started_ns: int) -> _Snapshot:
    blob = _get_meta(db, "snapshot")
    if isinstance(blob, bytes):
        try:
            return msgspec.msgpack.decode(blob, type=_Snapshot)
        except msgspec.MsgspecError as error:
            raise Corrupt(f"the chain's snapshot can't be read: {error}") from error
    secret = _get_meta(db, "seal_secret")
    if not isinstance(secret, bytes):
        raise Corrupt("the chain's key for sealed weights is missing")
    state = genesis_state(genesis, started_ns, secret)
    for subnet in state.subnets.values():
        settle(state, subnet, 0)
    return _Snapshot(number=0, state=state)
