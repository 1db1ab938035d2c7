"""Weights sealed to a local chain's own key, so that nobody can copy them before the chain reveals them.

A real chain uses timelock encryption to a drand round, which nobody can open early; a local chain has no drand, so it
holds the key itself: whoever reads its disk can. X25519, HKDF-SHA-256, ChaCha20-Poly1305; a fresh key per seal.
"""

from __future__ import annotations

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from subnet.chain.extrinsics import U16, U63
from subnet.errors import InputError

_INFO = b"iota-local-chain/sealed-weights/1"
_NONCE = bytes(12)
"""One message per key, so the nonce may stand still."""


class SealedWeights(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is inside; the hotkey keeps another from committing a copy."""

    hotkey: str
    uids: tuple[U16, ...]
    values: tuple[U16, ...]
    version_key: U63


def public_key(secret: bytes) -> bytes:
    return X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()


def _cipher(shared: bytes, ephemeral: bytes, recipient: bytes) -> ChaCha20Poly1305:
    key = HKDF(algorithm=SHA256(), length=32, salt=ephemeral + recipient, info=_INFO).derive(shared)
    return ChaCha20Poly1305(key)


def seal(weights: SealedWeights, seal_key: bytes) -> bytes:
    try:
        recipient = X25519PublicKey.from_public_bytes(seal_key)
    except ValueError as error:
        raise InputError(f"the chain's key for sealed weights is no key: {error}") from error
    secret = X25519PrivateKey.generate()
    ephemeral = secret.public_key().public_bytes_raw()
    cipher = _cipher(secret.exchange(recipient), ephemeral, seal_key)
    return ephemeral + cipher.encrypt(_NONCE, msgspec.msgpack.encode(weights), None)


def unseal(commit: bytes, secret: bytes) -> SealedWeights | None:
    """None for what wasn't sealed to this key, or isn't weights."""
    own = X25519PrivateKey.from_private_bytes(secret)
    ephemeral = commit[:32]
    try:
        shared = own.exchange(X25519PublicKey.from_public_bytes(ephemeral))
        cipher = _cipher(shared, ephemeral, own.public_key().public_bytes_raw())
        return msgspec.msgpack.decode(cipher.decrypt(_NONCE, commit[32:], None), type=SealedWeights)
    except (ValueError, InvalidTag, msgspec.MsgspecError):
        return None
