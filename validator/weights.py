"""Scores become weights on the chain: one try per tempo, read back, every refusal with its name and remedy.

What is set comes from this validator's own scores and the metagraph alone; nobody's weights are ever read but its
own, after they were set. A score goes to the registration that earned it: a miner that left gets nothing, and
neither does whoever took its uid.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Literal

import msgspec
from loguru import logger

from subnet.chain.base import Chain, ChainRefused, Hyperparameters, Metagraph, Neuron, WeightsReceipt, to_u16
from subnet.errors import ConfigError, IotaError
from subnet.timing import SYSTEM_CLOCK, TIMEOUTS, Clock, Deadline
from validator.scoring import Score

MAX_WAITING_COMMITS = 4
"""Commits in a row of which the chain should have revealed one."""

Status = Literal["set", "refused", "failed", "differs", "nothing"]
BACKS_OFF = ("refused", "differs")
"""The chain's own no: asking again sooner is of no use. A chain that gave no verdict is asked again next tempo."""


class WeightPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    burn_share: float = 0.0
    """Part of the weight that goes to the subnet owner's uid, where it is burned."""
    version_key: int = 0
    mechanism: int = 0
    backoff_cap: int = 8
    """At most this many tempos between two tries, however often the chain refused."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.burn_share <= 1.0:
            raise ConfigError(f"weights.burn_share = {self.burn_share!r} is not allowed", hint="allowed: 0 to 1")
        if not self.backoff_cap >= 1:
            raise ConfigError(f"weights.backoff_cap = {self.backoff_cap!r} is not allowed", hint="allowed: 1 or more")


class WeightPlan(msgspec.Struct, frozen=True):
    """What to set, by uid; sums to 1."""

    weights: dict[int, float]


class NoWeights(msgspec.Struct, frozen=True):
    """Why nothing should be set now; ``code`` is the chain's name where the chain would refuse."""

    code: str
    reason: str
    hint: str = ""
    wait_blocks: int | None = None
    """Blocks after which waiting alone has helped."""


class WeightsReport(msgspec.Struct, frozen=True, kw_only=True):
    """How one try ended.

    ``set``: the chain stores what was meant. ``refused``: it said no. ``failed``: no or no sure answer.
    ``differs``: it stores something else. ``nothing``: there was nothing to set, and nothing was sent.
    """

    status: Status
    code: str = ""
    reason: str = ""
    hint: str = ""
    block: int | None = None
    uids: tuple[int, ...] = ()
    values: tuple[int, ...] = ()
    wait_blocks: int | None = None
    reveal_round: int | None = None
    """Where they were committed: when the chain reveals them."""

    def __str__(self) -> str:
        if self.status == "set" and self.reveal_round is not None:
            return f"weights committed at block {self.block} for {len(self.uids)} uids, revealed at {self.reveal_round}"
        if self.status == "set":
            return f"weights set at block {self.block} for {len(self.uids)} uids"
        hint = f" ({self.hint})" if self.hint else ""
        return f"weights {self.status}: {self.code}: {self.reason}{hint}"


def plan_weights(
    metagraph: Metagraph,
    scores: Mapping[str, Score],
    own_hotkey: str,
    burn_share: float,
    hyperparameters: Hyperparameters | None = None,
) -> WeightPlan | NoWeights:
    """What the chain should hold, or why not to try. With ``hyperparameters`` its paces and sizes are checked too."""
    own = metagraph.neuron(own_hotkey)
    standing = _standing(metagraph, own, own_hotkey, hyperparameters)
    if own is None or standing is not None:
        return standing or NoWeights("HotKeyNotRegisteredInSubNet", "the hotkey isn't registered")
    neurons = metagraph.by_hotkey()
    earned = {
        neurons[hotkey].uid: score.total
        for hotkey, score in sorted(scores.items())
        if hotkey in neurons and hotkey != own_hotkey and _same_registration(score, neurons[hotkey]) and _counts(score)
    }
    whole = math.fsum(earned.values())
    if whole <= 0 and burn_share < 1:
        return NoWeights("no_scores", "no registered miner has sealed work yet")
    weights = {uid: (1 - burn_share) * total / whole for uid, total in earned.items() if burn_share < 1}
    if burn_share > 0:
        owner = metagraph.owner_uid
        if owner is None:
            hint = "register the owner's hotkey, or set weights.burn_share to 0"
            return NoWeights("no_burn_uid", "the subnet owner's hotkey isn't registered", hint)
        weights[owner] = weights.get(owner, 0.0) + burn_share
    return _enough(weights, len(metagraph.neurons), hyperparameters)


def _standing(
    metagraph: Metagraph, own: Neuron | None, own_hotkey: str, rules: Hyperparameters | None
) -> NoWeights | None:
    """Whether this validator may set weights now."""
    if own is None:
        reason = f"{own_hotkey} isn't registered on subnet {metagraph.netuid}"
        return NoWeights("HotKeyNotRegisteredInSubNet", reason, "register it first")
    is_owner = own_hotkey == metagraph.owner_hotkey
    if not own.validator_permit and not is_owner:
        hint = "permits go to the largest stakes once per tempo: add stake and wait"
        return NoWeights("NeuronNoValidatorPermit", f"uid {own.uid} holds no validator permit", hint)
    if rules is None:
        return None
    if own.stake < rules.stake_threshold and not is_owner:
        reason = f"{own.stake:g} TAO staked, {rules.stake_threshold:g} needed"
        return NoWeights("NotEnoughStakeToSetWeights", reason, "add stake to the hotkey")
    left = rules.weights_rate_limit - (metagraph.block + 1 - own.last_update)
    if own.last_update != 0 and left > 0:
        reason = f"set at block {own.last_update}, the limit is {rules.weights_rate_limit} blocks"
        return NoWeights("SettingWeightsTooFast", reason, "wait for the rate limit", left)
    return None


def _same_registration(score: Score, neuron: Neuron) -> bool:
    return score.registered_at_block is None or score.registered_at_block == neuron.registered_at_block


def _counts(score: Score) -> bool:
    """A positive number: what isn't one would be everybody's loss in the sum."""
    return 0.0 < score.total < math.inf


def _enough(weights: dict[int, float], n: int, rules: Hyperparameters | None) -> WeightPlan | NoWeights:
    if rules is not None:
        uids, _ = to_u16(weights)
        needed = min(rules.min_allowed_weights, n)
        if len(uids) < needed:
            reason = f"{len(uids)} weights above zero, at least {needed} needed"
            hint = "more miners must seal work, or the subnet's owner lowers min_allowed_weights"
            return NoWeights("WeightVecLengthIsLow", reason, hint)
    return WeightPlan(weights)


def blocks_to_next_try(report: WeightsReport, failures: int, tempo: int, cap: int) -> int:
    """One try per tempo, from its beginning; after the n-th refusal in a row 2^(n-1) tempos, at most ``cap``.

    Where nothing was sent the look at the metagraph is repeated after a quarter of a tempo, or when waiting has helped.
    """
    if report.status == "nothing":
        return report.wait_blocks if report.wait_blocks is not None else max(1, tempo // 4)
    if report.status not in BACKS_OFF or failures <= 0:
        return max(1, tempo)
    tempos = min(cap, 2 ** min(failures - 1, 30))
    return max(1, tempos * tempo, report.wait_blocks or 0)


class WeightSetter:
    """Sets this validator's weights on one subnet, for as long as it runs."""

    def __init__(
        self,
        chain: Chain,
        netuid: int,
        own_hotkey: str,
        scores: Callable[[], Mapping[str, Score]],
        policy: WeightPolicy | Callable[[], WeightPolicy] | None = None,
        *,
        on_metagraph: Callable[[Metagraph], None] | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        timeout_s: float = TIMEOUTS.chain_write_s,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._chain, self._netuid, self._own_hotkey, self._scores = chain, netuid, own_hotkey, scores
        self._policy: Callable[[], WeightPolicy] = policy if callable(policy) else lambda: policy or WeightPolicy()
        self._on_metagraph = on_metagraph
        self._sleep = sleep
        self._timeout_s, self._clock = timeout_s, clock
        self._block_s, self._tempo_s = 1.0, 0.0
        self._commits = CommitBook()
        self.last_report: WeightsReport | None = None

    @property
    def policy(self) -> WeightPolicy:
        """The one of this moment."""
        return self._policy()

    async def run(self, on_report: Callable[[WeightsReport], None] | None = None) -> None:
        """Try, report, wait; until cancelled. A report is logged when its outcome or reason changes."""
        failures = 0
        while True:
            begun_s = self._clock.now_s()
            report, wait_s = await self._try_and_wait_s(failures)
            refused = report.status in BACKS_OFF
            failures = failures + 1 if refused else 0 if report.status == "set" else failures
            if on_report is not None:
                on_report(report)
            # From its beginning: the time that tries take doesn't add up to a tempo without one.
            spent_s = self._clock.now_s() - begun_s
            await self._sleep(max(wait_s - spent_s, min(wait_s, self._block_s)))

    async def _try_and_wait_s(self, failures: int) -> tuple[WeightsReport, float]:
        report = await self.attempt()
        deadline = Deadline.after(self._timeout_s)
        try:
            rules = await self._chain.hyperparameters(self._netuid, timeout_s=deadline.remaining_s())
            block_time_s = await self._chain.block_time_s(timeout_s=deadline.remaining_s())
        except IotaError:
            # The chain is away; ``attempt`` has said so. Look again at the last known pace.
            return report, self._tempo_s / 4 if self._tempo_s else 5.0
        self._block_s, self._tempo_s = block_time_s, (rules.tempo + 1) * block_time_s
        refused = report.status in BACKS_OFF
        blocks = blocks_to_next_try(report, failures + refused, rules.tempo + 1, self.policy.backoff_cap)
        return report, blocks * block_time_s

    async def attempt(self) -> WeightsReport:
        """One try: plan, submit, wait for inclusion, read back, compare."""
        try:
            report = await self._attempt(Deadline.after(self._timeout_s))
        except ChainRefused as refused:
            report = self._refused(refused)
        except IotaError as error:
            report = WeightsReport(status="failed", code=error.code, reason=error.reason, hint=error.hint)
        self._log_changes(report)
        self.last_report = report
        return report

    async def _attempt(self, deadline: Deadline) -> WeightsReport:
        chain, netuid, policy = self._chain, self._netuid, self.policy
        metagraph = await chain.metagraph(netuid, timeout_s=deadline.remaining_s())
        if self._on_metagraph is not None:
            self._on_metagraph(metagraph)
        rules = await chain.hyperparameters(netuid, timeout_s=deadline.remaining_s())
        plan = plan_weights(metagraph, self._scores(), self._own_hotkey, policy.burn_share, rules)
        if isinstance(plan, NoWeights):
            return WeightsReport(
                status="nothing", code=plan.code, reason=plan.reason, hint=plan.hint, wait_blocks=plan.wait_blocks
            )
        own = metagraph.neuron(self._own_hotkey)
        if self._commits.waiting and own is not None:
            shown = await chain.weights(netuid, own.uid, mechanism=policy.mechanism, timeout_s=deadline.remaining_s())
            self._commits.look(shown)
        receipt = await chain.set_weights(
            netuid,
            plan.weights,
            version_key=policy.version_key,
            mechanism=policy.mechanism,
            timeout_s=deadline.remaining_s(),
        )
        self._commits.note(receipt)
        stored = None
        if own is not None and receipt.reveal_round is None:
            stored = await chain.weights(netuid, own.uid, mechanism=policy.mechanism, timeout_s=deadline.remaining_s())
        return _compare(plan, receipt, stored)

    def _refused(self, refused: ChainRefused) -> WeightsReport:
        reason = refused.reason.removeprefix(f"{refused.code}: ")
        return WeightsReport(status="refused", code=refused.code, reason=reason, hint=refused.hint)

    def _log_changes(self, report: WeightsReport) -> None:
        last = self.last_report
        if last is not None and (last.status, last.code) == (report.status, report.code) and report.status != "set":
            return
        level = "INFO" if report.status in ("set", "nothing") else "WARNING"
        logger.log(level, "{}", report)


class CommitBook:
    """Commits that the chain hasn't revealed yet. Says once when it reveals none of them, and again when it does."""

    def __init__(self) -> None:
        self.waiting: list[WeightsReceipt] = []
        self._warned = False

    def note(self, receipt: WeightsReceipt) -> None:
        self.waiting = [*self.waiting[1 - MAX_WAITING_COMMITS :], receipt] if receipt.reveal_round is not None else []

    def look(self, shown: WeightsReceipt | None) -> None:
        """``shown``: what the chain stores now."""
        stored = (shown.uids, shown.values) if shown is not None else None
        ages = [age for age, commit in enumerate(self.waiting) if (commit.uids, commit.values) == stored]
        if ages:
            self.waiting = self.waiting[ages[-1] + 1 :]
            if self._warned:
                logger.info("the chain reveals committed weights again")
            self._warned = False
        elif len(self.waiting) >= MAX_WAITING_COMMITS and not self._warned:
            self._warned = True
            logger.warning(
                "the chain revealed none of the last {} commits of weights: is this machine's clock right, "
                "and does the hotkey hold a permit?",
                len(self.waiting),
            )


def _compare(plan: WeightPlan, receipt: WeightsReceipt, stored: WeightsReceipt | None) -> WeightsReport:
    """Success is what the chain stores, not what it answered. A commit was read back where it was made."""
    uids, values = to_u16(plan.weights)
    if receipt.reveal_round is not None:
        return WeightsReport(
            status="set",
            block=receipt.block,
            uids=receipt.uids,
            values=receipt.values,
            reveal_round=receipt.reveal_round,
        )
    if stored is None:
        return WeightsReport(
            status="differs", code="not_stored", reason="the chain said yes and stores nothing", block=receipt.block
        )
    same = dict(zip(stored.uids, stored.values, strict=True)) == dict(zip(uids, values, strict=True))
    if not same or stored.block != receipt.block:
        reason = f"sent {len(uids)} weights at block {receipt.block}, stored {len(stored.uids)} at {stored.block}"
        return WeightsReport(
            status="differs",
            code="not_as_sent",
            reason=reason,
            block=stored.block,
            uids=stored.uids,
            values=stored.values,
        )
    return WeightsReport(status="set", block=stored.block, uids=stored.uids, values=stored.values)
