"""A model config becomes units, cuts and stages; a wrong one gives one line that names the key."""

from __future__ import annotations

import msgspec
import pytest
from model_cases import tiny_config, tiny_plan
from transformers import LlamaConfig, LlamaForCausalLM

from subnet.errors import ConfigError
from subnet.model.plan import ModelPlan, ModelUnits
from subnet.model.registry import check_vocabulary, load_architecture


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_canonical_list_is_the_librarys(tied: bool, bias: bool) -> None:
    plan = tiny_plan((0, 1, 3), tie_word_embeddings=tied, attention_bias=bias, mlp_bias=bias)
    model = LlamaForCausalLM(LlamaConfig(**plan.model_config))
    expected = [(name, tuple(p.shape)) for name, p in model.named_parameters()]
    assert [(spec.name, spec.shape) for spec in plan.canonical] == expected
    assert plan.units.num_parameters == sum(p.numel() for p in model.parameters())


def test_stages_hold_whole_layers_and_tied_ends_share_the_embedding() -> None:
    plan = tiny_plan((0, 1, 3), tie_word_embeddings=True)
    names = [[spec.name for spec in stage] for stage in plan.stage_tensors]
    assert names[0][0] == names[2][0] == "model.embed_tokens.weight"
    assert names[2][-1] == "model.norm.weight"
    assert {name.split(".")[2] for name in names[1]} == {"1", "2"}
    assert plan.stage_of_tensor["model.embed_tokens.weight"] == 0
    assert plan.layout.group_of_stage == (0, 1, 0)
    assert [section.num_leaves for section in plan.layout.sections] == [1, 1, 1, 2]


def test_one_tied_stage_lists_the_embedding_once() -> None:
    plan = tiny_plan((0,), tie_word_embeddings=True)
    assert [spec.name for spec in plan.stage_tensors[0]] == [spec.name for spec in plan.canonical]


def test_units_survive_the_wire_and_give_the_same_layout() -> None:
    plan = tiny_plan((0, 2), tie_word_embeddings=True)
    units = msgspec.msgpack.decode(msgspec.msgpack.encode(plan.units), type=ModelUnits)
    again = ModelPlan(config=plan.config, model_config=plan.model_config, units=units, cuts=plan.cuts)
    assert again.layout == plan.layout
    assert again.stage_tensors == plan.stage_tensors


def test_config_survives_a_second_load() -> None:
    first = load_architecture(tiny_config(rope_theta=5e4))
    second = load_architecture(first.model_config)
    assert second.model_config == first.model_config
    assert first.config.rope_parameters["rope_theta"] == 5e4


def test_flops_count_matmuls_and_attention() -> None:
    units = load_architecture(tiny_config()).units(16)
    matmul = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 48
    assert units.unit_flops_per_token[1] == 6.0 * (matmul + 16 * 32)
    assert units.unit_flops_per_token[-1] == 6.0 * 32 * 97


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gpt9"}, "model_type = 'gpt9'"),
        ({"hidden_size": 33}, "hidden_size = 33 doesn't divide"),
        ({"hidden_size": "big"}, "hidden_size = 'big'"),
        ({"vocab_size": 0}, "vocab_size = 0"),
        ({"num_key_value_heads": 3}, "num_key_value_heads = 3"),
        ({"attention_dropout": 0.1}, "attention_dropout"),
        ({"hidden_act": "sulu"}, "hidden_act"),
        ({"hiden_size": 64}, "did you mean hidden_size"),
        ({"pad_token_id": 97}, "pad_token_id"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope_type"),
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps"),
    ],
)
def test_a_wrong_config_names_its_key(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        load_architecture(tiny_config(**changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("cuts", [(), (1, 2), (0, 2, 2), (0, 4), (0, 1, 2, 3, 4)])
def test_wrong_cuts_are_refused(cuts: tuple[int, ...]) -> None:
    plan = tiny_plan()
    with pytest.raises(ConfigError):
        ModelPlan(config=plan.config, model_config=plan.model_config, units=plan.units, cuts=cuts)


def test_run_and_model_must_fit() -> None:
    with pytest.raises(ConfigError, match=r"pipeline\.stages = 5"):
        tiny_plan((0, 1, 2, 3, 4))
    with pytest.raises(ConfigError, match="sequence_length"):
        tiny_plan(max_position_embeddings=8)
    with pytest.raises(ConfigError, match=r"vocab_size = 200"):
        check_vocabulary(load_architecture(tiny_config()), 200)
