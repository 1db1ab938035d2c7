"""With a code: a cut model equals the whole one that rounds at its cuts, to the bit; kept and recomputed graphs agree."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from model_cases import tiny_plan

from benchmarks.plain import Plain
from benchmarks.reference import Reference
from benchmarks.setting import holdout_rows, training_rows
from subnet.engine.stage_executor import ItemFailed, PartialKey, StageExecutor
from subnet.engine.stage_state import StageState
from subnet.errors import InputError
from subnet.model.checkpoints import initial_weights
from subnet.model.items import ItemShape
from subnet.model.plan import ModelPlan
from subnet.model.stage import prepare_torch
from subnet.numerics.codes import coded_size
from subnet.words import ItemKey

prepare_torch(1)

CODES = ("int8", "int4")
KEY = PartialKey(-1, 1, 0, 0)
CUTS = [(0, 2), (0, 1, 3), (0, 1, 2, 3)]


@pytest.fixture(autouse=True)
def _torch_settings():
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


def tokens() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    stream = rng.integers(0, 97, 2000).astype(np.uint16)
    return stream[:1500], stream[1500:]


def coded_plan(cuts: tuple[int, ...], code: str, **changes: Any) -> ModelPlan:
    return tiny_plan(cuts, code=code, hidden_size=72, num_attention_heads=6, **changes)  # the last block is shorter


class Stages:
    """All stages of a run in a row, and the gradients that went into their sums."""

    def __init__(self, plan: ModelPlan, *, budget: int = 1 << 30) -> None:
        self.plan, self.grads = plan, dict[str, torch.Tensor]()
        self.executors: list[StageExecutor] = []
        for stage in range(plan.num_stages):
            state = StageState(plan, stage)
            state.load_weights(initial_weights(plan))
            executor = StageExecutor(plan, stage, state, graph_budget_bytes=budget)
            executor._add = self._spy(executor._add)  # type: ignore[method-assign]
            self.executors.append(executor)

    def _spy(self, add: Any) -> Any:
        def spy(item: ItemKey, grads: dict[str, torch.Tensor], key: PartialKey) -> Any:
            self.grads.update({name: grad.clone() for name, grad in grads.items()})
            return add(item, grads, key)

        return spy

    def forward(self, rows: np.ndarray, microbatch: int = 0) -> tuple[list[Any], float]:
        """What goes into each stage, and the loss."""
        inputs: list[Any] = [None]
        loss = 0
        for stage, executor in enumerate(self.executors):
            done = executor.forward(ItemKey(-1, microbatch, stage), inputs[-1], rows, keep_graph=True)
            inputs.append(done.output)
            loss = done.loss_bits
        assert inputs.pop() is None
        return inputs, float(np.uint32(loss).view(np.float32))

    def backward(self, rows: np.ndarray, inputs: list[Any], microbatch: int = 0) -> list[Any]:
        grad, out = None, []
        for stage in reversed(range(len(self.executors))):
            item = ItemKey(-1, microbatch, stage)
            grad = self.executors[stage].backward(item, grad, inputs[stage], rows, partial=KEY).output
            out.append(grad)
        assert out.pop() is None
        return out


def reference_of(plan: ModelPlan) -> Reference:
    return Reference(plan.config, dict(plan.model_config), *tokens(), cuts=plan.cuts)


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_a_cut_model_with_a_code_is_the_reference_that_rounds_at_the_cuts(
    cuts: tuple[int, ...], compute: str, code: str
) -> None:
    plan = coded_plan(cuts, code, compute=compute, tie_word_embeddings=compute == "bf16")
    reference, stages = reference_of(plan), Stages(plan)
    loss = reference.microbatch(-1, 1)
    rows = training_rows(plan.config, tokens()[0], -1, 1)
    inputs, ours = stages.forward(rows)
    gradients = stages.backward(rows, inputs)
    size = coded_size(code, plan.config.pipeline.microbatch_rows * plan.config.data.sequence_length, 72, 2)
    assert {memoryview(b).nbytes for b in [*inputs[1:], *gradients]} == {size}
    assert ours == loss
    for name, parameter in reference.parameters.items():
        assert torch.equal(stages.grads[name], parameter.grad), name


@pytest.mark.parametrize("code", CODES)
def test_the_code_matters_and_so_do_the_cuts(code: str) -> None:
    losses = {reference_of(coded_plan(cuts, code)).microbatch(-1, 0) for cuts in CUTS}
    whole = reference_of(coded_plan((0,), code)).microbatch(-1, 0)
    raw = [reference_of(coded_plan(cuts, "raw")).microbatch(-1, 0) for cuts in CUTS]
    assert len(losses | {whole}) == len(CUTS) + 1
    assert set(raw) == {whole}
    assert all(abs(loss / whole - 1) < 0.02 for loss in losses)


@pytest.mark.parametrize("code", CODES)
def test_a_graph_kept_or_computed_again_gives_the_same_bytes(code: str) -> None:
    plan = coded_plan((0, 1, 3), code)
    rows = training_rows(plan.config, tokens()[0], -1, 0)
    kept, redone = Stages(plan), Stages(plan, budget=0)
    (inputs, loss), (again, other) = kept.forward(rows), redone.forward(rows)
    assert loss == other
    assert [bytes(b) for b in inputs[1:]] == [bytes(b) for b in again[1:]]
    assert all(e.retained for e in kept.executors)
    assert not any(e.retained for e in redone.executors)
    one, two = kept.backward(rows, inputs), redone.backward(rows, again)
    assert [bytes(b) for b in one] == [bytes(b) for b in two]
    assert all(torch.equal(grad, redone.grads[name]) for name, grad in kept.grads.items())


@pytest.mark.parametrize("code", CODES)
def test_evaluation_rounds_as_training_does(code: str) -> None:
    plan = coded_plan((0, 2), code)
    stages, reference = Stages(plan), reference_of(plan)
    rows = holdout_rows(plan.config, tokens()[1], 0)
    _, loss = stages.forward(rows, microbatch=plan.config.pipeline.microbatches)
    config = msgspec.structs.replace(
        plan.config,
        evaluation=msgspec.structs.replace(plan.config.evaluation, rows=plan.config.pipeline.microbatch_rows),
    )
    reference.config = config
    assert reference.holdout_loss() == loss


@pytest.mark.parametrize("code", CODES)
def test_what_is_not_finite_fails_as_without_a_code_and_is_a_report_in_evaluation(code: str) -> None:
    hashes = set()
    for name in ("raw", code):
        plan = coded_plan((0, 2), name)
        stages = Stages(plan)
        with torch.no_grad():
            stages.executors[0].state.module.bound[0].parameter[5] = torch.inf
        rows = np.full((4, 17), 5)
        with pytest.raises(ItemFailed, match="not finite") as caught:
            stages.forward(rows)
        hashes.add(caught.value.hash)
        rows = np.random.default_rng(0).integers(6, 97, (4, 17))
        rows[2, 3] = 5
        assert np.isnan(stages.forward(rows, microbatch=4)[1])
    assert len(hashes) == 1


@pytest.mark.parametrize("code", CODES)
def test_foreign_bytes_are_checked_before_use(code: str) -> None:
    plan = coded_plan((0, 2), code)
    stages = Stages(plan)
    rows = training_rows(plan.config, tokens()[0], -1, 0)
    inputs, _ = stages.forward(rows)
    good = bytes(inputs[1])
    last, first = stages.executors[1], stages.executors[0]
    raw = bytes(4 * 4 * 16 * 72)
    for wrong, words in [
        (None, "bytes instead of"),
        (good[:-1], "bytes instead of"),
        (raw, "bytes instead of"),
        (good[:144] + b"\xc0\x7f" + good[146:], "not finite"),
        (good[:144] + b"\xff\x7f" + good[146:], "scale"),
        (b"\0" + good[1:], "exponent"),
    ]:
        with pytest.raises(InputError, match=words):
            last.forward(ItemKey(-1, 1, 1), wrong, rows, keep_graph=True)
        with pytest.raises(InputError, match=words):
            first.backward(ItemKey(-1, 0, 0), wrong, None, rows, partial=KEY)
    assert not first.partials


def test_shapes_know_their_code_and_references_their_cuts() -> None:
    plan = coded_plan((0, 2), "int4")
    assert (
        ItemShape.of(plan).boundary_size_bytes
        == coded_size("int4", 64, 72, 2)
        < ItemShape(4, 2, 16, 72, 97).boundary_size_bytes
    )
    for kind in (Reference, Plain):
        with pytest.raises(InputError, match="cuts"):
            kind(plan.config, dict(plan.model_config), *tokens())
        with pytest.raises(InputError, match="cuts"):
            kind(plan.config, dict(plan.model_config), *tokens(), cuts=(1, 2))


def test_plain_pytorch_rounds_too() -> None:
    plan = coded_plan((0, 2), "int8")
    coded = Plain(plan.config, dict(plan.model_config), *tokens(), cuts=plan.cuts)
    raw = Plain(coded_plan((0, 2), "raw").config, dict(plan.model_config), *tokens())
    one, two = coded.step(0), raw.step(0)
    assert one != two
    assert one == pytest.approx(two, rel=1e-2)
