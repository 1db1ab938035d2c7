"""Both sides of a peer connection prove their hotkey, for this connection, these incarnations and nobody else.

    opener   -> Open(hotkey, receiver, incarnation, nonce, last connection)
    accepter -> Accept(incarnation, nonce, signature)  or  Deny(refusal)
    opener   -> Prove(signature)
    accepter -> Ready()                                or  Deny(refusal)

Each signs its purpose, both hotkeys, both incarnations, both nonces and, where the connection is encrypted, the hash of the
accepter's certificate: nothing said here is worth anything on another connection, and nobody can sit in between.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from blake3 import blake3

from subnet.errors import InputError, IotaError, Refusal, Refused, VersionUnsupported
from subnet.net.frames import HANDSHAKE_BYTES, FrameConnection
from subnet.protocol import wire
from subnet.protocol.signing import (
    PURPOSE_PEER_ACCEPT,
    PURPOSE_PEER_OPEN,
    BadSignature,
    Signer,
    WrongReceiver,
    sign_statement,
    verify_statement,
)

PEER_VERSION = 2
"""Of the handshake and the records behind it; another one is refused."""
_NONCE_BYTES = 32


class Open(msgspec.Struct, frozen=True, tag="open"):
    version: int
    hotkey: str
    receiver: str
    incarnation: str
    nonce: bytes
    last: str
    """Id of the connection that the opener had before this one, or empty: tells a lost one from a crossing."""


class Accept(msgspec.Struct, frozen=True, tag="accept"):
    incarnation: str
    nonce: bytes
    signature: bytes


class Prove(msgspec.Struct, frozen=True, tag="prove"):
    signature: bytes


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    pass


class Deny(msgspec.Struct, frozen=True, tag="deny"):
    refusal: Refusal


_Message = Open | Accept | Prove | Ready | Deny
M = TypeVar("M", Open, Accept, Prove, Ready)


@dataclass(frozen=True)
class Established:
    """What both sides know after the handshake."""

    hotkey: str
    incarnation: str
    connection_id: str
    opened_by_us: bool


async def open_handshake(
    connection: FrameConnection, signer: Signer, receiver: str, incarnation: str, last: str
) -> Established:
    """The opener's side; a denial raises :class:`Refused`. The caller bounds the time."""
    accept, statement = await ask_accepter(connection, signer, receiver, incarnation, last)
    _write(connection, Prove(sign_statement(signer, PURPOSE_PEER_OPEN, statement)))
    await _read(connection, Ready, receiver)
    return Established(receiver, accept.incarnation, blake3(statement).hexdigest(), opened_by_us=True)


async def ask_accepter(
    connection: FrameConnection, signer: Signer, receiver: str, incarnation: str, last: str = ""
) -> tuple[Accept, bytes]:
    """The first half: who accepts has proven to be ``receiver``, and knows of no connection yet."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    _write(connection, Open(PEER_VERSION, signer.hotkey, receiver, incarnation, nonce, last))
    accept = await _read(connection, Accept, receiver)
    _check_nonce(accept.nonce)
    parties = (signer.hotkey, receiver, incarnation, accept.incarnation)
    statement = _statement(*parties, nonce, accept.nonce, connection.channel)
    if not verify_statement(receiver, PURPOSE_PEER_ACCEPT, statement, accept.signature):
        raise BadSignature(f"{connection.peer_name} isn't hotkey {receiver}")
    return accept, statement


async def accept_handshake(
    connection: FrameConnection,
    signer: Signer,
    incarnation: str,
    admit: Callable[[Open], None],
) -> Established:
    """The accepter's side, up to and without ``Ready`` (:func:`say_ready`).

    ``admit`` raises to deny; it is asked before we sign, and again once the opener has proved itself.
    """
    opened = await _read(connection, Open, connection.peer_name)
    if opened.version != PEER_VERSION:
        raise VersionUnsupported(f"peer protocol {opened.version}, here {PEER_VERSION}")
    if opened.receiver != signer.hotkey:
        raise WrongReceiver(f"this is hotkey {signer.hotkey}, not {opened.receiver[:64]}")
    _check_nonce(opened.nonce)
    admit(opened)
    nonce = secrets.token_bytes(_NONCE_BYTES)
    parties = (opened.hotkey, signer.hotkey, opened.incarnation, incarnation)
    statement = _statement(*parties, opened.nonce, nonce, connection.channel)
    _write(connection, Accept(incarnation, nonce, sign_statement(signer, PURPOSE_PEER_ACCEPT, statement)))
    prove = await _read(connection, Prove, connection.peer_name)
    if not verify_statement(opened.hotkey, PURPOSE_PEER_OPEN, statement, prove.signature):
        raise BadSignature(f"{connection.peer_name} isn't hotkey {opened.hotkey[:64]}")
    admit(opened)
    return Established(opened.hotkey, opened.incarnation, blake3(statement).hexdigest(), opened_by_us=False)


def say_ready(connection: FrameConnection) -> None:
    _write(connection, Ready())


def deny(connection: FrameConnection, error: IotaError) -> None:
    _write(connection, Deny(error.refusal()))


def _write(connection: FrameConnection, message: _Message) -> None:
    connection.write_greeting(wire.encode(message))


async def _read(connection: FrameConnection, kind: type[M], who: str) -> M:
    header = await connection.next_greeting()
    message = wire.decode(header, _Message, limit_bytes=HANDSHAKE_BYTES, what=f"handshake with {who}")
    if isinstance(message, Deny):
        raise Refused(message.refusal, who=who)
    if not isinstance(message, kind):
        raise InputError(f"handshake with {who}: {type(message).__name__} where {kind.__name__} belongs")
    return message


def _check_nonce(nonce: bytes) -> None:
    if len(nonce) != _NONCE_BYTES:
        raise InputError(f"a nonce of {len(nonce)} bytes, not {_NONCE_BYTES}")


def _statement(
    opener: str,
    accepter: str,
    opener_incarnation: str,
    accepter_incarnation: str,
    first: bytes,
    second: bytes,
    channel: bytes,
) -> bytes:
    return wire.encode((opener, accepter, opener_incarnation, accepter_incarnation, first, second, channel))
