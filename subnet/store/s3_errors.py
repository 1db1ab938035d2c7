"""Every answer of an S3 server is one of the contract's errors: what may help (a new grant, time, the right clock) is in it.

S3                                                     the contract
404 NoSuchKey                                          NotFound
412 PreconditionFailed                                 Exists (the key is taken)
403 expired, not yet valid, RequestTimeTooSkewed       Expired (a new grant may help; the clock is named)
401, 403 others                                        BadGrant (altered, for another key or size, wrong credentials)
400 BadDigest, a checksum that differs                 HashMismatch
413, EntityTooLarge                                    TooLarge
507, a quota                                           OutOfSpace
409 a conflict of writers, 429, 500, 503 SlowDown      Busy (retried)
502, 504, 408, RequestTimeout                          Unreachable (retried)
NoSuchBucket, a region, an unknown operation           ConfigError
the rest                                               Refused, with S3's own code
"""

from __future__ import annotations

import re
from email.utils import parsedate_to_datetime
from xml.etree import ElementTree

from subnet.errors import (
    Busy,
    ConfigError,
    Exists,
    Expired,
    HashMismatch,
    InputError,
    IotaError,
    NotFound,
    OutOfSpace,
    Refusal,
    Refused,
    TooLarge,
    Unreachable,
)
from subnet.store.signed_urls import BadGrant

XML_TYPES = ("application/xml", "text/xml")
CLOCK_HINT = "set this machine's clock right (NTP), then ask again"
_SKEWED_S = 60.0
_DIGESTS = (
    "BadDigest",
    "InvalidDigest",
    "XAmzContentSHA256Mismatch",
    "XAmzContentChecksumMismatch",
    "ContentMD5Mismatch",
)
_CONFLICTS = ("ConditionalRequestConflict", "OperationAborted")
_SHORT = ("IncompleteBody", "MissingContentLength", "EntityTooSmall", "InvalidRange", "KeyTooLongError")
_FULL = ("QuotaExceeded", "InsufficientStorage", "XMinioStorageFull", "EntityStorageFull")
_CONFIG = {
    "NoSuchBucket": "make the bucket (iota store prepare), or check its name",
    "PermanentRedirect": "give the bucket's own region with --store.region",
    "AuthorizationHeaderMalformed": "give the bucket's own region with --store.region",
    "NotImplemented": "iota store check says what this server lacks",
}


def xml_text(root: ElementTree.Element, name: str) -> str:
    """The text of the first element of that name, whatever its namespace; empty if there is none."""
    found = root.find(f".//{{*}}{name}")
    return "" if found is None else (found.text or "")


def parse_xml(body: bytes, what: str) -> ElementTree.Element:
    try:
        return ElementTree.fromstring(body)
    except ElementTree.ParseError as error:
        raise Unreachable(f"{what}: an answer that is no XML ({error})") from error


def s3_error(what: str, status: int, body: bytes, *, server_date: str = "", now_s: float | None = None) -> IotaError:
    """The error of an answer of 300 or more; ``body`` is S3's XML, or empty as with HEAD."""
    code, message = _code_and_message(body)
    text = f"{what}: {code or status}" + (f" ({message})" if message else "")
    if code in _CONFIG:
        return ConfigError(text, hint=_CONFIG[code])
    if code in _DIGESTS or ("checksum" in message.lower() and status == 400):
        return HashMismatch(text)
    if code in _FULL or status == 507:
        return OutOfSpace(text, hint="free some space, or raise the quota")
    if code == "EntityTooLarge" or status == 413:
        return TooLarge(text)
    if code in _SHORT or status in (411, 416):
        return InputError(text)
    if status == 412:
        return Exists(text)
    if status == 404:
        return NotFound(text)
    if status in (401, 403):
        return _not_allowed(text, code, message, _skew_s(server_date, now_s))
    if code == "RequestTimeout" or status in (408, 502, 504):
        return Unreachable(text)
    if code in _CONFLICTS or status in (429, 500, 503):
        return Busy(text)
    if 300 <= status < 400:
        return ConfigError(text, hint=_CONFIG["PermanentRedirect"])
    return Refused(Refusal(f"s3_{code or status}", text), status=status)


def _not_allowed(text: str, code: str, message: str, skew_s: float | None) -> IotaError:
    lower = f"{code} {message}".lower()
    apart = "" if skew_s is None or abs(skew_s) < _SKEWED_S else f"; this clock is {skew_s:+.0f} s off the store's"
    if code == "RequestTimeTooSkewed" or "not yet valid" in lower or "not valid yet" in lower:
        return Expired(f"{text}{apart}", hint=CLOCK_HINT)
    if ("expired" in lower and "token" not in lower) or code in ("ExpiredPresignRequest", "RequestExpired"):
        return Expired(f"{text}{apart}", hint=CLOCK_HINT if apart else "ask for a new grant")
    if code in ("InvalidAccessKeyId", "ExpiredToken", "InvalidToken"):
        return BadGrant(text, hint="check the credentials of the store's owner")
    return BadGrant(
        f"{text}{apart}", hint=CLOCK_HINT if apart else "use a grant as it is; the owner: check the credentials"
    )


def _code_and_message(body: bytes) -> tuple[str, str]:
    if not body.lstrip().startswith(b"<"):
        return "", ""
    try:
        root = ElementTree.fromstring(body)
    except ElementTree.ParseError:
        return "", ""
    message = re.sub(r"\s+", " ", xml_text(root, "Message")).strip()
    return xml_text(root, "Code").strip()[:64], message[:200]


def _skew_s(server_date: str, now_s: float | None) -> float | None:
    """Seconds by which ``now_s`` is ahead of the server's ``Date`` header."""
    if not server_date or now_s is None:
        return None
    try:
        return now_s - parsedate_to_datetime(server_date).timestamp()
    except (TypeError, ValueError):
        return None
