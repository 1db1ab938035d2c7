"""What is signed and sent to the local chain: one struct per call, bound to one chain and one nonce.

The bytes that were signed travel as they are, so nothing is encoded again before a signature is checked. These
structs are the local chain's own wire and log format; the Bittensor network has its own.
"""

from __future__ import annotations

from typing import Annotated

import blake3
import msgspec

from subnet.chain.base import KeySigner
from subnet.errors import InputError

DOMAIN = b"iota-local-chain/1\n"
"""Prefix of everything signed for this chain, so that a signature is good for nothing else."""

U16 = Annotated[int, msgspec.Meta(ge=0, le=65_535)]
U63 = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Rao = U63
Address = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]


class _Call(msgspec.Struct, frozen=True, tag_field="call", forbid_unknown_fields=True):
    pass


class BurnedRegister(_Call, frozen=True, tag="burned_register"):
    """Signed by the coldkey."""

    netuid: U16
    hotkey: Address


class AddStake(_Call, frozen=True, tag="add_stake"):
    """Signed by the coldkey; moves balance to a hotkey's stake on one subnet."""

    netuid: U16
    hotkey: Address
    amount: Rao


class Faucet(_Call, frozen=True, tag="faucet"):
    """Signed by the coldkey; gives it the genesis' faucet amount, once."""


class ServeAxon(_Call, frozen=True, tag="serve_axon"):
    """Signed by the hotkey."""

    netuid: U16
    host: Annotated[str, msgspec.Meta(max_length=255)]
    port: int


class SetWeights(_Call, frozen=True, tag="set_weights"):
    """Signed by the hotkey."""

    netuid: U16
    mechanism: U16
    uids: tuple[U16, ...]
    values: tuple[U16, ...]
    version_key: U63


class CommitWeights(_Call, frozen=True, tag="commit_weights"):
    """Signed by the hotkey; ``commit`` is what :mod:`subnet.chain.sealed` made of the weights."""

    netuid: U16
    mechanism: U16
    commit: bytes
    version: U16


class SetCommitment(_Call, frozen=True, tag="set_commitment"):
    """Signed by the hotkey."""

    netuid: U16
    data: bytes


Call = BurnedRegister | AddStake | Faucet | ServeAxon | SetWeights | CommitWeights | SetCommitment


class Extrinsic(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A call, who makes it, and where and when it is good."""

    genesis: str
    signer: Address
    nonce: U63
    call: Call


class SignedExtrinsic(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The encoded :class:`Extrinsic` and the signer's signature over ``DOMAIN`` and it."""

    payload: bytes
    signature: bytes

    @property
    def digest(self) -> bytes:
        return blake3.blake3(self.payload).digest()


class Outcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an included extrinsic did; fields that a call doesn't have keep their defaults."""

    block: int
    uid: int = -1
    uids: tuple[int, ...] = ()
    values: tuple[int, ...] = ()
    reveal_block: int = -1


class Account(msgspec.Struct, frozen=True):
    """What the chain knows of an address; ``nonce`` is the next one it takes."""

    nonce: int
    balance: int


class ChainInfo(msgspec.Struct, frozen=True):
    """Which chain this is, and where it is."""

    genesis: str
    block: int
    block_time_s: float
    seal_key: bytes = b""
    """Public key that weights are sealed to where a subnet wants them committed."""
    version: int = 2


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Extrinsic)


def sign_extrinsic(signer: KeySigner, genesis: str, nonce: int, call: Call) -> SignedExtrinsic:
    payload = _ENCODER.encode(Extrinsic(genesis=genesis, signer=signer.hotkey, nonce=nonce, call=call))
    return SignedExtrinsic(payload=payload, signature=signer.sign(DOMAIN + payload))


def decode_extrinsic(payload: bytes) -> Extrinsic:
    try:
        return _DECODER.decode(payload)
    except msgspec.MsgspecError as error:
        raise InputError(f"not an extrinsic: {error}") from error
