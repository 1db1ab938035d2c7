"""Whether this software, its library and a network fit, found out before an operator is deregistered for it.

Reads only. Each finding is one line with what to do; the check goes on after a failure where it can.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from subnet.chain import subtensor_calls as calls
from subnet.chain import subtensor_view as view
from subnet.chain.base import Chain, Hyperparameters, Metagraph
from subnet.chain.subtensor import SubtensorChain
from subnet.chain.subtensor_link import SUBTENSOR, Item
from subnet.chain.subtensor_weights import SCHEDULE_NAMES, STANDING_NAMES
from subnet.errors import IotaError
from subnet.timing import Deadline

Level = Literal["ok", "note", "bad"]
TESTED_SPECS = (461,)
"""Runtime versions whose recorded metadata the tests run against."""
SPEC_NAME = "node-subtensor"
CLOCK_APART_S = 30.0
"""Two drand rounds and some blocks: beyond it sealed weights open at the wrong time."""

NEEDED_ITEMS = tuple(
    [
        Item(SUBTENSOR, name, (1,))
        for name in dict.fromkeys(
            (*view.HYPERPARAMETER_NAMES, *view.SUBNET_NAMES, *SCHEDULE_NAMES, *STANDING_NAMES, "NetworksAdded")
        )
    ]
    + [
        Item(SUBTENSOR, "StakeThreshold"),
        Item(SUBTENSOR, "TaoWeight"),
        Item(SUBTENSOR, "CommitRevealWeightsVersion"),
        Item(SUBTENSOR, "Weights", (1, 0)),
        Item(SUBTENSOR, "TimelockedWeightCommits", (1, 0)),
        Item(SUBTENSOR, "Keys", (1, 0)),
        Item(SUBTENSOR, "BlockAtRegistration", (1, 0)),
        Item(SUBTENSOR, "Uids", (1, view.NOBODY)),
        Item(SUBTENSOR, "Axons", (1, view.NOBODY)),
        Item(SUBTENSOR, "Owner", (view.NOBODY,)),
        Item(SUBTENSOR, "TotalHotkeyAlpha", (view.NOBODY, 1)),
        Item("Commitments", "CommitmentOf", (1, view.NOBODY)),
    ]
)
"""All storage the adapters read."""


@dataclass(frozen=True)
class Finding:
    level: Level
    what: str
    hint: str = ""

    def __str__(self) -> str:
        return f"{self.what} ({self.hint})" if self.hint else self.what


@dataclass
class Findings:
    """What was found so far."""

    found: list[Finding] = field(default_factory=list[Finding])

    def ok(self, what: str) -> None:
        self.found.append(Finding("ok", what))

    def note(self, what: str, hint: str = "") -> None:
        self.found.append(Finding("note", what, hint))

    def bad(self, what: str, hint: str = "") -> None:
        self.found.append(Finding("bad", what, hint))

    @property
    def fits(self) -> bool:
        return all(finding.level != "bad" for finding in self.found)


@dataclass(frozen=True)
class Operator:
    """Whose place on the subnet is looked at; an empty hotkey: nobody's."""

    hotkey: str = ""
    register_command: str = ""
    version_key: int = 0


async def check_chain(
    chain: Chain,
    netuid: int,
    operator: Operator,
    deadline: Deadline,
    *,
    wall_s: Callable[[], float] = time.time,
) -> Findings:
    """All that can be found out without sending anything."""
    findings = Findings()
    try:
        if isinstance(chain, SubtensorChain):
            await _check_runtime(chain, findings, deadline)
            await _check_clock(chain, findings, deadline, wall_s)
        else:
            findings.ok(f"a local chain answers, at block {await chain.block(timeout_s=deadline.remaining_s())}")
        rules = await chain.hyperparameters(netuid, timeout_s=deadline.remaining_s())
        graph = await chain.metagraph(netuid, timeout_s=deadline.remaining_s())
        _check_subnet(netuid, rules, graph, findings)
        if rules.commit_reveal and isinstance(chain, SubtensorChain):
            await _check_sealing(chain, findings, deadline)
        if operator.hotkey:
            check_operator(graph, rules, operator, findings)
    except IotaError as error:
        findings.bad(error.reason, error.hint)
    return findings


async def _check_runtime(chain: SubtensorChain, findings: Findings, deadline: Deadline) -> None:
    link = chain.link
    runtime = await link.runtime(deadline)
    findings.ok(f"{link.library} speaks to {runtime.spec_name}, spec {runtime.spec_version}, at {link.endpoint}")
    if runtime.spec_name != SPEC_NAME:
        findings.bad(f"{link.endpoint} runs {runtime.spec_name}, not {SPEC_NAME}", "check --subtensor.chain_endpoint")
        return
    if runtime.spec_version not in TESTED_SPECS:
        tested = ", ".join(str(spec) for spec in TESTED_SPECS)
        findings.note(f"tested with spec {tested}, this is {runtime.spec_version}", "what is used is compared below")
    lacking = await link.lacking(NEEDED_ITEMS, calls.EXAMPLES, deadline)
    for missing in lacking:
        findings.bad(f"the runtime has no {missing}", "update this software; until then don't rely on setting weights")
    if not lacking:
        findings.ok(
            f"the runtime has all {len(NEEDED_ITEMS)} storage items and {len(calls.EXAMPLES)} calls that are used"
        )


async def _check_clock(
    chain: SubtensorChain, findings: Findings, deadline: Deadline, wall_s: Callable[[], float]
) -> None:
    head = await chain.link.head(deadline)
    (stamp,) = await chain.link.read([Item("Timestamp", "Now")], head.hash, deadline)
    if not stamp:
        return
    apart_s = wall_s() - view.whole(stamp, "Timestamp.Now") / 1000
    block_time_s = await chain.block_time_s(timeout_s=deadline.remaining_s())
    if abs(apart_s) > CLOCK_APART_S + 3 * block_time_s:
        hint = "set the clock (NTP): sealed weights open by it; or the node lags behind"
        findings.bad(f"this machine's clock and the chain's newest block are {apart_s:+.0f} s apart", hint)
    else:
        findings.ok(f"clock and chain agree to {abs(apart_s):.0f} s")


def _check_subnet(netuid: int, rules: Hyperparameters, graph: Metagraph, findings: Findings) -> None:
    holders = len(graph.permit_holders())
    findings.ok(f"subnet {netuid}: {len(graph.neurons)} neurons, {holders} permits, tempo {rules.tempo}")
    if graph.owner_uid is None:
        findings.note("the owner's hotkey isn't registered: a burn share has nowhere to go", "set the burn share to 0")
    if rules.min_allowed_weights > 1:
        findings.note(f"at least {min(rules.min_allowed_weights, len(graph.neurons))} weights above zero are asked for")
    if rules.weights_rate_limit > rules.tempo:
        findings.note(f"weights pass once in {rules.weights_rate_limit} blocks, which is more than a tempo")


async def _check_sealing(chain: SubtensorChain, findings: Findings, deadline: Deadline) -> None:
    head = await chain.link.head(deadline)
    (version,) = await chain.link.read([Item(SUBTENSOR, "CommitRevealWeightsVersion")], head.hash, deadline)
    if version != calls.COMMIT_REVEAL_VERSION:
        made = calls.COMMIT_REVEAL_VERSION
        findings.bad(f"the chain reveals commits of version {version}, this software makes {made}", "update it")
    elif importlib.util.find_spec("bittensor_core") is None:
        findings.bad("the subnet wants weights sealed, which needs bittensor-core", "pip install bittensor-core")
    else:
        findings.ok(f"weights are sealed, version {version}")


def check_operator(graph: Metagraph, rules: Hyperparameters, operator: Operator, findings: Findings) -> None:
    """Registered, with a permit, enough stake, and weights that still count."""
    neuron = graph.neuron(operator.hotkey)
    if neuron is None:
        hint = f"register it: {operator.register_command}" if operator.register_command else "register it"
        findings.bad(f"{operator.hotkey} isn't registered on subnet {graph.netuid}", hint)
        return
    findings.ok(f"{operator.hotkey} is uid {neuron.uid}, {neuron.stake:g} staked")
    is_owner = operator.hotkey == graph.owner_hotkey
    if not neuron.validator_permit and not is_owner:
        hint = "a miner needs none; a validator's goes to the largest stakes, once per tempo"
        findings.note(f"uid {neuron.uid} holds no validator permit: it can't set weights", hint)
    elif neuron.stake < rules.stake_threshold and not is_owner:
        findings.bad(f"{neuron.stake:g} staked, {rules.stake_threshold:g} needed to set weights", "add stake")
    elif neuron.validator_permit:
        findings.ok(f"uid {neuron.uid} holds a validator permit; it last set weights at block {neuron.last_update}")
    if operator.version_key < rules.weights_version_key:
        wanted = rules.weights_version_key
        findings.bad(f"the subnet wants weights of version key {wanted}, set is {operator.version_key}", "update")
    left = rules.immunity_period - (graph.block - neuron.registered_at_block)
    if left > 0:
        findings.note(f"uid {neuron.uid} can't be replaced for another {left} blocks")
