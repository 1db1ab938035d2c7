"""The stage builder against plain `transformers`: chunked loss and its gradients are those of autograd, to the bit."""

from __future__ import annotations

import pytest
import torch
from model_cases import PIECE, plain_microbatch, plain_model, tiny_plan, tokens_of

from subnet.model.checkpoints import initial_weights
from subnet.model.plan import ModelPlan
from subnet.model.stage import StageModule, build_stage, prepare_torch

prepare_torch(1)


def _whole(plan: ModelPlan) -> tuple[StageModule, dict[str, torch.Tensor]]:
    weights = initial_weights(plan)
    module = build_stage(plan, 0)
    leaves = module.bind(weights)
    return module, {leaf.name: leaf.parameter for leaf in leaves}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_pieces_differentiated_one_at_a_time_equal_one_graph(compute: str, attention: str) -> None:
    plan = tiny_plan(compute=compute, attention=attention, chunks=1)
    module, parameters = _whole(plan)
    rows = tokens_of(1)
    plain = plain_microbatch(plan, plain_model(plan, initial_weights(plan)), rows)
    tokens = torch.from_numpy(rows)
    hidden = module(tokens[:, :-1])
    result = module.chunk_loss(hidden, tokens[:, 1:], divisor=64, piece_tokens=PIECE, want_grad=True)
    hidden.backward(result.hidden_grad_BLH)
    grads = {name: p.grad for name, p in parameters.items() if p.grad is not None} | {
        "lm_head.weight": result.head_grad_VH
    }
    assert result.loss.item() == plain.loss
    assert set(grads) == set(plain.grads)
    for name, expected in plain.grads.items():
        assert torch.equal(grads[name], expected), name


def test_loss_without_gradients_is_the_same_and_ignores_masked_labels() -> None:
    plan = tiny_plan()
    module, _ = _whole(plan)
    tokens = torch.from_numpy(tokens_of(2))
    labels = tokens[:, 1:].clone()
    labels[:, ::3] = -100
    hidden = module(tokens[:, :-1])
    with_grad = module.chunk_loss(hidden, labels, divisor=64, piece_tokens=PIECE, want_grad=True)
    with torch.no_grad():
        again = module(tokens[:, :-1])
        without = module.chunk_loss(again, labels, divisor=64, piece_tokens=PIECE, want_grad=False)
    assert torch.equal(hidden, again)
    assert torch.equal(with_grad.loss, without.loss)
    assert without.hidden_grad_BLH is None
    masked = (labels == -100).unsqueeze(-1).expand_as(hidden)
    assert with_grad.hidden_grad_BLH is not None
    assert not with_grad.hidden_grad_BLH[masked].any()


def test_tied_leaves_share_storage_but_not_gradients() -> None:
    module, parameters = _whole(tiny_plan(tie_word_embeddings=True))
    head, embedding = parameters["lm_head.weight"], parameters["model.embed_tokens.weight"]
    assert head is not embedding
    assert head.data_ptr() == embedding.data_ptr()
    assert module.leaf_names()[-1] == ("lm_head.weight", "model.embed_tokens.weight")


def test_bind_checks_shapes() -> None:
    plan = tiny_plan()
    weights = initial_weights(plan)
    weights["model.norm.weight"] = torch.ones(5)
    with pytest.raises(ValueError, match="doesn't fit"):
        build_stage(plan, 0).bind(weights)
