"""A validator's own decisions for simulated subnets: verdicts on cases, and weights from scores."""

from __future__ import annotations

from collections.abc import Mapping

from subnet.chain.base import Hyperparameters, Metagraph
from subnet.incentives.court import CaseEvent, Rules
from subnet.policy.policy import SubnetPolicy
from subnet.run import events as ev
from subnet.run.state import RunState
from subnet.score.score import Score
from validator.decide_cases import decide_cases
from validator.policy import AuditPolicy, Policy
from validator.watch import Watch
from validator.weights import WeightPlan, plan_weights


def rules_of(policy: SubnetPolicy) -> Rules:
    """What :mod:`validator.decide_cases` and :mod:`validator.weights` do under this policy."""
    audit = policy.audit
    own = Policy(
        audit=AuditPolicy(
            fault_after_items=audit.fault_after_items,
            unopened_max=audit.unopened_max,
            lost_max=audit.lost_max,
            quarantine_retry_s=audit.quarantine_retry_s,
        )
    )
    watch = Watch()

    def next_of_case(state: RunState) -> CaseEvent | None:
        for decision in decide_cases(0.0, state, watch, own):
            if isinstance(decision.what, ev.WitnessAsked | ev.CaseClosed):
                return decision.what
        return None

    return Rules(next_of_case, weigh)


def weigh(
    metagraph: Metagraph, scores: Mapping[str, Score], hotkey: str, burn_share: float, rules: Hyperparameters
) -> dict[int, float]:
    """Where a validator would set none, none are set."""
    plan = plan_weights(metagraph, scores, hotkey, burn_share, rules)
    return plan.weights if isinstance(plan, WeightPlan) else {}
