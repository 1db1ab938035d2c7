"""Every wrong signature has a code of its own; statements don't pass for others; wallets are Bittensor's."""

from __future__ import annotations

from pathlib import Path

import pytest
from bittensor import Wallet, http_auth

from subnet.errors import AuthFailed, ConfigError
from subnet.protocol import signing
from subnet.protocol.signing import (
    RequestVerifier,
    Signer,
    create_wallet,
    load_wallet,
    sign_statement,
    verify_signature,
    verify_statement,
)
from subnet.timing import ManualClock

ALICE, BOB, EVE = (Signer.from_uri(f"//{name}") for name in ("Alice", "Bob", "Eve"))
BODY = b"a body"
TARGET = "/v1/reports?run=demo"


class World:
    """Alice signs for Bob, whose verifier knows her; each test changes one thing."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.verifier = RequestVerifier(BOB.hotkey, is_known=lambda hotkey: hotkey == ALICE.hotkey, clock=self.clock)

    def sign(self, signer: Signer = ALICE, *, late_s: float = 0, **changes: object) -> dict[str, str]:
        fields = {"method": "POST", "target": TARGET, "body": BODY, "receiver": BOB.hotkey} | changes
        # a signer of its own: nonces of one signer only grow
        fresh = Signer(signer.keypair)
        return fresh.sign_request(wall_ns=self.clock.wall_ns() - round(late_s * 1e9), **fields)

    def verify(self, headers: dict[str, str], **changes: object) -> str:
        fields = {"method": "POST", "target": TARGET} | changes
        return self.verifier.verify(headers, fields.pop("body", BODY), **fields)


def code_of(world: World, headers: dict[str, str], **changes: object) -> str:
    with pytest.raises(AuthFailed) as raised:
        world.verify(headers, **changes)
    assert raised.value.reason
    assert not raised.value.retryable
    return raised.value.code


def test_a_true_request_names_its_sender() -> None:
    world = World()
    assert world.verify(world.sign()) == ALICE.hotkey
    assert world.verify(world.sign(late_s=9.9)) == ALICE.hotkey
    assert world.verify(world.sign(late_s=-1.9)) == ALICE.hotkey
    assert world.verify({key.lower(): value for key, value in world.sign(late_s=1).items()}) == ALICE.hotkey


TABLE = {
    "unsigned": lambda w: code_of(w, {"Accept": "x"}),
    "stale_request": lambda w: code_of(w, w.sign(late_s=10.1)),
    "future_request": lambda w: code_of(w, w.sign(late_s=-2.1)),
    "wrong_receiver": lambda w: code_of(w, w.sign(receiver=EVE.hotkey)),
    "unknown_hotkey": lambda w: code_of(w, w.sign(EVE)),
    "bad_signature: method": lambda w: code_of(w, w.sign(), method="PUT"),
    "bad_signature: path": lambda w: code_of(w, w.sign(), target="/v1/other?run=demo"),
    "bad_signature: query": lambda w: code_of(w, w.sign(), target="/v1/reports?run=other"),
    "bad_signature: no query": lambda w: code_of(w, w.sign(), target="/v1/reports"),
    "bad_signature: body": lambda w: code_of(w, w.sign(), body=BODY + b"x"),
    "bad_signature: sender": lambda w: code_of(w, w.sign(EVE) | {http_auth.HEADER_HOTKEY: ALICE.hotkey}),
    "bad_signature: time": lambda w: code_of(w, w.sign(late_s=1) | {http_auth.HEADER_NONCE: str(w.clock.wall_ns())}),
    "malformed_auth: version": lambda w: code_of(w, w.sign() | {http_auth.HEADER_VERSION: "2"}),
    "malformed_auth: nonce": lambda w: code_of(w, w.sign() | {http_auth.HEADER_NONCE: "soon"}),
    "malformed_auth: long nonce": lambda w: code_of(w, w.sign() | {http_auth.HEADER_NONCE: "9" * 5000}),
    "malformed_auth: a target of no text": lambda w: code_of(w, w.sign(), target="/v1/reports?run=\udcbd"),
    "malformed_auth: hotkey": lambda w: code_of(w, w.sign() | {http_auth.HEADER_HOTKEY: "5Nobody"}),
    "malformed_auth: signature": lambda w: code_of(w, w.sign() | {http_auth.HEADER_SIGNATURE: "0xzz"}),
    "malformed_auth: short": lambda w: code_of(w, w.sign() | {http_auth.HEADER_SIGNATURE: "0x00"}),
}


@pytest.mark.parametrize("case", TABLE)
def test_each_fault_has_its_code(case: str) -> None:
    assert TABLE[case](World()) == case.partition(":")[0]


@pytest.mark.parametrize("missing", ["Hotkey", "Nonce", "Signature", "Version"])
def test_a_missing_header_is_malformed(missing: str) -> None:
    world = World()
    headers = world.sign()
    del headers[f"X-Bittensor-{missing}"]
    assert code_of(world, headers) == "malformed_auth"


def test_an_unbound_request_is_refused() -> None:
    world = World()
    headers = http_auth.sign(ALICE.keypair, method="POST", path=TARGET, body=BODY, nonce_ns=world.clock.wall_ns())
    assert code_of(world, headers) == "wrong_receiver"


def test_a_replay_is_refused_and_a_forgery_does_not_burn_the_nonce() -> None:
    world = World()
    headers = world.sign()
    assert code_of(world, headers, body=b"forged") == "bad_signature"
    assert world.verify(headers) == ALICE.hotkey
    assert code_of(world, headers) == "replayed_request"


def test_every_error_of_the_sdk_has_a_class_of_ours() -> None:
    lower = {http_auth.AuthError, *http_auth.AuthError.__subclasses__()}
    ours = {type(signing._translate(kind("x"), {"x-bittensor-nonce": "0"}, 1)) for kind in lower}
    assert len(ours) == len(lower)
    codes = [kind.code for kind in AuthFailed.__subclasses__()]
    assert len(set(codes)) == len(codes)


def test_nonces_of_a_signer_grow_though_the_clock_stands() -> None:
    world = World()
    signer = Signer(ALICE.keypair)
    fields = {"method": "POST", "target": TARGET, "body": BODY, "receiver": BOB.hotkey}
    nonces = [
        int(signer.sign_request(wall_ns=world.clock.wall_ns(), **fields)[http_auth.HEADER_NONCE]) for _ in range(5)
    ]
    assert nonces == sorted(set(nonces))
    ahead = signer.sign_request(wall_ns=world.clock.wall_ns() + 10**12, **fields)
    assert code_of(world, ahead) == "future_request"
    signer.follow_clock(world.clock.wall_ns())
    world.verify(signer.sign_request(wall_ns=world.clock.wall_ns(), **fields))


def test_statements_are_good_for_one_purpose() -> None:
    signature = sign_statement(ALICE, "seal/1", b"payload")
    assert verify_statement(ALICE.hotkey, "seal/1", b"payload", signature)
    for hotkey, purpose, payload in (
        (BOB.hotkey, "seal/1", b"payload"),
        (ALICE.hotkey, "seal/2", b"payload"),
        (ALICE.hotkey, "seal/1", b"payloaD"),
        (ALICE.hotkey, "seal/1p", b"ayload"),
        ("nobody", "seal/1", b"payload"),
    ):
        assert not verify_statement(hotkey, purpose, payload, signature)
    assert not verify_statement(ALICE.hotkey, "seal/1", b"payload", signature[:-1])
    assert not verify_signature(ALICE.hotkey, b"payload", signature)


def test_wallets_are_bittensors_own_files(tmp_path: Path) -> None:
    made = create_wallet("cold", "hot", tmp_path)
    theirs = Wallet("cold", "hot", str(tmp_path))
    assert theirs.hotkey.ss58_address == made.hotkey
    assert theirs.coldkeypub.ss58_address == made.coldkey != made.hotkey
    second = create_wallet("cold", "hot2", tmp_path)
    assert (second.coldkey, second.hotkey != made.hotkey) == (made.coldkey, True)
    loaded = load_wallet("cold", "hot", tmp_path)
    assert (loaded.hotkey, loaded.coldkey) == (made.hotkey, made.coldkey)
    assert verify_signature(made.hotkey, b"x", loaded.sign(b"x"))
    assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.rglob("*") if path.is_file())


def test_a_wallet_that_cannot_be_used_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"doesn't exist.*iota wallet new --wallet.name cold"):
        load_wallet("cold", "hot", tmp_path)
    create_wallet("cold", "hot", tmp_path)
    with pytest.raises(ConfigError, match="already exists"):
        create_wallet("cold", "hot", tmp_path)
    (tmp_path / "cold/hotkeys/hot").write_text("junk")
    with pytest.raises(ConfigError, match="can't be read"):
        load_wallet("cold", "hot", tmp_path)
    (tmp_path / "cold/hotkeys/hot").write_bytes(b"$NACLsecret")
    with pytest.raises(ConfigError, match="encrypted"):
        load_wallet("cold", "hot", tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="can't be written"):
        create_wallet("cold", "hot", tmp_path / "file")
    with pytest.raises(ConfigError):
        load_wallet("a/b/c", "default", tmp_path)
