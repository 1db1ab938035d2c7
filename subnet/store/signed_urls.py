"""A URL of the embedded store is good for exactly what was signed: method, path, every parameter, until it expires.

HMAC-SHA256 with a secret that the store and its owner share. Altering anything is ``bad_grant``; time alone is
``expired``, which a new grant cures.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import parse_qsl

from subnet.errors import AuthFailed, ConfigError, Expired
from subnet.store.base import Grant, Hold, check_blob, check_name
from subnet.store.disk import atomic_write
from subnet.timing import SYSTEM_CLOCK, TIMEOUTS, Clock
from subnet.words import BlobHash

_DOMAIN = "iota/store/1"
_MIN_SECRET_BYTES = 16


class BadGrant(AuthFailed):
    code, http_status = "bad_grant", 403


class StoreSigner:
    """Mints URLs (the owner) and checks them (the store); both hold the secret."""

    def __init__(self, secret: bytes, base_url: str, *, clock: Clock = SYSTEM_CLOCK) -> None:
        if len(secret) < _MIN_SECRET_BYTES:
            raise ConfigError(f"the store's secret has {len(secret)} bytes", hint=f"at least {_MIN_SECRET_BYTES}")
        self._secret = secret
        self._clock = clock
        self.base_url = base_url.rstrip("/")

    def mint(self, method: str, path: str, params: Mapping[str, str | int], *, ttl_s: float) -> tuple[str, int]:
        """The URL and when it expires, in seconds since 1970."""
        expires_s = int(self._clock.wall_ns() / 1e9 + ttl_s)
        fields = {key: str(value) for key, value in params.items()} | {"expires": str(expires_s)}
        query = "&".join(f"{key}={value}" for key, value in fields.items())
        return f"{self.base_url}{path}?{query}&sig={self._sign(method, path, fields)}", expires_s

    def check(self, method: str, path: str, query: str) -> dict[str, str]:
        """The signed parameters of a request, or :class:`BadGrant` or :class:`Expired`."""
        pairs = parse_qsl(query, keep_blank_values=True, max_num_fields=16)
        params = dict(pairs)
        signature = params.pop("sig", "")
        if not signature:
            raise BadGrant("this URL isn't signed", hint="ask the store's owner for a grant")
        if len(params) + 1 != len(pairs) or not hmac.compare_digest(
            signature.encode(), self._sign(method, path, params).encode()
        ):
            raise BadGrant("this URL isn't what was signed", hint="use a grant as it is, for its own method")
        expires_s = int(params.pop("expires"))
        late_s = self._clock.wall_ns() / 1e9 - expires_s
        if late_s > 0:
            raise Expired(f"this URL expired {late_s:.0f} s ago", hint="ask for a new grant")
        return params

    def presign_put(self, blob: BlobHash, size_bytes: int, hold: Hold, *, ttl_s: float = TIMEOUTS.url_ttl_s) -> Grant:
        hold.check()
        params = {"size": size_bytes, "retention": hold.retention, "label": hold.label, "horizon": hold.horizon}
        url, expires_s = self.mint("PUT", f"/blob/{check_blob(blob)}", params, ttl_s=ttl_s)
        return Grant(url, "PUT", {}, blob, size_bytes, expires_s)

    def presign_get(self, blob: BlobHash, size_bytes: int, *, ttl_s: float = TIMEOUTS.url_ttl_s) -> Grant:
        url, expires_s = self.mint("GET", f"/blob/{check_blob(blob)}", {"size": size_bytes}, ttl_s=ttl_s)
        return Grant(url, "GET", {}, blob, size_bytes, expires_s)

    def presign_put_named(
        self, name: str, content: BlobHash, size_bytes: int, *, ttl_s: float = TIMEOUTS.url_ttl_s
    ) -> Grant:
        check_name(name)
        params = {"size": size_bytes, "hash": check_blob(content)}
        url, expires_s = self.mint("PUT", f"/named/{name}", params, ttl_s=ttl_s)
        return Grant(url, "PUT", {}, content, size_bytes, expires_s)

    def _sign(self, method: str, path: str, params: Mapping[str, str]) -> str:
        lines = [_DOMAIN, method, path, *(f"{key}={params[key]}" for key in sorted(params))]
        return hmac.new(self._secret, "\n".join(lines).encode(), "sha256").hexdigest()


def load_or_create_secret(path: Path) -> bytes:
    """The secret in a file only its owner can read; made on first use."""
    try:
        if not path.exists():
            atomic_write(path, secrets.token_hex(32).encode() + b"\n", mode=0o600)
        return bytes.fromhex(path.read_text().strip())
    except (OSError, ValueError) as error:
        hint = "delete the file to make it anew"
        raise ConfigError(f"the store's secret in {path} can't be used: {error}", hint=hint) from error
