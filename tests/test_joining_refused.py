"""A miner that isn't let in goes on asking at the pace it is told, and says once why, with the case and where to read about it;
one that is convicted ends with a status of its own."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from loguru import logger

from miner.joining import CONVICTED_ASKS_S, Convicted, Joiner
from miner.node import CONVICTED_STATUS, conviction_in, run_miner
from miner.settings import MinerSettings
from subnet.errors import Refusal, Unreachable
from subnet.protocol.messages import JoinAnswer
from subnet.run.audits import CaseState
from subnet.run.state import new_state
from subnet.words import Cursor, Member
from validator import intake_audits
from validator.decision import RunAppeal
from validator.watch import Watch


@pytest.fixture
def said() -> Iterator[list[str]]:
    lines: list[str] = []
    sink = logger.add(lambda message: lines.append(str(message)), level="WARNING")
    yield lines
    logger.remove(sink)


TOLD: list[object] = []


def joiner() -> Joiner:
    return Joiner(
        SimpleNamespace(signer=SimpleNamespace(hotkey="mine"), on_refused=print, on_let_in=print),
        SimpleNamespace(),
        SimpleNamespace(),
        (),
    )  # type: ignore[arg-type]


QUARANTINED = Refusal("quarantined", "case 12 about step 7 stage 1 is open", 5.0)


def test_quarantine_is_waited_out_and_said_once_with_its_case(said: list[str]) -> None:
    asking = joiner()
    assert [asking.wait_after(QUARANTINED) for _ in range(5)] == [5.0] * 5
    assert len(said) == 1
    for words in ("case 12", "iota score explain mine", "iota audit fetch", "iota audit replay", "every 5 s until"):
        assert words in said[0]
    assert asking.wait_after(None) < 1
    asking.wait_after(QUARANTINED)
    assert len(said) == 2, "another time is another matter"


def test_what_the_validator_hints_at_is_said_too(said: list[str]) -> None:
    joiner().wait_after(Refusal("quarantined", "case 12", 5.0, "a third party is asked"))
    assert "a third party is asked" in said[0]


def test_a_convicted_hotkey_asks_once_more_and_then_ends_saying_how_to_appeal(said: list[str]) -> None:
    asking = joiner()
    convicted = Refusal("convicted", "case 12: convicted")
    assert asking.wait_after(convicted) == CONVICTED_ASKS_S
    assert len(said) == 1
    for words in ("case 12", "iota audit appeal CASE", "asks once more in 60 s, then it ends"):
        assert words in said[0]
    with pytest.raises(Convicted, match="case 12") as ended:
        asking.wait_after(convicted)
    assert "iota audit appeal" in str(ended.value)
    assert not ended.value.retryable


def test_a_convicted_hotkey_that_is_told_when_to_ask_asks_then(said: list[str]) -> None:
    """An appeal is under way."""
    asking = joiner()
    appealed = Refusal("convicted", "case 12: convicted, an appeal runs", 600.0)
    assert [asking.wait_after(appealed) for _ in range(3)] == [600.0] * 3
    assert "Asking again in 600 s" in said[0]
    assert asking.wait_after(Refusal("convicted", "soon", 1.0)) == CONVICTED_ASKS_S
    assert asking.wait_after(None) < 1, "it was upheld"
    assert asking.wait_after(Refusal("convicted", "case 13: convicted")) == CONVICTED_ASKS_S


def test_quarantine_between_two_convictions_is_another_matter(said: list[str]) -> None:
    asking = joiner()
    asking.wait_after(Refusal("convicted", "case 12: convicted"))
    asking.wait_after(QUARANTINED)
    assert asking.wait_after(Refusal("convicted", "case 13: convicted")) == CONVICTED_ASKS_S


def test_another_boot_id_is_taken_at_once(said: list[str]) -> None:
    asking = joiner()
    boot = asking.boot
    assert asking.wait_after(Refusal("boot_seen", "seen")) == 0.0
    assert asking.boot != boot
    assert asking.wait_after(Refusal("back_off", "gone silently", 3.0)) == 3.0
    assert not said


# --- the whole process -------------------------------------------------------------------------------------------


async def test_it_asks_at_the_times_told_until_it_is_convicted(
    said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [QUARANTINED, QUARANTINED, Refusal("convicted", "case 12")]
    waits: list[float] = []

    async def request(*_: object, **__: object) -> JoinAnswer:
        return JoinAnswer(False, answers.pop(0) if len(answers) > 1 else answers[0])

    async def sleep(context: object, seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr("miner.joining._sleep_until_member", sleep)
    context = SimpleNamespace(
        signer=SimpleNamespace(hotkey="mine"), member=None, run_state=SimpleNamespace(finished=None), run_id="run",
        settings=MinerSettings(), directives=SimpleNamespace(cursor=Cursor(1, 0)), reachable=True, peak_flops_per_s=0.0,
        on_refused=TOLD.append, on_let_in=TOLD.clear,
    )  # fmt: skip
    client = SimpleNamespace(base_url="", receiver="", offset_ns=0, request=request)
    asking = Joiner(context, client, SimpleNamespace(aim=lambda target: None), ())  # type: ignore[arg-type]
    with pytest.raises(Convicted):
        await asking.run(1)
    assert waits == [5.0, 5.0, CONVICTED_ASKS_S]
    assert len(said) == 2


@pytest.mark.parametrize("depth", [0, 2])
def test_the_process_of_a_convicted_hotkey_ends_with_its_own_status(
    monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    async def serve(*_: object) -> None:
        error: Exception = Convicted("case 12")
        for _ in range(depth):
            error = ExceptionGroup("tasks", [error])
        raise error

    monkeypatch.setattr("miner.node._serve", serve)
    assert run_miner(MinerSettings(), None, None) == CONVICTED_STATUS == 4  # type: ignore[arg-type]


def test_another_failure_beside_a_conviction_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    both = ExceptionGroup("tasks", [Convicted("case 12"), Unreachable("the disk is gone")])
    assert conviction_in(both) is None

    async def serve(*_: object) -> None:
        raise both

    monkeypatch.setattr("miner.node._serve", serve)
    with pytest.raises(ExceptionGroup):
        run_miner(MinerSettings(), None, None)  # type: ignore[arg-type]


# --- what the validator answers ----------------------------------------------------------------------------------


def test_the_refusal_names_the_case_and_gives_a_time_only_while_an_appeal_runs() -> None:
    state, watch = new_state(), Watch()
    state.convicted.add("liar")
    assert intake_audits.convicted(state, "liar", watch).retry_after is None, "a merge's trace has no case"
    for number, hotkey, outcome in ((3, "liar", "convicted"), (7, "liar", "convicted"), (8, "other", "convicted")):
        state.audits.cases[number] = CaseState(
            hotkey=hotkey, member=Member(hotkey, 1, 1), coldkey="cold", step=5, stage=1, charge="partial",
            bundle="bundle", digest="", sealed=True, branch=0, outcome=outcome,
        )  # fmt: skip
    refused = intake_audits.convicted(state, "liar", watch)
    assert (refused.code, refused.retry_after) == ("convicted", None)
    assert "case 7 (step 5, stage 1)" in refused.reason
    for command in ("iota audit fetch 7", "iota audit replay", "iota audit appeal 7"):
        assert command in refused.hint
    watch.audits.appeals.append(8)
    assert intake_audits.convicted(state, "liar", watch).retry_after is None, "that is somebody else's"
    watch.audits.appeals.append(3)
    assert intake_audits.convicted(state, "liar", watch).retry_after == intake_audits.APPEAL_RETRY_S
    watch.audits.appeals.clear()
    watch.started.add(RunAppeal(7))
    running = intake_audits.convicted(state, "liar", watch)
    assert running.retry_after == intake_audits.APPEAL_RETRY_S
    assert "an appeal runs" in running.reason
