"""Where an S3 bucket is and who may sign for it: URLs and headers by botocore's own signers, with a clock that can be given.

``s3://BUCKET[/PREFIX]``; without an endpoint it is AWS's of the region. Credentials come as operators expect: from the
environment, the shared files, the machine's role, or a file of that form that only its owner can read. Signing does no I/O;
what expires is renewed by :meth:`S3Signer.refresh`, which blocks.
"""

from __future__ import annotations

import hashlib
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote, urlencode, urlsplit

from botocore.auth import SIGV4_TIMESTAMP, S3SigV4Auth, S3SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.exceptions import BotoCoreError
from botocore.session import Session

from subnet.errors import ConfigError
from subnet.logs import REDACTOR
from subnet.timing import SYSTEM_CLOCK, Clock

SCHEME = "s3://"
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.\-]{1,61}[a-z0-9]")
_PREFIX = re.compile(r"[A-Za-z0-9_\-][A-Za-z0-9_.\-]*(?:/[A-Za-z0-9_\-][A-Za-z0-9_.\-]*)*")
_MAX_PREFIX = 256
DEFAULT_REGION = "us-east-1"


def is_s3(url: str) -> bool:
    return url.startswith(SCHEME)


@dataclass(frozen=True)
class S3Place:
    """A prefix of a bucket behind an endpoint."""

    bucket: str
    prefix: str
    endpoint: str
    """Empty: AWS's."""
    region: str = DEFAULT_REGION

    @classmethod
    def parse(cls, url: str, *, endpoint: str = "", region: str = "") -> S3Place:
        bucket, _, prefix = url.removeprefix(SCHEME).partition("/")
        prefix = prefix.strip("/")
        if not is_s3(url) or not _BUCKET.fullmatch(bucket):
            raise ConfigError(f"{url!r} names no bucket", hint="such as s3://my-bucket/a-prefix, at least 3 letters")
        if prefix and (len(prefix) > _MAX_PREFIX or not _PREFIX.fullmatch(prefix)):
            raise ConfigError(f"the prefix {prefix!r} is not allowed", hint="letters, digits, - _ . and /")
        parts = urlsplit(endpoint)
        if endpoint and (parts.scheme not in ("http", "https") or not parts.netloc or parts.query or parts.username):
            raise ConfigError(f"--store.endpoint {endpoint!r} is no endpoint", hint="such as https://s3.example.org")
        return cls(bucket, prefix, endpoint.rstrip("/"), region or DEFAULT_REGION)

    def __str__(self) -> str:
        return f"{SCHEME}{self.bucket}{'/' if self.prefix else ''}{self.prefix}"

    @property
    def base_url(self) -> str:
        """URL of the bucket."""
        if self.endpoint:
            return f"{self.endpoint}/{self.bucket}"
        if "." in self.bucket:  # no certificate covers it as part of a host name
            return f"https://s3.{self.region}.amazonaws.com/{self.bucket}"
        return f"https://{self.bucket}.s3.{self.region}.amazonaws.com"

    def key(self, name: str) -> str:
        return f"{self.prefix}/{name}" if self.prefix else name

    def url(self, key: str = "", query: Mapping[str, str | int] | None = None) -> str:
        path = f"/{quote(key, safe='/-_.~')}" if key or not urlsplit(self.base_url).path else ""
        return f"{self.base_url}{path}" + (f"?{urlencode(query, quote_via=quote)}" if query else "")


class _QueryAuth(S3SigV4QueryAuth):
    """botocore's signer of URLs, at a time that is given."""

    def __init__(self, credentials: Any, region: str, ttl_s: int, now: datetime) -> None:
        super().__init__(credentials, "s3", region, expires=ttl_s)
        self._now = now

    def add_auth(self, request: Any) -> None:
        _sign_at(self, request, self._now)


class _HeaderAuth(S3SigV4Auth):
    """botocore's signer of headers, at a time that is given."""

    def __init__(self, credentials: Any, region: str, now: datetime) -> None:
        super().__init__(credentials, "s3", region)
        self._now = now

    def add_auth(self, request: Any) -> None:
        _sign_at(self, request, self._now)


def _sign_at(auth: Any, request: Any, now: datetime) -> None:
    """What botocore's ``add_auth`` does, at another time than its own."""
    request.context["timestamp"] = now.strftime(SIGV4_TIMESTAMP)
    auth._modify_request_before_signing(request)
    to_sign = auth.string_to_sign(request, auth.canonical_request(request))
    auth._inject_signature_to_request(request, auth.signature(to_sign, request))


class S3Signer:
    """Signs for one place; ``credentials`` are botocore's."""

    def __init__(self, place: S3Place, credentials: Any, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self.place, self.clock = place, clock
        self._credentials = credentials
        self.frozen: Any = credentials.get_frozen_credentials()
        """Access key, secret and token as they are now; ours alone, never logged."""
        REDACTOR.add_secret(self.frozen.secret_key)

    def at(self, clock: Clock, *, prefix: str | None = None) -> S3Signer:
        """The same with another clock, or for another prefix of the bucket."""
        place = self.place if prefix is None else replace(self.place, prefix=prefix)
        return S3Signer(place, self._credentials, clock=clock)

    def refresh(self) -> None:
        """Take over renewed credentials (of a role); may ask the network."""
        self.frozen = self._credentials.get_frozen_credentials()

    def presign(
        self,
        method: str,
        key: str,
        *,
        ttl_s: float,
        headers: Mapping[str, str] | None = None,
        query: Mapping[str, str | int] | None = None,
    ) -> tuple[str, int]:
        """A URL for exactly this method, key, query and these headers; and when it expires, in seconds since 1970."""
        now_s = self.clock.wall_ns() / 1e9
        request = AWSRequest(method=method, url=self.place.url(key, query), headers=dict(headers or {}))
        auth = _QueryAuth(self.frozen, self.place.region, max(1, int(ttl_s)), datetime.fromtimestamp(now_s, UTC))
        auth.add_auth(request)
        return cast("str", request.url), int(now_s + ttl_s)

    def signed(
        self,
        method: str,
        key: str = "",
        *,
        query: Mapping[str, str | int] | None = None,
        headers: Mapping[str, str] | None = None,
        body: bytes = b"",
    ) -> tuple[str, dict[str, str]]:
        """A request of the owner's own: the URL, and the headers to send with it."""
        own = dict(headers or {}) | {"X-Amz-Content-SHA256": hashlib.sha256(body).hexdigest()}
        request = AWSRequest(method=method, url=self.place.url(key, query), headers=own, data=body)
        now = datetime.fromtimestamp(self.clock.wall_ns() / 1e9, UTC)
        _HeaderAuth(self.frozen, self.place.region, now).add_auth(request)
        return cast("str", request.url), {name: str(value) for name, value in request.headers.items()}


def find_credentials(file: Path | None = None) -> Any:
    """botocore's credentials: out of ``file`` (the form of ``~/.aws/credentials``), else wherever botocore finds some."""
    session = Session()
    if file is not None:
        path = file.expanduser()
        try:
            mode = path.stat().st_mode
        except OSError as error:
            raise ConfigError(f"--store.credentials {path} can't be read: {error.strerror}") from error
        if stat.S_IMODE(mode) & 0o077:
            raise ConfigError(f"--store.credentials {path} can be read by others", hint=f"chmod 600 {path}")
        session.set_config_variable("credentials_file", str(path))
    try:
        resolver: Any = session.get_component("credential_provider")
        if file is not None:  # this file or nothing: not what the environment has for something else
            resolver.providers = [
                provider for provider in resolver.providers if provider.METHOD == "shared-credentials-file"
            ]
        found: Any = resolver.load_credentials()
    except BotoCoreError as error:
        raise ConfigError(f"no credentials for the object store: {error}") from error
    if found is None:
        where = f"no [default] in {file}" if file is not None else "none found"
        hint = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment, or --store.credentials FILE"
        raise ConfigError(f"credentials for the object store: {where}", hint=hint)
    return found
