"""Which version of the protocol two sides speak: the newest that both know, or a refusal that says who is to be updated.

A validator says its range in ``hello``; who asks names the version it speaks in each request. Between two versions that share
none nothing is guessed: ``version_unsupported`` without a time to try again.
"""

from __future__ import annotations

from subnet.errors import Refusal, VersionUnsupported
from subnet.words import PROTOCOL_OLDEST, PROTOCOL_VERSION


def agree(their_min: int, their_max: int, who: str) -> int:
    """The newest version that both speak. ``who``: the other side, for the message. :class:`VersionUnsupported` if none."""
    if max(their_min, PROTOCOL_OLDEST) <= min(their_max, PROTOCOL_VERSION):
        return min(their_max, PROTOCOL_VERSION)
    older_is_here = their_min > PROTOCOL_VERSION
    hint = "update iota here" if older_is_here else f"{who} is older: ask its operator to update, or use its version"
    raise VersionUnsupported(
        f"{who} speaks protocol {_range(their_min, their_max)}, this program {_range(PROTOCOL_OLDEST, PROTOCOL_VERSION)}",
        hint=hint,
    )


def refusal_of(version: int) -> Refusal | None:
    """What whoever asks in this version is told; None where it is spoken here."""
    if PROTOCOL_OLDEST <= version <= PROTOCOL_VERSION:
        return None
    hint = (
        "update iota there"
        if version < PROTOCOL_OLDEST
        else "this validator is older: use its version, or ask its operator"
    )
    return Refusal(
        VersionUnsupported.code,
        f"protocol version {version}, this validator speaks {_range(PROTOCOL_OLDEST, PROTOCOL_VERSION)}",
        None,
        hint,
    )


def require_version(version: int) -> None:
    """:class:`VersionUnsupported` for a request in a version that isn't spoken here."""
    refusal = refusal_of(version)
    if refusal is not None:
        raise VersionUnsupported(refusal.reason, hint=refusal.hint)


def _range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first} to {last}"
