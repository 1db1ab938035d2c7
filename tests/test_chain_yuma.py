"""Yuma consensus: equal to published worked examples and to tables computed by hand, and its properties for any input.

Sources: the runtime's own test tables (opentensor/subtensor, pallets/subtensor/src/tests/epoch.rs ``test_bonds``;
tests/epoch/yuma_3.rs ``kappa_moves_first``), and the examples of subtensor.com/learn/mechanics/yuma-consensus.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from subnet.chain.yuma import YumaEpoch, YumaRules, YumaState, run_epoch, top_stakes, weighted_medians
from subnet.errors import ConfigError

U16 = 65_535


def state(stakes: list[float], weights: list[list[float]], **changes: object) -> YumaState:
    """Every staked neuron has a permit and a row; all registered at block 0 and set weights at block 1."""
    n = len(stakes)
    rows = [uid for uid in range(n) if stakes[uid] > 0]
    made = YumaState(
        block=2,
        last_epoch=1,
        stake_N=np.array(stakes, dtype=np.float64),
        permit_N=np.array([stake > 0 for stake in stakes]),
        registered_N=np.zeros(n, dtype=np.int64),
        last_update_N=np.ones(n, dtype=np.int64),
        rows_V=np.array(rows, dtype=np.int64),
        weights_VN=np.array(weights, dtype=np.float64).reshape(len(rows), n),
        bonds_VN=np.zeros((len(rows), n)),
    )
    return replace(made, **changes)


def stored(epoch: YumaEpoch) -> np.ndarray:
    """Bonds as the chain keeps them between epochs: u16, rounded down."""
    return np.floor(epoch.bonds_VN * U16 + 1e-6) / U16


# ---- the runtime's table: four validators of stake 1 to 4, of whom each epoch one more weighs only itself

COMMON = [0, 0, 0, 0, 16383, 32767, 49149, 65535]
BONDS_TABLE = [
    # dividends, consensus of the four servers, stored bonds to the first server
    ([0.0999999978, 0.1999999983, 0.3000000012, 0.4000000022], True, [16383, 32767, 49151, 65535]),
    ([0.0899967032, 0.2022211233, 0.303334432, 0.404447741], True, [14582, 32767, 49151, 65535]),
    ([0.0809936118, 0.1819995677, 0.3158592721, 0.421147548], True, [12603, 28321, 49151, 65535]),
]
SERVERS = [0.0999975584, 0.2000012207, 0.2999926754, 0.400008545]


def test_equal_to_the_runtimes_own_table_of_bonds():
    rows = [list(COMMON) for _ in range(4)]
    bonds = np.zeros((4, 8))
    for number, (dividends, _, first_bonds) in enumerate(BONDS_TABLE):
        if number:
            rows[number - 1] = [U16 if uid == number - 1 else 0 for uid in range(8)]
        epoch = run_epoch(state([1, 2, 3, 4, 0, 0, 0, 0], rows, bonds_VN=bonds), YumaRules(max_validators=8))
        assert epoch.stake_share_N[:4] == pytest.approx([0.1, 0.2, 0.3, 0.4], abs=1e-6)
        assert epoch.consensus_N[4:] == pytest.approx(SERVERS, abs=1e-6)
        assert epoch.incentive_N[4:] == pytest.approx(SERVERS, abs=1e-6)
        assert epoch.dividends_N[:4] == pytest.approx(dividends, abs=1e-6)
        assert epoch.trust_V == pytest.approx([float(v >= number) for v in range(4)], abs=1e-6)
        bonds = stored(epoch)
        assert np.abs(bonds[:, 4] * U16 - first_bonds).max() <= 1, "within one step of the stored integer"
    rows[2] = [0, 0, U16, 0, 0, 0, 0, 0]
    last = run_epoch(state([1, 2, 3, 4, 0, 0, 0, 0], rows, bonds_VN=bonds), YumaRules(max_validators=8))
    assert not last.consensus_N.any(), "40 % of the stake is no majority"
    assert not last.incentive_N.any()


# ---- the runtime's table of Yuma 3: the big validator moves first, the small ones later

YUMA3 = YumaRules(
    kappa=32_767 / U16,
    bonds_penalty=0.0,
    bonds_moving_average=0.975,
    yuma3=True,
    liquid_alpha=(0.1, 0.3, 10.0),
    max_validators=3,
)
FIRST, SECOND = [0, 0, 0, U16, 0], [0, 0, 0, 0, U16]
MOVES_FIRST = [
    ([FIRST, FIRST, FIRST], [[0.1013, 0], [0.1013, 0], [0.1013, 0]], [0.8, 0.1, 0.1]),
    ([SECOND, FIRST, FIRST], [[0.0908, 0.1013], [0.3697, 0], [0.3697, 0]], [1, 0, 0]),
    ([SECOND, SECOND, FIRST], [[0.0815, 0.1924], [0.3170, 0.1013], [0.5580, 0]], [0.9382, 0.0618, 0]),
    ([SECOND] * 3, [[0.0731, 0.2742], [0.2765, 0.1924], [0.4306, 0.1013]], [0.8819, 0.0773, 0.0407]),
    ([SECOND] * 3, [[0.0656, 0.3478], [0.2435, 0.2742], [0.3589, 0.1924]], [0.8564, 0.0844, 0.0592]),
    ([SECOND] * 3, [[0.0588, 0.4139], [0.2157, 0.3478], [0.3089, 0.2742]], [0.8418, 0.0884, 0.0697]),
]


def test_equal_to_the_runtimes_own_table_of_yuma_3():
    bonds = np.zeros((3, 5))
    for weights, expected_bonds, dividends in MOVES_FIRST:
        epoch = run_epoch(state([8, 1, 1, 0, 0], weights, bonds_VN=bonds), YUMA3)
        assert epoch.bonds_VN[:, 3:] == pytest.approx(np.array(expected_bonds), abs=1.1e-4)  # the table has 4 digits
        assert epoch.dividends_N[:3] == pytest.approx(dividends, abs=1.1e-4)
        bonds = stored(epoch)


# ---- published examples of the stake-weighted median

MEDIANS = [
    # stakes, scores by validator, kappa, consensus
    ([600, 400], [[0.5, 0.3, 0.2], [0.4, 0.4, 0.2]], 0.51, [0.5, 0.3, 0.2]),
    ([500, 300, 200], [[0.8], [0.5], [0.3]], 0.51, [0.5]),
    # by hand: a score counts as far as those who give it or more hold kappa of the stake
    ([1, 1, 1], [[0.9], [0.5], [0.1]], 0.5, [0.5]),
    ([1, 1, 1, 1], [[0.9], [0.9], [0.2], [0.2]], 0.5, [0.9]),
    ([1, 1, 1, 1], [[0.9], [0.9], [0.2], [0.2]], 0.51, [0.2]),
    ([49, 51], [[1.0], [0.0]], 0.5, [0.0]),
    ([51, 49], [[1.0], [0.0]], 0.5, [1.0]),
    ([1], [[0.7]], 0.5, [0.7]),
]


@pytest.mark.parametrize(("stakes", "scores", "kappa", "consensus"), MEDIANS)
def test_the_median_is_what_enough_of_the_stake_backs(stakes, scores, kappa, consensus):
    shares = np.array(stakes, dtype=np.float64) / sum(stakes)
    assert weighted_medians(np.array(scores), shares, kappa) == pytest.approx(consensus)


def test_an_epoch_computed_by_hand():
    """Two validators (60, 40), two miners. The second validator's 0.75 for miner B is clipped to 0.5.

    Ranks: A = .6 * .5 + .4 * .25 = .4, B = .6 * .5 + .4 * .5 = .5; incentives 4/9, 5/9. Bonds from clipped weights times
    stake: to A .3 and .1 (3/4, 1/4), to B .3 and .2 (3/5, 2/5). Dividends: 3/4 * 4/9 + 3/5 * 5/9 = 2/3, and 1/3.
    """
    rows = [[0, 0, 0.5, 0.5], [0, 0, 0.25, 0.75]]
    epoch = run_epoch(state([60, 40, 0, 0], rows), YumaRules(kappa=0.5))
    assert epoch.consensus_N == pytest.approx([0, 0, 0.5, 0.5])
    assert epoch.trust_V == pytest.approx([1.0, 0.75])
    assert epoch.incentive_N == pytest.approx([0, 0, 4 / 9, 5 / 9])
    assert epoch.dividends_N == pytest.approx([2 / 3, 1 / 3, 0, 0])
    assert epoch.bonds_VN == pytest.approx(np.array([[0, 0, 1, 1], [0, 0, 1 / 3, 2 / 3]]))
    assert list(epoch.permit_N) == [True, True, False, False]


def test_what_does_not_count_is_left_out():
    rows = [[9, 0, 1, 1], [0, 9, 1, 1]]
    epoch = run_epoch(state([60, 40, 0, 0], rows), YumaRules())
    assert epoch.weights_VN == pytest.approx(np.array([[0, 0, 0.5, 0.5]] * 2)), "no weight to oneself"
    owner = run_epoch(state([60, 40, 0, 0], rows, owner_uid=0), YumaRules())
    assert owner.weights_VN[0, 0] > 0, "but the owner's"
    late = np.array([0, 0, 1, 0])
    assert run_epoch(state([60, 40, 0, 0], rows, registered_N=late), YumaRules()).weights_VN[0, 2] == 0
    silent = run_epoch(state([60, 40, 0, 0], rows, block=9000), YumaRules(activity_cutoff=5000))
    assert not silent.active_stake_N.any()
    assert not silent.incentive_N.any()
    no_permit = run_epoch(state([60, 40, 0, 0], rows, permit_N=np.zeros(4, dtype=np.bool_)), YumaRules())
    assert not no_permit.incentive_N.any()
    assert no_permit.permit_N[:2].all(), "permits of the next epoch"
    poor = run_epoch(state([60, 40, 0, 0], rows), YumaRules(stake_threshold=50.0))
    assert list(poor.stake_share_N) == [1.0, 0, 0, 0]
    sealed = np.full(4, 2**62)
    sealed[0] = 0
    hidden = state([60, 40, 0, 0], rows, commit_block_N=sealed, registered_N=np.array([0, 0, 1, 1]) * 0 + [0, 0, 1, 0])
    assert run_epoch(hidden, YumaRules()).weights_VN[0, 2] == 0


def test_permits_go_to_the_largest_stakes():
    assert list(top_stakes(np.array([1.0, 3.0, 2.0, 0.0, 2.0]), 3)) == [False, True, True, False, True]
    assert list(top_stakes(np.array([1.0, 1.0, 1.0]), 2)) == [True, True, False]
    assert not top_stakes(np.zeros(3), 3).any()


@pytest.mark.parametrize("bad", [{"kappa": 1.1}, {"bonds_penalty": -0.1}, {"max_validators": -1}])
def test_rules_are_checked(bad):
    with pytest.raises(ConfigError, match="yuma"):
        YumaRules(**bad)


# ---- for any subnet

shares = st.floats(0.0, 1.0, allow_nan=False)


@st.composite
def subnets(draw: st.DrawFn) -> YumaState:
    validators, miners = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    n = validators + miners
    stakes = [draw(st.integers(1, 1000)) for _ in range(validators)] + [0] * miners
    rows = [[draw(st.integers(0, U16)) for _ in range(n)] for _ in range(validators)]
    bonds = np.array([[draw(st.integers(0, U16)) / U16 for _ in range(n)] for _ in range(validators)])
    return state([float(stake) for stake in stakes], rows, bonds_VN=bonds)


rules = st.builds(
    YumaRules,
    kappa=st.floats(0.05, 0.95),
    bonds_penalty=shares,
    bonds_moving_average=shares,
    yuma3=st.booleans(),
    liquid_alpha=st.one_of(st.none(), st.just((0.1, 0.3, 10.0))),
    max_validators=st.integers(1, 8),
)


@settings(max_examples=150, deadline=None)
@given(subnets(), rules)
def test_shares_sum_to_one_and_nothing_is_negative(subnet: YumaState, how: YumaRules):
    epoch = run_epoch(subnet, how)
    for vector in (epoch.incentive_N, epoch.dividends_N, epoch.stake_share_N, epoch.active_stake_N):
        assert (vector >= 0).all()
        assert vector.sum() == pytest.approx(1.0) or not vector.any()
    assert ((epoch.bonds_VN >= 0) & (epoch.bonds_VN <= 1 + 1e-12)).all()
    assert epoch.permit_N.sum() <= how.max_validators
    assert (epoch.incentive_N[epoch.consensus_N == 0] == 0).all()


@settings(max_examples=150, deadline=None)
@given(subnets(), rules)
def test_clipping_never_raises_anybodys_weight(subnet: YumaState, how: YumaRules):
    epoch = run_epoch(subnet, how)
    assert (epoch.clipped_VN <= epoch.weights_VN + 1e-12).all()
    assert (epoch.clipped_VN <= epoch.consensus_N + 1e-12).all()
    assert (epoch.trust_V <= 1 + 1e-9).all()


@settings(max_examples=100, deadline=None)
@given(subnets(), st.integers(1, 9))
def test_the_unit_of_stake_and_of_weights_does_not_matter(subnet: YumaState, factor: int):
    plain = run_epoch(subnet, YumaRules())
    scaled = run_epoch(
        replace(subnet, stake_N=subnet.stake_N * factor, weights_VN=subnet.weights_VN * factor), YumaRules()
    )
    assert scaled.incentive_N == pytest.approx(plain.incentive_N, abs=1e-9)
    assert scaled.dividends_N == pytest.approx(plain.dividends_N, abs=1e-9)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 60_000), min_size=3, max_size=5), st.integers(1, 48), st.booleans())
def test_a_minority_cannot_raise_its_own_miner(scores: list[int], minority: int, yuma3: bool):
    """A validator with less than kappa that gives everything to one miner doesn't raise it above what honesty gives."""
    miners = len(scores)
    honest = [0, 0, *scores]
    greedy = [0, 0, U16, *([0] * (miners - 1))]
    stakes = [100.0 - minority, float(minority)] + [0.0] * miners
    how = YumaRules(kappa=0.5, yuma3=yuma3)
    fair = run_epoch(state(stakes, [honest, honest]), how)
    attacked = run_epoch(state(stakes, [honest, greedy]), how)
    assert (attacked.consensus_N <= fair.consensus_N + 1e-12).all()
    honest_part = 1 - minority / 100
    most = fair.incentive_N[2] / (honest_part + (1 - honest_part) * fair.incentive_N[2])
    assert attacked.incentive_N[2] <= most + 1e-9, "at best the others lose the minority's part"


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 60_000), min_size=3, max_size=3), min_size=3, max_size=8),
    st.integers(1, 99),
    st.booleans(),
)
def test_a_copier_earns_no_more_per_stake_than_whom_it_copies(rows: list[list[int]], copier: int, yuma3: bool):
    """The copier sets what the original set an epoch before; both hold stake, and so the same per unit of it at best
    once the weights stand still, and nothing more summed over the run."""
    stakes = [100.0, float(copier), 0.0, 0.0, 0.0]
    how = YumaRules(kappa=0.5, yuma3=yuma3)
    bonds = np.zeros((2, 5))
    original_total = copier_total = 0.0
    history = [[0, 0, *row] for row in rows]
    for number, row in enumerate(history):
        copied = history[number - 1] if number else [0] * 5
        epoch = run_epoch(state(stakes, [row, copied], bonds_VN=bonds), how)
        bonds = stored(epoch)
        original_total += epoch.dividends_N[0] / 100.0
        copier_total += epoch.dividends_N[1] / copier
    assert copier_total <= original_total * (1 + 1e-3) + 1e-6
