"""What a machine would have earned: by hand, and asked of a swarm that runs; before anyone registers, with clear refusals."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from lead_cases import submission
from test_cli import validator  # noqa: F401 - a fixture
from test_swarm import RUN, START_S

from iota.cli.main import main
from iota.miner_estimate import (
    ChainFacts,
    Estimate,
    Machine,
    RunFacts,
    StageFacts,
    chain_facts,
    estimate,
    last_day,
)
from iota.miner_look import item_flops, mean_reliability
from iota.miner_words import lines_of
from iota.swarm import LocalSwarm, SwarmOptions
from subnet.chain.base import Hyperparameters, Metagraph, Neuron
from subnet.chain.genesis import Genesis, SubnetGenesis
from subnet.errors import NotFound
from subnet.protocol.api import StepView
from subnet.run.runfile import parse_run
from subnet.score.accounts import item_flops as counted
from subnet.score.policy import ScorePolicy
from subnet.timing import Deadline
from validator.run_registry import RunEntry, StoredRun, plan_submission, run_planned

ROOT = Path(__file__).resolve().parent.parent
WAIT_S = 240.0

RUN_FACTS = RunFacts(
    run="toy",
    state="running",
    num_steps=100,
    covered_s=1000.0,
    microbatches=4,
    stages=(StageFacts(0, 10.0, (1.0, None), 5), StageFacts(1, 30.0, (0.5,), 7)),
    policy=ScorePolicy(half_life_s=3600.0, unproven_leases=16.0),
    reliability=0.9,
    hardware_class=("a", "b"),
)
MACHINE = Machine(device="cpu", name="CPU", item_s=(1.0, 2.0), hardware_class=("a", "b"), free_bytes=6)
CHAIN = ChainFacts(
    netuid=1,
    block=50,
    miners_per_tempo=40.0,
    burn_share=0.25,
    tempo_s=864.0,
    registration_cost=1.0,
    registration_allowed=True,
    slots=256,
    slots_taken=4,
)


def test_the_arithmetic_by_hand():
    """Stage 1: one member with 0.5 items/s, as fast as this machine, so half of 400 items; 6000 of 16000 FLOPs."""
    found = estimate(RUN_FACTS, MACHINE, CHAIN)
    assert (found.stage, found.why_stage, found.wanted) == (1, "it limits the run's throughput", True)
    offer = found.offer
    assert (offer.share_of_stage, offer.items, offer.work_flops) == (0.5, 200.0, 6000.0)
    leases = 200 / 1000 * 3600 / 0.6931471805599453
    assert offer.reliability == pytest.approx(leases / (leases + 16))
    worth = 6000 * offer.reliability
    assert offer.score == pytest.approx(worth / (worth + 10_000 * 0.9))
    assert offer.tokens_per_day == pytest.approx(offer.score * 0.75 * 40.0 * 100)
    other = found.offers[0]
    assert other.share_of_stage == pytest.approx(1 / 3), "a member of unknown speed counts as the others of its stage"
    assert (other.fits, offer.fits) == (True, False)
    assert any("1 members whose speed isn't known" in line for line in found.assumes)
    assert any("0.28 h" in line for line in found.assumes)
    text = "\n".join(lines_of(found))
    assert "its hardware class is wanted" in text
    assert f"score {offer.score:.4f}" in text
    assert "memory: stage 1 needs 7 B" in text


def test_a_machine_does_no_more_than_it_can():
    """It is slow, and the stage has nobody else: its share is all of it, its time is not enough."""
    run = msgspec.structs.replace(RUN_FACTS, stages=(RUN_FACTS.stages[0], StageFacts(1, 30.0, ())))
    found = estimate(run, msgspec.structs.replace(MACHINE, item_s=(1.0, 20.0)), None)
    assert (found.stage, found.why_stage) == (1, "nobody serves it")
    assert (found.offer.share_of_stage, found.offer.items) == (1.0, 50.0)
    assert found.offer.tokens_per_day is None
    assert "amount: the chain wasn't asked" in lines_of(found)


def test_another_hardware_class_is_said_to_be_refused_and_an_open_one_to_be_open():
    found = estimate(RUN_FACTS, msgspec.structs.replace(MACHINE, hardware_class=("a", "x")), CHAIN)
    assert found.wanted is False
    assert "a join would be refused: golden task 1 gives x here, the run's class has b" in found.class_says
    shorter = estimate(RUN_FACTS, msgspec.structs.replace(MACHINE, hardware_class=("a",)), CHAIN)
    assert (shorter.wanted, "2 golden tasks, here there are 1" in shorter.class_says) == (False, True)
    still_open = estimate(msgspec.structs.replace(RUN_FACTS, hardware_class=None), MACHINE, CHAIN)
    assert (still_open.wanted, "isn't settled" in still_open.class_says) == (None, True)


def test_where_nobody_was_paid_it_says_so():
    for changes in ({"num_steps": 0}, {"covered_s": 0.0}):
        with pytest.raises(NotFound, match="nobody earned anything on run toy in the last day"):
            estimate(msgspec.structs.replace(RUN_FACTS, **changes), MACHINE, CHAIN)
    unpaid = msgspec.structs.replace(CHAIN, miners_per_tempo=None)
    lines = lines_of(estimate(RUN_FACTS, MACHINE, unpaid))
    assert "amount: no miner of subnet 1 was paid in the last tempo (block 50)" in lines
    finished = estimate(msgspec.structs.replace(RUN_FACTS, state="finished"), MACHINE, None)
    assert any("nothing more is to be earned" in line for line in finished.assumes)
    full = msgspec.structs.replace(CHAIN, slots_taken=256)
    assert any("the one that earned least is replaced" in line for line in lines_of(estimate(RUN_FACTS, MACHINE, full)))
    closed = msgspec.structs.replace(CHAIN, registration_allowed=False)
    assert "registration on subnet 1 is closed" in lines_of(estimate(RUN_FACTS, MACHINE, closed))


def step(seconds: float) -> StepView:
    return StepView(0, 1.0, 1.0, 1, seconds, None)


def test_the_last_day_is_cut_out_of_the_steps():
    assert last_day([step(40_000.0)] * 5, 0.0) == (3, 86_400.0)
    assert last_day([step(100.0)] * 5, 0.0) == (5, 500.0)
    assert last_day([step(100.0)] * 5, 86_150.0) == (3, 250.0)
    assert last_day([step(100.0)] * 5, 90_000.0) == (0, 0.0)
    assert last_day([], 0.0) == (0, 0.0)


def neuron(uid: int, incentive: float, emission: float, dividends: float = 0.0) -> Neuron:
    return Neuron(
        uid=uid,
        hotkey=f"hot{uid}",
        coldkey="cold",
        stake=0.0,
        validator_permit=False,
        last_update=0,
        registered_at_block=0,
        incentive=incentive,
        emission=emission,
        dividends=dividends,
    )


def test_what_miners_are_paid_is_read_from_those_who_only_mine():
    """uid 0 is the owner's: what it is given is burned. uid 3 validates as well."""
    neurons = (neuron(0, 0.5, 0.0), neuron(1, 0.1, 4.0), neuron(2, 0.2, 8.0), neuron(3, 0.2, 50.0, 1.0))
    graph = Metagraph(netuid=1, block=9, tempo=99, owner_hotkey="hot0", neurons=neurons)
    rules = Hyperparameters(
        tempo=99,
        immunity_period=0,
        max_uids=4,
        min_allowed_weights=1,
        weights_rate_limit=0,
        weights_version_key=0,
        serving_rate_limit=0,
        max_validators=1,
        commit_reveal=False,
        registration_allowed=True,
        registration_cost=2.0,
        stake_threshold=0.0,
    )
    found = chain_facts(graph, rules, 12.0)
    assert (found.miners_per_tempo, found.burn_share, found.tempo_s) == (pytest.approx(40.0), 0.5, 1200.0)
    assert (found.slots, found.slots_taken, found.registration_cost) == (4, 4, 2.0)
    nobody = msgspec.structs.replace(graph, neurons=(neuron(0, 1.0, 0.0),))
    assert chain_facts(nobody, rules, 12.0).miners_per_tempo is None
    assert mean_reliability(()) == 1.0


# ---- asked of a swarm


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSwarm]:
    """Two miners, a run without end, blocks of 0.25 s; it has been paid for."""
    directory = tmp_path_factory.mktemp("estimate")
    book = (ROOT / "iota" / "assets" / "moby_dick.txt").read_text(encoding="utf-8")
    (directory / "book.txt").write_text(book[:60_000], encoding="utf-8")
    run = parse_run(RUN.replace("steps = 5", "steps = 100000"), directory)
    chain = Genesis(block_time_s=0.25, faucet=1000.0, subnets=(SubnetGenesis(tempo=20),))
    options = SwarmOptions(device="cpu", measure_costs=False, start_s=START_S, spare_miners=0, genesis=chain)
    with LocalSwarm(directory / "swarm", run, 2, options) as running:
        running.wait_until(lambda status: status.summary.step >= 3, Deadline.after(WAIT_S))
        deadline = Deadline.after(WAIT_S)
        while not any(n.incentive for n in running.chain_state()[0].neurons):
            running.check()
            deadline.check("waiting for the chain to pay miners")
            time.sleep(0.25)
        yield running


def asked(swarm: LocalSwarm, *more: str) -> list[str]:
    chain = ["--subtensor.chain_endpoint", swarm.chain_url]
    return ["miner", "estimate", "--validator.url", swarm.validator_url, *chain, "--budget", "1", *more]


def refused(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> str:
    assert main(arguments) in (1, 2)
    line = capsys.readouterr().err.strip()
    assert len(line.splitlines()) == 1, line
    assert line.startswith("error: ")
    return line


@pytest.mark.timeout(600)
def test_a_running_swarm_is_asked(swarm: LocalSwarm, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(asked(swarm, "--device", "cpu", "--json")) == 0
    found = msgspec.json.decode(capsys.readouterr().out, type=Estimate)
    assert found.run == "calm"
    assert found.wanted is True, "this machine submitted the run"
    assert found.steps_in_last_day >= 3
    assert 0 < found.covered_s < WAIT_S * 2
    assert [offer.members for offer in found.offers] == [1, 1]
    for offer in found.offers:
        assert 0 < offer.share_of_stage < 1
        assert 0 < offer.score < 1
        assert offer.tokens_per_day is not None
        assert offer.tokens_per_day > 0
        assert offer.fits
    assert found.chain is not None
    emitted_per_day = 86_400 / 0.25
    assert found.chain.miners_per_tempo is not None
    miners_per_day = found.chain.miners_per_tempo * 86_400 / found.chain.tempo_s
    whole = emitted_per_day * (1 - 11_796 / 65_535) / 2
    first = whole * 19 / 21  # a chain's first tempo has two blocks less than those behind it
    assert any(miners_per_day == pytest.approx(expected, rel=1e-3) for expected in (whole, first))
    assert main(asked(swarm, "--device", "cpu", "--without-chain")) == 0
    text = capsys.readouterr().out
    assert "run calm (running)" in text
    assert "amount: the chain wasn't asked" in text


def test_items_are_worth_what_scores_count() -> None:
    taken = submission("toy")
    config, plan = plan_submission(taken)
    entry = RunEntry(StoredRun("toy-1", "toy", 0, "owner", taken), config, plan, Path())
    assert [item_flops(plan, stage) for stage in range(plan.num_stages)] == counted(run_planned(entry))


def test_without_a_run_there_is_nothing_to_estimate(
    validator: str,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = refused(capsys, ["miner", "estimate", "--validator.url", validator])
    assert f"{validator} leads no run now" in line
    assert "iota run list" in line


def test_bad_questions_are_one_line_each(swarm: LocalSwarm, capsys: pytest.CaptureFixture[str]) -> None:
    assert "run 'nix' is not active here" in refused(capsys, asked(swarm, "--run", "nix"))
    assert "there is no subnet 9" in refused(capsys, asked(swarm, "--netuid", "9"))
    assert "no device" in refused(capsys, asked(swarm, "--device", "abacus"))
    nobody = ["miner", "estimate", "--validator.url", "http://127.0.0.1:1"]
    assert "127.0.0.1:1" in refused(capsys, nobody)
    chain_instead = ["miner", "estimate", "--validator.url", swarm.chain_url]
    assert swarm.chain_url.removeprefix("http://") in refused(capsys, chain_instead)
