"""The coordinator's deadlines, in seconds, and the widths of its windows; the wait they belong to is in each line."""

from __future__ import annotations

import msgspec

from subnet.errors import ConfigError
from subnet.policy.policy import AuditRules
from subnet.timing import TIMEOUTS


class AuditPolicy(msgspec.Struct, frozen=True):
    """What the coordinator does about audits, beyond what the run file says (its ``[audit]``). Frozen; checked on construction."""

    evidence_s: float = TIMEOUTS.evidence_s
    """``AuditOpened`` until every wanted boundary is in the store, while the store is there; then it counts as missing."""
    evidence_tries: int = 3
    """So often in a row the same has to be missing, before a sealed partial is given up and its maker is said to refuse."""
    again_s: float = 2.0
    """After an audit that couldn't be done: pause until it is tried again."""
    roots_s: float = 3.0
    """Equally many coldkeys differ about a root: so long others of the stage are waited for, then the log is asked."""
    witness_s: float = TIMEOUTS.witness_s
    """``WitnessAsked`` until its word; then the next is asked. Also how long somebody to ask is waited for."""
    witnesses_max: int = 3
    """So many are asked; if none confirms or refutes, the case ends ``unconfirmed``."""
    fault_after_items: int = 1000
    """A first mismatch after so many clean audited items is a fault, not a crime."""
    unopened_max: int = 2
    """Audits for which evidence wasn't opened: so many are a fault, one more a conviction."""
    lost_max: int = 4
    """Audits for which its maker says that evidence is lost: each so many are a fault."""
    at_once: int = 8
    """Audits of sealed work that are open at a time, so that evidence doesn't crowd out work."""
    redo_at_once: int = 4
    """Audits given to the auditor at a time; those that a seal waits for come first."""
    follower_s: float = 30.0
    """How long an audit of another validator stays open: members put its evidence into the store in this time."""
    follower_at_once: int = 8
    """Audits that one other validator may have open."""
    quarantine_retry_s: float = 30.0
    """``retry_after`` of a hotkey whose case is open."""
    block_margin: int = 2
    """A window's audits are drawn from the block so many after the newest known one."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} = {getattr(self, name)} is not allowed", hint="allowed: 0 or more")
        counts = (
            "witnesses_max",
            "evidence_tries",
            "unopened_max",
            "lost_max",
            "at_once",
            "redo_at_once",
        )
        for name in counts:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} = {getattr(self, name)} is not allowed", hint="allowed: 1 or more")


def with_rules(audit: AuditPolicy, rules: AuditRules) -> AuditPolicy:
    """With what the subnet's policy says of penalties."""
    return msgspec.structs.replace(
        audit,
        fault_after_items=rules.fault_after_items,
        unopened_max=rules.unopened_max,
        lost_max=rules.lost_max,
        quarantine_retry_s=rules.quarantine_retry_s,
    )


class Policy(msgspec.Struct, frozen=True):
    """Frozen; checked on construction."""

    silence_s: float = TIMEOUTS.member_silence_s
    """A member unheard for so long is gone."""
    hung_s: float = TIMEOUTS.member_hung_s
    """And one whose heartbeats come, while its main process stands still for so long."""
    probe_quiet_s: float = 3.0
    """A probe without an answer (not: a refused one) counts only after so much silence."""
    answer_s: float = TIMEOUTS.not_accumulated_s
    """A member answers ``Revoking`` within this, or its partial is void: as long as silence takes, since a void costs a
    whole m-set, and who is dead is found out sooner."""
    lease_min_s: float = TIMEOUTS.lease_floor_s
    """No lease is revoked earlier."""
    lease_unknown_s: float = 60.0
    """Expected time of an item of a member and stage whose speed is unknown; also the most that is expected."""
    lease_factor: float = 3.0
    """A lease at this many times its expected time is revoked."""
    commit_s: float = TIMEOUTS.commit_s
    """``Frozen`` until a holder's commitment."""
    owner_s: float = TIMEOUTS.owner_s
    """``ReduceOrdered`` until all partitions are merged; then slices go through the store."""
    routed_s: float = 20.0
    """``StoreRouted`` until all partitions are merged; then owners are replaced."""
    fingerprint_s: float = TIMEOUTS.fingerprint_s
    """``SeedRevealed`` until a contributor's fingerprint."""
    check_s: float = TIMEOUTS.check_s
    """All fingerprints until a replica's check."""
    trace_s: float = 20.0
    """``TraceStarted`` until all slices are in the store."""
    replay_s: float = 5.0
    """``ReplayLeased`` until the same boundary is dealt for replay again."""
    snapshot_s: float = 120.0
    """``SnapshotOrdered`` until another replica is asked."""
    empty_stage_s: float = 20.0
    """A stage with nobody for so long gets a replica of a stage with several."""
    rebalance_factor: float = 1.25
    """Members move only if the pipeline gets so many times as fast by it."""
    rebalance_s: float = 60.0
    """And if that has been so, for the same stage, for so long,"""
    rebalance_steps: int = 3
    """and for so many steps;"""
    rebalance_gap_s: float = 60.0
    """and only so long after the last move: its effect has to be measured first."""
    back_off_s: float = 2.0
    """First ``retry_after`` of a hotkey that was gone silently; doubles with each absence."""
    back_off_max_s: float = 300.0
    window_extra: int = 3
    """Items a member of the first stage has ahead, beyond one for each stage."""
    window_s: float = 0.5
    """And as many more as it computes in this time: what a receipt and a lease take to travel."""
    window_hop_s: float = 0.5
    """And for each boundary on the way that goes through the store: a PUT, a receipt, a lease, a GET."""
    window_max: int = 64
    class_coldkeys: int = 2
    """Coldkeys that must report the same hardware class before it becomes the run's."""

    suspect_deaths: int = 2
    """Hotkeys lost while they had the same item: from then on it is dealt with care, and named."""
    suspect_wait_s: float = 2.0
    """How long such an item rests before it is dealt again; doubles with each further death."""
    suspect_wait_max_s: float = 300.0
    audit: AuditPolicy = AuditPolicy()

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if name == "audit":
                continue
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} = {getattr(self, name)} is not allowed", hint="allowed: 0 or more")
        if self.rebalance_factor <= 1:
            raise ConfigError(
                f"rebalance_factor = {self.rebalance_factor} is not allowed",
                hint="allowed: above 1, or members move for ever",
            )
