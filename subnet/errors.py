"""The error tree: each class knows its wire ``code``, whether a retry can help, and what to do about it.

    IotaError                    code            retryable  HTTP
      ConfigError                bad_config      no         400   a value in a file or flag; exit status 2
      InputError                 bad_input       no         400   foreign bytes that don't fit the schema
        TooLarge                 too_large       no         413
        HashMismatch             hash_mismatch   no         409
        VersionUnsupported       version_unsupported no     426
      Refused                    (the peer's)    (peer's)   (any) the other side said no, with its reason
      AuthFailed                 unauthorized    no         401   subclasses in subnet.protocol.signing
      NotFound                   not_found       no         404
      Exists                     exists          no         409   a write-once key is taken
      Expired                    expired         yes        403   a presigned URL is too old: ask for another
      Busy                       busy            yes        503   try again after ``retry_after_s``
      OutOfSpace                 out_of_space    no         507
      Unreachable                unreachable     yes        -     connection failed, reset, or deadline passed
        DeadlinePassed           deadline        yes        504
      ChainRefused               (chain's name)  no         -     see subnet.chain.base
      Corrupt                    corrupt         no         500   our own file fails its hash; says where

Everything that crosses a wire as a refusal is a :class:`Refusal`; nothing is swallowed.
"""

from __future__ import annotations

import msgspec


class Refusal(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a peer is told when it is refused.

    ``retry_after`` is in seconds; None means that a retry cannot help.
    """

    code: str
    reason: str
    retry_after: float | None = None
    hint: str = ""


class IotaError(Exception):
    """Base of all our errors. ``str(error)`` is one line for a person."""

    code = "internal"
    retryable = False
    http_status = 500

    def __init__(self, reason: str, *, hint: str = "", retry_after_s: float | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.hint = hint
        self.retry_after_s = retry_after_s if retry_after_s is not None else (1.0 if self.retryable else None)

    def __str__(self) -> str:
        return f"{self.reason} ({self.hint})" if self.hint else self.reason

    def refusal(self) -> Refusal:
        return Refusal(code=self.code, reason=self.reason, retry_after=self.retry_after_s, hint=self.hint)


class ConfigError(IotaError):
    code, http_status = "bad_config", 400


class InputError(IotaError):
    code, http_status = "bad_input", 400


class TooLarge(InputError):
    code, http_status = "too_large", 413


class HashMismatch(InputError):
    code, http_status = "hash_mismatch", 409


class VersionUnsupported(InputError):
    code, http_status = "version_unsupported", 426


class AuthFailed(IotaError):
    code, http_status = "unauthorized", 401


class NotFound(IotaError):
    code, http_status = "not_found", 404


class Exists(IotaError):
    code, http_status = "exists", 409


class Expired(IotaError):
    code, http_status, retryable = "expired", 403, True


class Busy(IotaError):
    code, http_status, retryable = "busy", 503, True


class OutOfSpace(IotaError):
    code, http_status = "out_of_space", 507


class Unreachable(IotaError):
    code, http_status, retryable = "unreachable", 502, True


class DeadlinePassed(Unreachable):
    code, http_status = "deadline", 504


class Corrupt(IotaError):
    code = "corrupt"


class Refused(IotaError):
    """The other side refused; carries its refusal as it was said."""

    def __init__(self, refusal: Refusal, *, status: int = 0, who: str = "") -> None:
        super().__init__(
            f"{who + ': ' if who else ''}{refusal.reason}", hint=refusal.hint, retry_after_s=refusal.retry_after
        )
        self.code = refusal.code
        self.status = status
        self.retryable = refusal.retry_after is not None
        if not self.retryable:
            self.retry_after_s = None
