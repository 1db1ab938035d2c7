"""What all events of a journal are: frozen, encoded as arrays, told apart by the name of their class."""

from __future__ import annotations

import msgspec


class Event(msgspec.Struct, frozen=True, array_like=True, tag_field="kind"):
    """Base of all events; the tag is the class name."""
