"""One policy for a subnet: what work pays, how scores fade, what audits a run must have, penalties, burn, admission.

Frozen and checked; a file of it is ``policy.toml`` (:mod:`subnet.policy.text`), what one live change may do is in
:mod:`subnet.policy.change`. Validators of one subnet should share one: ``digest`` tells whether they do.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Literal

import msgspec

from subnet.policy.score import ScorePolicy, WorkPolicy
from subnet.policy.values import Plain, Value, check_values, choice, type_of, values_of

FORMAT = 1
"""Of policy files."""


class AuditRules(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a run's own ``[audit]`` must have at least to be taken, and what a mismatch costs."""

    required: Annotated[
        Literal["none", "probation", "all"],
        choice(
            "Whose work a run must have redone before it is sealed: nobody's (audits may be off), that of new and suspected "
            "hotkeys, or everybody's. A run with less is refused when it is submitted. Raise it where miners aren't all yours.",
            "none",
            "probation",
            "all",
        ),
    ] = "none"
    min_rate: Annotated[
        float,
        Value(
            "share",
            0.001,
            1.0,
            "Smallest audit.rate of a run whose audits are on probation: never 0, or whoever is past it could lie for nothing.",
            factor=4.0,
        ),
    ] = 0.001
    min_probation_items: Annotated[
        int,
        Value(
            "items",
            1,
            2**20,
            "Smallest audit.probation_items of a run: so many items of a newcomer are redone, and right, before its word is taken.",
            factor=4.0,
        ),
    ] = 1
    fault_after_items: Annotated[
        int,
        Value(
            "items",
            1,
            10**9,
            "A first mismatch after so many clean audited items is a fault (unpaid), not a crime (convicted): memory does fail. "
            "Less lets a liar earn its first lie.",
            factor=4.0,
        ),
    ] = 1000
    unopened_max: Annotated[
        int,
        Value(
            "audits",
            1,
            100,
            "Audits for which a member didn't open evidence that it had receipted: so many are faults, one more is a conviction.",
            step=2,
        ),
    ] = 2
    lost_max: Annotated[
        int,
        Value(
            "audits",
            1,
            1000,
            "Audits for which its maker says that evidence is lost: each so many are a fault.",
            step=4,
        ),
    ] = 4
    quarantine_retry_s: Annotated[
        float,
        Value(
            "s",
            1.0,
            3600.0,
            "How long a hotkey whose case is open is told to wait before it asks to join again. The quarantine ends with the case.",
            factor=4.0,
        ),
    ] = 30.0

    def __post_init__(self) -> None:
        check_values(self, "audit")


class WeightsRules(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What becomes of scores on the chain."""

    burn_share: Annotated[
        float,
        Value(
            "share",
            0.0,
            1.0,
            "Part of the weights that goes to the subnet owner's uid, where it is burned. 0: miners get all.",
            step=0.25,
        ),
    ] = 0.0
    version_key: Annotated[
        int,
        Value("-", 0, 2**63 - 1, "Sent with weights; the chain refuses one below the subnet's own."),
    ] = 0

    def __post_init__(self) -> None:
        check_values(self, "weights")


class AdmissionRules(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who is dealt work."""

    min_stake: Annotated[
        float,
        Value(
            "TAO or alpha",
            0.0,
            1e6,
            "Stake that a miner's hotkey needs, as the metagraph has it, to join a run. 0: registration is enough, and probation "
            "and unproven leases are what a new hotkey costs. Who is a member already stays one.",
            factor=4.0,
            base=10.0,
        ),
    ] = 0.0

    def __post_init__(self) -> None:
        check_values(self, "admission")


class SubnetPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    work: WorkPolicy = WorkPolicy()
    score: ScorePolicy = ScorePolicy()
    audit: AuditRules = AuditRules()
    weights: WeightsRules = WeightsRules()
    admission: AdmissionRules = AdmissionRules()

    def values(self) -> dict[str, Plain]:
        """By ``section.name``, in order; whole numbers of a share or a time as floats."""
        found: dict[str, Plain] = {}
        for heading in SECTIONS:
            section = getattr(self, heading)
            for name in values_of(type(section)):
                value: Plain = getattr(section, name)
                found[f"{heading}.{name}"] = float(value) if type_of(type(section), name) is float else value
        return found

    @property
    def digest(self) -> str:
        """SHA-256 of all values, hexadecimal: two policies are the same if this is."""
        text = "".join(f"{name} = {value!r}\n" for name, value in self.values().items())
        return hashlib.sha256(f"iota policy {FORMAT}\n{text}".encode()).hexdigest()


SECTIONS: dict[str, type] = {
    "work": WorkPolicy,
    "score": ScorePolicy,
    "audit": AuditRules,
    "weights": WeightsRules,
    "admission": AdmissionRules,
}
SHORT_DIGEST = 12
"""So many digits are shown."""


def short(digest: str) -> str:
    return digest[:SHORT_DIGEST]
