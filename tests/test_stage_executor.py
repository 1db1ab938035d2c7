"""Any cut, kept or recomputed graph, any fleet: the bits of the whole plain model; failures add nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from model_cases import plain_microbatch, plain_model, tiny_plan, tokens_of

from subnet.engine.stage_executor import ItemFailed, PartialBroken, PartialKey, StageExecutor
from subnet.engine.stage_state import StageState
from subnet.errors import InputError
from subnet.model.checkpoints import initial_weights
from subnet.model.plan import ModelPlan
from subnet.model.stage import prepare_torch
from subnet.numerics.layout import canonical_locations
from subnet.words import ItemKey

prepare_torch(1)

CUTS = [(0,), (0, 2), (0, 1, 3), (0, 1, 2, 3)]
CALIBRATION = PartialKey(-1, 1, 0, 0)


def executors(plan: ModelPlan, *, budget: int = 1 << 30, weights: dict[str, torch.Tensor] | None = None):
    made = []
    for stage in range(plan.num_stages):
        state = StageState(plan, stage)
        state.load_weights(initial_weights(plan) if weights is None else weights)
        made.append(StageExecutor(plan, stage, state, graph_budget_bytes=budget))
    return made


def as_tensor(plan: ModelPlan, buffer: memoryview) -> torch.Tensor:
    rows, length = plan.config.pipeline.microbatch_rows, plan.config.data.sequence_length
    return torch.from_numpy(np.frombuffer(buffer, dtype=np.float32).copy()).view(rows, length, plan.hidden_size)


class Capture:
    """Stands between an executor and its partial, to see the gradients that go in."""

    def __init__(self, executor: StageExecutor) -> None:
        self.grads: dict[str, torch.Tensor] = {}
        add = executor._add

        def spy(item: ItemKey, grads: dict[str, torch.Tensor], key: PartialKey) -> Any:
            self.grads.update({name: grad.clone() for name, grad in grads.items()})
            return add(item, grads, key)

        executor._add = spy  # type: ignore[method-assign]


def run_item(
    plan: ModelPlan,
    stages: list[StageExecutor],
    microbatch: int,
    rows: np.ndarray,
    *,
    keep: bool = True,
    step: int = -1,
    partial: bool = True,
) -> dict[str, Any]:
    """A microbatch through all stages and back; boundaries by the first layer behind them."""
    boundaries: list[memoryview | None] = [None]
    grads: list[memoryview | None] = [None]
    loss = None
    for stage, executor in enumerate(stages):
        done = executor.forward(ItemKey(step, microbatch, stage), boundaries[-1], rows, keep_graph=keep)
        boundaries.append(done.output)
        loss = done.loss_bits
    for stage in reversed(range(len(stages))):
        key = PartialKey(step, 1, 0, 0) if partial else None
        back = stages[stage].backward(ItemKey(step, microbatch, stage), grads[-1], boundaries[stage], rows, partial=key)
        assert back.loss_bits == (loss if stage == len(stages) - 1 else None)
        grads.append(back.output)
    assert boundaries.pop() is None
    assert grads.pop() is None
    return {
        "loss": float(np.uint32(loss).view(np.float32)),
        "boundaries": {plan.cuts[s]: as_tensor(plan, b) for s, b in enumerate(boundaries) if b is not None},
        "grads": {plan.cuts[len(stages) - s]: as_tensor(plan, g) for s, g in enumerate(grads) if g is not None},
    }


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_any_cut_equals_the_whole_plain_model(cuts: tuple[int, ...], compute: str, tied: bool) -> None:
    plan = tiny_plan(cuts, compute=compute, tie_word_embeddings=tied)
    rows = tokens_of(3)
    plain = plain_microbatch(plan, plain_model(plan, initial_weights(plan)), rows)
    stages = executors(plan)
    seen = [Capture(executor) for executor in stages]
    ours = run_item(plan, stages, 0, rows)
    assert ours["loss"] == plain.loss
    for layer, boundary in ours["boundaries"].items():
        assert torch.equal(boundary, plain.boundaries[layer])
        assert torch.equal(ours["grads"][layer], plain.boundary_grads[layer])
    grads = {name: grad for capture in seen for name, grad in capture.grads.items()}
    assert set(grads) == set(plain.grads)
    for name, grad in grads.items():
        assert torch.equal(grad, plain.grads[name]), name


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_a_graph_kept_or_computed_again_gives_the_same_bits(compute: str) -> None:
    plan = tiny_plan((0, 2), compute=compute)
    rows = tokens_of(4)
    kept, redone = executors(plan), executors(plan, budget=0)
    first, second = [Capture(e) for e in kept], [Capture(e) for e in redone]
    one, two = run_item(plan, kept, 1, rows), run_item(plan, redone, 1, rows, keep=True)
    assert all(not e.retained and not e.retained_bytes and e.item_graph_bytes is None for e in redone)
    assert one["loss"] == two["loss"]
    assert torch.equal(one["boundaries"][2], two["boundaries"][2])
    assert torch.equal(one["grads"][2], two["grads"][2])
    for a, b in zip(first, second, strict=True):
        assert all(torch.equal(grad, b.grads[name]) for name, grad in a.grads.items())


def test_evaluation_equals_training_forward_and_has_no_backward() -> None:
    plan = tiny_plan((0, 2))
    rows = tokens_of(5)
    stages = executors(plan)
    trained = run_item(plan, stages, 0, rows)
    hidden = stages[0].forward(ItemKey(-1, 4, 0), None, rows, keep_graph=True)
    loss = stages[1].forward(ItemKey(-1, 4, 1), hidden.output, rows, keep_graph=True)
    assert float(np.uint32(loss.loss_bits).view(np.float32)) == trained["loss"]
    assert not any(executor.retained for executor in stages)
    with pytest.raises(InputError, match="hold-out"):
        stages[1].backward(ItemKey(-1, 4, 1), None, hidden.output, rows, partial=None)


def test_graphs_are_counted_and_stay_within_the_budget() -> None:
    plan = tiny_plan((0, 2))
    probe = executors(plan)[0]
    assert probe.can_retain()
    probe.forward(ItemKey(-1, 0, 0), None, tokens_of(0), keep_graph=True)
    size = probe.item_graph_bytes
    assert size is not None
    # Two layers keep at least their inputs, projections and MLP activations.
    assert size > 2 * 64 * 4 * (6 * 32 + 3 * 48)
    executor = executors(plan, budget=2 * size + 1)[0]
    for microbatch in range(3):
        executor.forward(ItemKey(-1, microbatch, 0), None, tokens_of(microbatch), keep_graph=True)
    assert executor.retained == (ItemKey(-1, 0, 0), ItemKey(-1, 1, 0))
    assert executor.retained_bytes == 2 * size
    assert not executor.can_retain()
    executor.drop_graph(ItemKey(-1, 0, 0))
    assert executor.can_retain()


def test_two_executors_sum_to_what_one_sums() -> None:
    plan = tiny_plan((0, 2))
    alone, pair = executors(plan), [executors(plan), executors(plan)]
    for microbatch in range(4):
        rows = tokens_of(10 + microbatch)
        run_item(plan, alone, microbatch, rows)
        run_item(plan, pair[microbatch % 2], microbatch, rows)
    for stage in range(2):
        whole = alone[stage].partials[CALIBRATION]
        halves = [executors_of[stage].partials[CALIBRATION] for executors_of in pair]
        assert whole.microbatches == halves[0].microbatches | halves[1].microbatches
        for index, part in whole.sums.items():
            assert torch.equal(part.maxima, torch.maximum(halves[0].sums[index].maxima, halves[1].sums[index].maxima))


def test_a_replay_serves_the_same_boundary_and_adds_nothing() -> None:
    plan = tiny_plan((0, 2))
    rows = tokens_of(6)
    stages, again = executors(plan), executors(plan)
    one = run_item(plan, stages, 0, rows)
    two = run_item(plan, again, 0, rows, partial=False)
    assert torch.equal(one["grads"][2], two["grads"][2])
    assert not any(executor.partials for executor in again)


def test_an_item_is_added_once() -> None:
    plan = tiny_plan()
    (executor,) = executors(plan)
    run_item(plan, [executor], 0, tokens_of(0))
    with pytest.raises(InputError, match="already added"):
        executor.backward(ItemKey(-1, 0, 0), None, None, tokens_of(0), partial=CALIBRATION)
    assert executor.partials[CALIBRATION].microbatches == {0}
    executor.drop_partial(CALIBRATION)
    assert not executor.partials


def _poisoned(plan: ModelPlan, name: str, value: float) -> dict[str, torch.Tensor]:
    weights = initial_weights(plan)
    weights[name].view(-1)[5] = value
    return weights


def _failure(run: Any) -> str:
    with pytest.raises(ItemFailed) as caught:
        run()
    return caught.value.hash


@pytest.mark.parametrize("keep", [True, False])
def test_a_loss_that_is_not_finite_fails_with_the_same_hash_everywhere(keep: bool) -> None:
    plan = tiny_plan((0, 2))
    weights = _poisoned(plan, "lm_head.weight", float("inf"))
    members = [executors(plan, weights=weights, budget=budget) for budget in (1 << 30, 0)]
    hashes = {_failure(lambda m=m: run_item(plan, m, 0, tokens_of(1), keep=keep)) for m in members}
    others = _failure(lambda: run_item(plan, members[0], 1, tokens_of(1), keep=keep))
    assert len(hashes) == 1
    assert others not in hashes
    assert not any(executor.partials for member in members for executor in member)
    assert not any(last.retained for _, last in members)


def test_a_gradient_that_is_not_finite_leaves_the_partial_as_it_was() -> None:
    plan = tiny_plan()
    hashes = set()
    for budget in (1 << 30, 0):
        (executor,) = executors(plan, budget=budget)
        run_item(plan, [executor], 0, tokens_of(0))
        before = {i: part.maxima.clone() for i, part in executor.partials[CALIBRATION].sums.items()}
        hook = executor.state.module.bound[5].parameter.register_hook(lambda grad: grad * float("nan"))
        hashes.add(_failure(lambda e=executor: run_item(plan, [e], 1, tokens_of(1))))
        hashes.add(_failure(lambda e=executor: run_item(plan, [e], 1, tokens_of(1), partial=False)))
        hook.remove()
        partial = executor.partials[CALIBRATION]
        assert partial.microbatches == {0}
        assert all(torch.equal(part.maxima, before[i]) and part.num_items == 1 for i, part in partial.sums.items())
        run_item(plan, [executor], 1, tokens_of(1))
        assert executor.partials[CALIBRATION].microbatches == {0, 1}
    assert len(hashes) == 1


def test_an_addition_that_breaks_off_costs_the_partial() -> None:
    """What is half added can't be told from what isn't: it is gone, and must be reported void."""
    plan = tiny_plan()
    (executor,) = executors(plan)
    run_item(plan, [executor], 0, tokens_of(0))
    sums = executor.partials[CALIBRATION].sums
    part = sums[max(sums)]
    part.maxima = part.maxima.to(torch.complex64)  # the last section fails once the others have been added to
    with pytest.raises(PartialBroken, match="interrupted"):
        run_item(plan, [executor], 1, tokens_of(1))
    assert CALIBRATION not in executor.partials
    run_item(plan, [executor], 0, tokens_of(0))
    assert executor.partials[CALIBRATION].microbatches == {0}


def test_an_exception_of_the_computation_is_a_failure_of_the_item() -> None:
    plan = tiny_plan()
    hashes = set()
    for _ in range(2):
        (executor,) = executors(plan)

        def boom(*_args: object) -> None:
            raise MemoryError("no memory")

        hook = executor.state.module.norm.register_forward_hook(boom)
        hashes.add(_failure(lambda e=executor: run_item(plan, [e], 0, tokens_of(0))))
        hook.remove()
        run_item(plan, [executor], 0, tokens_of(0))
    assert len(hashes) == 1


def test_foreign_input_is_refused_before_it_is_used() -> None:
    plan = tiny_plan((0, 2))
    first, last = executors(plan)
    rows = tokens_of(0)
    good = first.forward(ItemKey(-1, 0, 0), None, rows, keep_graph=False).output
    bad = np.frombuffer(good, dtype=np.float32).copy()
    bad[17] = np.nan
    low, high, masked = rows.copy(), rows.copy(), rows.copy()
    low[0, 0], high[1, 3], masked[2, 5] = -1, 97, -100
    for item, x, tokens, words in [
        (ItemKey(-1, 0, 1), bad.data, rows, "not finite"),
        (ItemKey(-1, 0, 1), good[:-4], rows, "bytes instead of"),
        (ItemKey(-1, 0, 1), None, rows, "bytes instead of"),
        (ItemKey(-1, 0, 1), good, rows[:, :-1], "tokens are"),
        (ItemKey(-1, 0, 1), good, high, "outside"),
        (ItemKey(-1, 0, 0), good, rows, "not of stage"),
        (ItemKey(0, 0, 1), good, rows, "before update 0"),
    ]:
        with pytest.raises(InputError, match=words):
            last.forward(item, x, tokens, keep_graph=True)
    for tokens in (low, masked, None):
        with pytest.raises(InputError):
            first.forward(ItemKey(-1, 0, 0), None, tokens, keep_graph=True)
    last.forward(ItemKey(-1, 0, 1), good, masked, keep_graph=True)
    with pytest.raises(InputError, match="gradient"):
        first.backward(ItemKey(-1, 0, 0), bad.data, None, rows, partial=CALIBRATION)
    with pytest.raises(InputError, match="partial of step"):
        last.backward(ItemKey(-1, 0, 1), None, good, rows, partial=PartialKey(0, 1, 0, 0))
    assert not first.partials
    assert last.retained == (ItemKey(-1, 0, 1),)


def test_every_leaf_of_the_layout_gets_a_gradient() -> None:
    plan = tiny_plan((0, 2), tie_word_embeddings=True)
    stages = executors(plan)
    run_item(plan, stages, 0, tokens_of(0))
    for name, where in canonical_locations(plan.layout).items():
        holders = [e.partials[CALIBRATION].sums[where.section] for e in stages if where.section in e._places]
        assert len(holders) == (2 if name == "model.embed_tokens.weight" else 1)
        for part in holders:
            span = where.span
            assert part.maxima[span.block_start : span.block_start + span.num_blocks].any(), name
