"""What a validator tells of its policy, and how it is asked to change it: ``GET`` and ``POST /v1/policy``."""

from __future__ import annotations

import msgspec

from subnet.policy.policy import SubnetPolicy
from subnet.policy.text import LIMIT_POLICY_BYTES

LIMIT_REQUEST_BYTES = LIMIT_POLICY_BYTES


class PolicyLine(msgspec.Struct, frozen=True):
    """A policy of one validator, and from when on."""

    policy: SubnetPolicy
    digest: str
    since_s: float
    """Wall time; 0: since the validator was set up."""
    since_block: int
    """As it was expected when it was applied; 0: since the validator was set up."""
    by: str
    """Hotkey that had it applied."""
    applied_s: float


class PolicyView(msgspec.Struct, frozen=True):
    """``GET /v1/policy``; public."""

    time_s: float
    in_force: PolicyLine
    pending: PolicyLine | None
    """It takes effect at its ``since_s``."""
    history: tuple[PolicyLine, ...]
    """The newest ones, oldest first, the one in force and the pending one included."""


class PolicyRequest(msgspec.Struct, frozen=True):
    """``POST /v1/policy``, signed by the validator's own hotkey or the subnet owner's."""

    policy: SubnetPolicy
    base: str
    """Digest of the policy that this one was made from: refused if another one is in force by now."""
