"""Who said it: requests signed by the Bittensor SDK's btauth/1, statements signed by purpose, wallets in its files.

A request is bound to method, path with query, body, time, sender and receiver; each way to fail has a code of its own:

    AuthFailed (unauthorized)
      Unsigned          unsigned          no signature headers at all
      MalformedAuth     malformed_auth    headers that can't be read
      StaleRequest      stale_request     signed too long ago
      FutureRequest     future_request    signed by a clock that is ahead
      ReplayedRequest   replayed_request  this nonce was already accepted
      WrongReceiver     wrong_receiver    signed for another hotkey, or for none
      BadSignature      bad_signature     path, query, body or sender isn't what was signed
      UnknownHotkey     unknown_hotkey    a true signature of a hotkey that isn't registered

Besides the chain adapter this is the only module that imports bittensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from bittensor import Wallet, http_auth
from bittensor.signing import Signer as KeypairLike
from bittensor.sp_core import KeyfileError, Keypair
from blake3 import blake3

from subnet.errors import AuthFailed, ConfigError
from subnet.timing import SYSTEM_CLOCK, TIMEOUTS, Clock
from subnet.words import Hotkey

PURPOSE_PEER_OPEN = "peer/open/1"
PURPOSE_PEER_ACCEPT = "peer/accept/1"

_STATEMENT = b"iota/statement/1\0"
_HEADERS = tuple(
    (name, name.lower())
    for name in (
        http_auth.HEADER_VERSION,
        http_auth.HEADER_HOTKEY,
        http_auth.HEADER_RECEIVER,
        http_auth.HEADER_NONCE,
        http_auth.HEADER_CRYPTO,
        http_auth.HEADER_SIGNATURE,
    )
)


class Unsigned(AuthFailed):
    code = "unsigned"


class MalformedAuth(AuthFailed):
    code = "malformed_auth"


class StaleRequest(AuthFailed):
    code = "stale_request"


class FutureRequest(AuthFailed):
    code = "future_request"


class ReplayedRequest(AuthFailed):
    code = "replayed_request"


class WrongReceiver(AuthFailed):
    code = "wrong_receiver"


class BadSignature(AuthFailed):
    code = "bad_signature"


class UnknownHotkey(AuthFailed):
    code, http_status = "unknown_hotkey", 403


SIGN_ANEW_CODES = frozenset({StaleRequest.code, FutureRequest.code, ReplayedRequest.code})
"""Refusals that a fresh signature with a corrected clock can cure."""


class Signer:
    """A hotkey that can sign; ``coldkey`` is the address of its owner where known, else empty."""

    def __init__(self, keypair: KeypairLike, *, coldkey: str = "") -> None:
        self._keypair = keypair
        self._last_nonce_ns = 0
        self.hotkey = Hotkey(str(keypair.ss58_address))
        self.coldkey = coldkey

    @classmethod
    def from_uri(cls, uri: str) -> Signer:
        """A key derived from a URI such as ``//Alice``: for tests and local chains, anyone can derive it."""
        return cls(Keypair.create_from_uri(uri))

    def __repr__(self) -> str:
        return f"Signer({self.hotkey})"

    @property
    def keypair(self) -> KeypairLike:
        return self._keypair

    def sign(self, data: bytes) -> bytes:
        return bytes(self._keypair.sign(data))

    def sign_request(self, *, method: str, target: str, body: bytes, receiver: str, wall_ns: int) -> dict[str, str]:
        """The headers of a request; nonces of one signer strictly grow, whatever the clock does."""
        self._last_nonce_ns = max(wall_ns, self._last_nonce_ns + 1)
        return http_auth.sign(
            self._keypair,
            method=method,
            path=target,
            body=body,
            receiver_ss58=receiver,
            nonce_ns=self._last_nonce_ns,
        )

    def follow_clock(self, wall_ns: int) -> None:
        """Forget nonces ahead of a corrected clock, so that the next one isn't in the future again."""
        self._last_nonce_ns = min(self._last_nonce_ns, wall_ns)


def verify_signature(hotkey: str, data: bytes, signature: bytes) -> bool:
    """False also for an address or a signature that can't be one."""
    try:
        return bool(Keypair(ss58_address=hotkey).verify(data, signature))
    except ValueError:
        return False


def statement_digest(purpose: str, payload: bytes) -> bytes:
    """What is signed outside HTTP: the purpose is part of it, so no statement passes for another kind."""
    name = purpose.encode()
    return blake3(_STATEMENT + len(name).to_bytes(4, "little") + name + payload).digest()


def sign_statement(signer: Signer, purpose: str, payload: bytes) -> bytes:
    return signer.sign(statement_digest(purpose, payload))


def verify_statement(hotkey: str, purpose: str, payload: bytes, signature: bytes) -> bool:
    return verify_signature(hotkey, statement_digest(purpose, payload), signature)


class NonceStore(Protocol):
    def check_and_store(self, hotkey_ss58: str, nonce_ns: int) -> bool: ...


class RequestVerifier:
    """Checks requests to one receiver; remembers accepted nonces for as long as they are fresh."""

    def __init__(
        self,
        receiver: str,
        *,
        is_known: Callable[[str], bool],
        clock: Clock = SYSTEM_CLOCK,
        max_age_s: float = TIMEOUTS.request_age_s,
        max_skew_s: float = TIMEOUTS.request_skew_s,
        nonces: NonceStore | None = None,
    ) -> None:
        self.receiver = receiver
        self.clock = clock
        self._is_known = is_known
        self._max_age_s = max_age_s
        self._max_skew_s = max_skew_s
        self._nonces = nonces or http_auth.InMemoryNonceStore(retention=max(60.0, 2 * (max_age_s + max_skew_s)))

    def verify(self, headers: Mapping[str, str], body: bytes, *, method: str, target: str) -> Hotkey:
        """The sender's hotkey, or the :class:`AuthFailed` that says what is wrong."""
        hotkey = verify_request(
            headers,
            body,
            method=method,
            target=target,
            receiver=self.receiver,
            nonces=self._nonces,
            now_ns=self.clock.wall_ns(),
            max_age_s=self._max_age_s,
            max_skew_s=self._max_skew_s,
        )
        if not self._is_known(hotkey):
            raise UnknownHotkey(f"hotkey {hotkey} isn't registered here", hint="register it on this subnet")
        return hotkey


def verify_request(
    headers: Mapping[str, str],
    body: bytes,
    *,
    method: str,
    target: str,
    receiver: str,
    nonces: NonceStore,
    now_ns: int,
    max_age_s: float = TIMEOUTS.request_age_s,
    max_skew_s: float = TIMEOUTS.request_skew_s,
) -> Hotkey:
    """Authenticate a request as it was received (``target`` = raw path with query); the receiver is always bound."""
    named = {lower: value for name, lower in _HEADERS if (value := headers.get(name)) is not None}
    if not named:  # a mapping that minds case
        named = {key.lower(): value for key, value in headers.items() if key.lower().startswith("x-bittensor-")}
    if not named:
        raise Unsigned("the request isn't signed", hint="sign it with your hotkey (btauth/1)")
    try:
        caller = http_auth.verify(
            named,
            body,
            method=method,
            path=target,
            self_hotkey_ss58=receiver,
            max_age=max_age_s,
            allowed_skew=max_skew_s,
            require_receiver=True,
            nonce_store=nonces,
            now_ns=now_ns,
        )
    except http_auth.AuthError as error:
        raise _translate(error, named, now_ns) from error
    except UnicodeEncodeError as error:  # bytes that no signer sends: the library encodes before it checks
        raise MalformedAuth("the request's target or its signing headers aren't text") from error
    return Hotkey(caller.hotkey_ss58)


def _translate(error: http_auth.AuthError, headers: Mapping[str, str], now_ns: int) -> AuthFailed:
    reason = str(error)
    if isinstance(error, http_auth.MalformedAuth):
        return MalformedAuth(reason)
    if isinstance(error, http_auth.WrongReceiver):
        return WrongReceiver(reason, hint="sign for the hotkey that hello names")
    if isinstance(error, http_auth.StaleRequest):
        age_s = (now_ns - int(headers[http_auth.HEADER_NONCE.lower()])) / 1e9
        if age_s < 0:
            return FutureRequest(f"signed {-age_s:.1f} s in the future", hint="set your clock, or ask hello for ours")
        return StaleRequest(f"signed {age_s:.1f} s ago", hint="sign each try anew; set your clock")
    if isinstance(error, http_auth.ReplayedRequest):
        return ReplayedRequest(reason, hint="sign each try anew")
    if isinstance(error, http_auth.BadSignature):
        return BadSignature(reason, hint="sign method, path, query and body exactly as they are sent")
    return AuthFailed(reason)


def load_wallet(name: str, hotkey: str, path: str | Path) -> Signer:
    """The hotkey of a Bittensor wallet; :class:`ConfigError` with the remedy where it can't be used."""
    where = f"wallet {name}/{hotkey} in {path}"
    try:
        wallet = Wallet(name, hotkey, str(path))
        if not wallet.hotkey_file.exists_on_device():
            hint = f"create it: iota wallet new --wallet.name {name} --wallet.hotkey {hotkey} --wallet.path {path}"
            raise ConfigError(f"{where} doesn't exist", hint=hint)
        if wallet.hotkey_file.is_encrypted():
            raise ConfigError(f"{where}: the hotkey is encrypted", hint="a server needs an unencrypted hotkey")
        coldkey = ""
        if wallet.coldkeypub_file.exists_on_device():
            coldkey = str(wallet.coldkeypub.ss58_address)
        return Signer(wallet.hotkey, coldkey=coldkey)
    except (KeyfileError, ValueError, OSError) as error:
        raise ConfigError(f"{where} can't be read: {error}") from error


def create_wallet(name: str, hotkey: str, path: str | Path) -> Signer:
    """Write Bittensor's own key files, unencrypted: for local chains. The coldkey is made if the wallet has none.

    An existing hotkey is never overwritten: that is a :class:`ConfigError`.
    """
    where = f"wallet {name}/{hotkey} in {path}"
    try:
        wallet = Wallet(name, hotkey, str(path))
        if wallet.hotkey_file.exists_on_device():
            raise ConfigError(f"{where} already exists", hint="choose another name")
        if not wallet.coldkeypub_file.exists_on_device():
            wallet.create_new_coldkey(use_password=False, suppress=True)
        wallet.create_new_hotkey(use_password=False, suppress=True)
    except (KeyfileError, ValueError, OSError) as error:
        raise ConfigError(f"{where} can't be written: {error}") from error
    return load_wallet(name, hotkey, path)
