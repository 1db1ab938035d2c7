"""Yuma consensus: from stakes and weights to incentives, dividends, bonds and permits, as the runtime computes an epoch.

Pure, in floats; the runtime computes in 32-bit fixed point, so values agree to about 1e-9 before the u16 rounding of
what is stored. Both forms are here: the original (bonds from weight times stake) and Yuma 3 (bonds from weights).

Shapes: N neurons in uid order, V rows of weights. Only neurons with a row in ``rows`` have weights or bonds; a row's
neuron is ``rows[v]``. Nobody else's row would count.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from subnet.errors import ConfigError

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class YumaRules:
    """A subnet's consensus parameters; the defaults are the runtime's."""

    kappa: float = 32_767 / 65_535
    """Part of the active stake that must back a weight, else it is clipped."""
    bonds_penalty: float = 1.0
    """1: bonds grow from clipped weights; 0: from weights as set."""
    bonds_moving_average: float = 0.9
    """Part of the old bond that stays after an epoch."""
    yuma3: bool = False
    liquid_alpha: tuple[float, float, float] | None = None
    """With Yuma 3: lowest and highest part of a new bond that enters, and how steeply it rises with the disagreement."""
    max_validators: int = 64
    stake_threshold: float = 0.0
    activity_cutoff: int = 5000
    """Blocks after which a validator that set no weights no longer counts."""
    owner_permit: bool = False
    """Whether the owner holds a permit whatever its stake, as in newer runtimes."""

    def __post_init__(self) -> None:
        for name in ("kappa", "bonds_penalty", "bonds_moving_average"):
            value = getattr(self, name)
            if not 0.0 <= value <= 1.0:
                raise ConfigError(f"yuma: {name} = {value!r} is not allowed", hint="allowed: 0 to 1")
        if self.max_validators < 0 or self.stake_threshold < 0 or self.activity_cutoff < 0:
            raise ConfigError("yuma: a limit is below 0", hint="allowed: 0 or more")


@dataclass(frozen=True)
class YumaState:
    """What an epoch starts from."""

    block: int
    last_epoch: int
    """Block of the epoch before; bonds to whoever registered at or after it are void."""
    stake_N: Floats
    permit_N: Bools
    registered_N: Ints
    last_update_N: Ints
    rows_V: Ints
    """uids with a row, ascending."""
    weights_VN: Floats
    """As set; only ratios within a row matter."""
    bonds_VN: Floats
    """As the epoch before left them."""
    owner_uid: int | None = None
    commit_block_N: Ints | None = None
    """First unrevealed commit of each neuron, or the largest int; without commit-reveal None."""


@dataclass(frozen=True)
class YumaEpoch:
    """What an epoch comes to; shares of the whole, each vector sums to 1 or is all zero."""

    rows_V: Ints
    stake_share_N: Floats
    active_N: Bools
    active_stake_N: Floats
    consensus_N: Floats
    """Weight that a majority of the stake backs, per target; not normalised."""
    trust_V: Floats
    """Part of a validator's weight that survived the clipping."""
    clipped_VN: Floats
    incentive_N: Floats
    dividends_N: Floats
    bonds_VN: Floats
    """To be kept for the next epoch."""
    permit_N: Bools
    weights_VN: Floats = field(repr=False)
    """Normalised, with what doesn't count taken out."""


def run_epoch(state: YumaState, rules: YumaRules) -> YumaEpoch:
    stake_N, active_N = _stake_shares(state, rules), state.last_update_N + rules.activity_cutoff >= state.block
    permit_N = _with_owner(state.permit_N.copy(), state, rules)
    active_stake_N = normalized(np.where(active_N & permit_N, stake_N, 0.0))
    weights_VN = _counted_weights(state, permit_N)
    stake_V = active_stake_N[state.rows_V]
    consensus_N = weighted_medians(weights_VN, stake_V, rules.kappa, backing=float(active_stake_N.sum()))
    clipped_VN = np.minimum(weights_VN, consensus_N)
    incentive_N = normalized(stake_V @ clipped_VN)
    for_bonds_VN = weights_VN + rules.bonds_penalty * (clipped_VN - weights_VN)
    old_VN = np.where(state.last_epoch <= state.registered_N, 0.0, state.bonds_VN)
    if rules.yuma3:
        bonds_VN, dividends_V = _bonds_yuma3(for_bonds_VN, old_VN, consensus_N, incentive_N, stake_V, rules)
    else:
        bonds_VN, dividends_V = _bonds(for_bonds_VN, old_VN, incentive_N, stake_V, rules)
    new_permit_N = _with_owner(top_stakes(stake_N, rules.max_validators), state, rules)
    dividends_N = np.zeros_like(stake_N)
    dividends_N[state.rows_V] = dividends_V
    return YumaEpoch(
        rows_V=state.rows_V,
        stake_share_N=stake_N,
        active_N=active_N,
        active_stake_N=active_stake_N,
        consensus_N=consensus_N,
        trust_V=clipped_VN.sum(axis=1),
        clipped_VN=clipped_VN,
        incentive_N=incentive_N,
        dividends_N=dividends_N,
        bonds_VN=np.where(new_permit_N[state.rows_V][:, None], bonds_VN, 0.0),
        permit_N=new_permit_N,
        weights_VN=weights_VN,
    )


def _with_owner(permit_N: Bools, state: YumaState, rules: YumaRules) -> Bools:
    if rules.owner_permit and state.owner_uid is not None:
        permit_N[state.owner_uid] = True
    return permit_N


def _stake_shares(state: YumaState, rules: YumaRules) -> Floats:
    enough_N = state.stake_N >= rules.stake_threshold
    if state.owner_uid is not None:
        enough_N[state.owner_uid] = True
    return normalized(np.where(enough_N, state.stake_N, 0.0))


def _counted_weights(state: YumaState, permit_N: Bools) -> Floats:
    """Rows sum to 1, without: rows of who has no permit, self-weights (the owner's stays), targets newer than the row."""
    weights_VN = np.where(permit_N[state.rows_V][:, None], state.weights_VN, 0.0)
    for row, uid in enumerate(state.rows_V):
        if uid != state.owner_uid:
            weights_VN[row, uid] = 0.0
    updated_V1 = state.last_update_N[state.rows_V][:, None]
    weights_VN[updated_V1 <= state.registered_N] = 0.0
    if state.commit_block_N is not None:
        weights_VN[state.commit_block_N[state.rows_V][:, None] < state.registered_N] = 0.0
    return _rows_normalized(weights_VN)


def weighted_medians(scores_VN: Floats, stake_V: Floats, kappa: float, *, backing: float = 1.0) -> Floats:
    """Per column the largest score that validators with ``kappa`` of the active stake give or exceed.

    ``backing``: stake that counts, all of it; what isn't in ``stake_V`` gives 0.
    """
    voting = stake_V > 0
    scores_VN, stake_V = scores_VN[voting], stake_V[voting]
    silent = max(0.0, backing - float(stake_V.sum()))
    if silent > 1e-12:
        scores_VN = np.vstack([scores_VN, np.zeros((1, scores_VN.shape[1]))])
        stake_V = np.append(stake_V, silent)
    if stake_V.size == 0:
        return np.zeros(scores_VN.shape[1])
    stake_V = stake_V / stake_V.sum()
    order_VN = np.argsort(scores_VN, axis=0, kind="stable")
    below_VN = np.cumsum(stake_V[order_VN], axis=0)
    enough_VN = below_VN > (1.0 - kappa) + 1e-12
    first_N = np.where(enough_VN.any(axis=0), enough_VN.argmax(axis=0), len(stake_V) - 1)
    sorted_VN = np.take_along_axis(scores_VN, order_VN, axis=0)
    return sorted_VN[first_N, np.arange(scores_VN.shape[1])]


def _bonds(
    for_bonds_VN: Floats, old_VN: Floats, incentive_N: Floats, stake_V: Floats, rules: YumaRules
) -> tuple[Floats, Floats]:
    fresh_VN = _columns_normalized(for_bonds_VN * stake_V[:, None])
    kept = rules.bonds_moving_average
    bonds_VN = _columns_normalized((1.0 - kept) * fresh_VN + kept * _columns_normalized(old_VN))
    dividends_V = normalized(bonds_VN @ incentive_N)
    largest_N = bonds_VN.max(axis=0, initial=0.0)
    return _divided(bonds_VN, largest_N), dividends_V


def _bonds_yuma3(
    for_bonds_VN: Floats,
    old_VN: Floats,
    consensus_N: Floats,
    incentive_N: Floats,
    stake_V: Floats,
    rules: YumaRules,
) -> tuple[Floats, Floats]:
    alpha: Floats | float = 1.0 - rules.bonds_moving_average
    if rules.liquid_alpha is not None and consensus_N.any():
        alpha = _liquid_alpha(for_bonds_VN, old_VN, consensus_N, rules.liquid_alpha)
    bonds_VN = np.clip(old_VN + alpha * (for_bonds_VN - old_VN), 0.0, 1.0)
    per_validator_V = _columns_normalized(bonds_VN) @ incentive_N
    return bonds_VN, normalized(per_validator_V * stake_V)


def _liquid_alpha(
    weights_VN: Floats, bonds_VN: Floats, consensus_N: Floats, values: tuple[float, float, float]
) -> Floats:
    low, high, steepness = values
    buying_VN = np.clip(weights_VN - consensus_N, 0.0, 1.0)
    selling_VN = np.clip(bonds_VN - weights_VN, 0.0, 1.0)
    apart_VN = np.where(weights_VN >= bonds_VN, buying_VN, selling_VN)
    sigmoid_VN = 1.0 / (1.0 + np.exp(-steepness * (apart_VN - 0.5)))
    return np.clip(low + sigmoid_VN * (high - low), low, high)


def top_stakes(stake_N: Floats, count: int) -> Bools:
    """The ``count`` largest stakes above zero; equal stakes: the lower uid first."""
    order = sorted(range(len(stake_N)), key=lambda uid: (-stake_N[uid], uid))[:count]
    chosen_N = np.zeros(len(stake_N), dtype=np.bool_)
    chosen_N[[uid for uid in order if stake_N[uid] > 0]] = True
    return chosen_N


def normalized(values: Floats) -> Floats:
    """Scaled to sum 1; all zero where the sum is."""
    whole = float(values.sum())
    return values / whole if whole > 0 else np.zeros_like(values)


def _rows_normalized(matrix: Floats) -> Floats:
    return _divided(matrix.T, matrix.sum(axis=1)).T


def _columns_normalized(matrix: Floats) -> Floats:
    return _divided(matrix, matrix.sum(axis=0))


def _divided(matrix: Floats, by_column: Floats) -> Floats:
    return np.divide(matrix, by_column, out=np.zeros_like(matrix), where=by_column > 0)
