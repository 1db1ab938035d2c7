"""What a Bittensor adapter needs of a library that speaks to a node: read state at a block, send a call, know the runtime.

Two libraries stand behind it (:mod:`subnet.chain.bittensor_sdk`, :mod:`subnet.chain.substrate`); everything about
subnets is above it, once, in :mod:`subnet.chain.subtensor`. Hashes are ``0x`` hex. Values are what SCALE decodes to:
ints, bools, strings, lists, dicts. Errors are those of :mod:`subnet.errors` and
:class:`~subnet.chain.refusals.ChainRefused`; a node that gives no verdict is ``Unreachable``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from subnet.chain.base import KeySigner
from subnet.errors import InputError
from subnet.timing import Deadline

SUBTENSOR = "SubtensorModule"


class Item(NamedTuple):
    """One entry of the node's storage: its pallet, its name, and the keys where it is a map."""

    pallet: str
    name: str
    keys: tuple[int | str, ...] = ()

    def __str__(self) -> str:
        return f"{self.pallet}.{self.name}"


class RawCall(NamedTuple):
    """A call as the runtime's metadata names it, and its parameters by name."""

    pallet: str
    name: str
    params: Mapping[str, object]

    def __str__(self) -> str:
        return f"{self.pallet}.{self.name}"


class Head(NamedTuple):
    """A block by number and hash."""

    number: int
    hash: str


class RuntimeVersion(NamedTuple):
    spec_name: str
    spec_version: int
    transaction_version: int


class Inclusion(NamedTuple):
    """Where a call that succeeded was included; ``extras`` is what the library adds, such as ``reveal_round``."""

    block: int
    hash: str
    extras: Mapping[str, object] = {}


class RuntimeMismatch(InputError):
    """The node's runtime lacks what this software asks for, or has it in another shape."""

    code, http_status = "runtime_mismatch", 502

    def __init__(self, reason: str) -> None:
        super().__init__(reason, hint="see what fits: iota doctor --chain; the other adapter may: substrate+ws://...")


class SubtensorLink(Protocol):
    """The whole of what is asked of a library. Every call ends by its deadline."""

    @property
    def library(self) -> str:
        """Name and version, for people."""
        ...

    @property
    def endpoint(self) -> str: ...

    async def runtime(self, deadline: Deadline) -> RuntimeVersion: ...

    async def head(self, deadline: Deadline) -> Head:
        """The best block, which may still be replaced by another."""
        ...

    async def finalized(self, deadline: Deadline) -> Head: ...

    async def hash_of(self, number: int, deadline: Deadline) -> str: ...

    async def constant(self, pallet: str, name: str, deadline: Deadline) -> object:
        """None where the runtime has no such constant."""
        ...

    async def read(self, items: Sequence[Item], at: str, deadline: Deadline) -> list[object]:
        """The items' values at block hash ``at``, in order: the default, or None, for what isn't stored."""
        ...

    async def read_map(
        self, pallet: str, name: str, prefix: Sequence[int | str], at: str, deadline: Deadline
    ) -> list[tuple[object, object]]:
        """All (last key, value) pairs of a map below ``prefix``."""
        ...

    async def lacking(self, items: Sequence[Item], calls: Sequence[RawCall], deadline: Deadline) -> list[str]:
        """Which of these storage items and calls (and their parameters) the node's runtime doesn't have."""
        ...

    async def submit(self, call: RawCall, signer: KeySigner, deadline: Deadline) -> Inclusion:
        """Sign, send, wait for inclusion; a failed dispatch raises ``ChainRefused`` with the runtime's name."""
        ...

    async def close(self) -> None: ...
