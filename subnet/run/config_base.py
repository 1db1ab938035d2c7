"""What every section of a run file is: a frozen struct whose construction checks it, with one line for each mistake."""

from __future__ import annotations

import msgspec

from subnet.errors import ConfigError


def check(ok: bool, key: str, value: object, allowed: str) -> None:
    """Raises :class:`ConfigError` naming the key, the value and what is allowed."""
    if not ok:
        raise ConfigError(f"{key} = {value!r} is not allowed", hint=f"allowed: {allowed}")


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=False):
    """A section of a run file."""
