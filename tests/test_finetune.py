"""Runs that train adapters or some layers, and runs on dialogues: stages equal peft in one process, to the bit."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from iota.export_adapter import base_specs, merged_tensor, write_adapter
from iota.export_check import check_adapter_logits, check_tokens, plain_logits, staged_logits
from subnet.engine.stage_state import StageState
from subnet.errors import ConfigError, InputError
from subnet.model.checkpoints import write_pretrained
from subnet.model.hardware_class import hardware_class
from subnet.model.items import ItemShape
from subnet.model.memory import stage_memory, stage_slice_bytes
from subnet.model.plan import ModelPlan
from subnet.model.snapshots import decode_manifest
from subnet.model.stage import Boundary, prepare_torch
from subnet.model.token_bits import LEARNT, STARTS
from subnet.numerics import fixed_point
from subnet.numerics.layout import TensorSpec, adapter_pairs
from subnet.run.trainable import TrainableSection, is_adapter
from subnet.words import BlobHash, ItemKey
from tests.family_cases import LENGTH, family_plan
from tests.finetune_cases import FULL, LORA, SFT, TunedRun, dialogue_streams, reference_of, tuned_plan
from validator import scale_replay

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*RoPE.*"),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*"),
]
LAYERS = TrainableSection(kind="layers", layers=(0, 1, 3), also=("norm", "head"))


@pytest.fixture(autouse=True)
def _torch_settings():
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    prepare_torch(1)
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


CASES = [
    ("llama", LORA, None, {}),
    ("llama", LORA, SFT, {}),
    ("llama", LAYERS, SFT, {}),
    ("llama", LORA, None, {"compute": "bf16"}),
    ("llama", LORA, None, {"update_delay": 1}),
    ("qwen3", LORA, SFT, {}),
    ("qwen3", LAYERS, None, {}),
    ("qwen2", TrainableSection(kind="lora", layers=(0, 1, 3), rank=2), None, {}),
    ("qwen3_moe", LORA, SFT, {}),
    ("qwen3_moe", FULL, SFT, {}),
]


@pytest.mark.parametrize(("name", "section", "objective", "settings"), CASES)
def test_three_stages_are_the_reference(name: str, section, objective, settings) -> None:
    plan = tuned_plan(name, section, objective=objective, **settings)
    reference, run = reference_of(plan), TunedRun(plan)
    assert reference.order == [spec.name for spec in plan.canonical]
    reference.calibrate()
    run.step(-1)
    for step in range(3):
        report, ours = reference.step(step), run.step(step)
        assert report.loss == sum(ours) / len(ours)
    assert run.root() == reference.state_root()


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_an_adapter_loads_with_peft_and_its_logits_are_the_stages(name: str, tmp_path: Path) -> None:
    run = TunedRun(tuned_plan(name, LORA))
    for step in range(-1, 4):
        run.step(step)
    weights, plan = run.weights(), run.plan
    write_adapter(tmp_path / "adapter", plan, lambda spec: weights[spec.name])
    checked = check_adapter_logits(tmp_path / "adapter", plan, lambda spec: weights[spec.name])
    assert checked.num_logits == 2 * LENGTH * plan.vocab_size
    write_pretrained(
        tmp_path / "merged",
        plan.model_config,
        base_specs(plan),
        lambda spec: merged_tensor(plan, spec, lambda s: weights[s.name]),
    )
    tokens_BL = check_tokens(plan)
    ours = staged_logits(plan, lambda spec: weights[spec.name], tokens_BL)
    torch.testing.assert_close(plain_logits(tmp_path / "merged", plan, tokens_BL), ours, atol=2e-6, rtol=1e-5)
    base = {
        s.name: torch.zeros(s.shape) if s.name.endswith("lora_B.weight") else weights[s.name] for s in plan.canonical
    }
    assert not torch.allclose(staged_logits(plan, lambda spec: base[spec.name], tokens_BL), ours, atol=1e-5)


def test_only_what_is_trained_is_merged_updated_and_kept_moments_of() -> None:
    plan, full = tuned_plan("llama", LORA), family_plan("llama")
    assert all(is_adapter(span.spec.name) for section in plan.layout.sections for span in section.tensors)
    assert plan.num_trained == sum(spec.num_elements for spec in plan.canonical if is_adapter(spec.name))
    for stage in range(plan.num_stages):
        assert stage_slice_bytes(plan, stage) < stage_slice_bytes(full, stage) / 3
        ours, theirs = stage_memory(plan, stage), stage_memory(full, stage)
        assert ours.size_of("moments") == 8 * sum(s.num_elements for s in plan.trained_tensors[stage])
        assert ours.size_of("weights") >= theirs.size_of("weights")
        assert ours.peak_bytes < theirs.peak_bytes
    run = TunedRun(plan)
    before = {name: tensor.clone() for name, tensor in run.weights().items()}
    for step in range(-1, 2):
        run.step(step)
    changed = {name for name, tensor in run.weights().items() if not torch.equal(tensor, before[name])}
    assert changed == {spec.name for spec in plan.canonical if is_adapter(spec.name)}


def test_snapshots_name_frozen_weights_and_hand_them_over_once() -> None:
    plan = tuned_plan("llama", LORA)
    run = TunedRun(plan)
    for step in range(-1, 2):
        run.step(step)
    state, every, few = run.stages[1].state, dict[str, bytes](), dict[str, bytes]()
    manifest = state.snapshot(lambda blob, data: every.__setitem__(blob, bytes(data)))
    again = state.snapshot(lambda blob, data: few.__setitem__(blob, bytes(data)), frozen=False)
    assert manifest == again
    assert len(few) < len(every)
    assert {len(entry.arrays) for entry in manifest.entries} == {1, 5}
    other = StageState(plan, 1)
    other.load(decode_manifest(manifest.encode()), lambda ref: every[ref.hash])
    assert other.stage_root() == state.stage_root()
    bare = {name: entry for name, entry in zip((e.name for e in manifest.entries), manifest.entries, strict=True)}
    victim = next(name for name in bare if is_adapter(name))
    wrong = msgspec.structs.replace(bare[victim], arrays={"weight": bare[victim].arrays["weight"]})
    forged = msgspec.structs.replace(
        manifest, entries=tuple(wrong if e.name == victim else e for e in manifest.entries)
    )
    with pytest.raises(InputError, match="another optimizer"):
        StageState(plan, 1).load(forged, lambda ref: every[BlobHash(ref.hash)])


def test_an_adapters_first_gradients_set_its_scales_at_once() -> None:
    plan = tuned_plan("llama", LORA)
    section = plan.layout.sections[0]
    a, b = adapter_pairs(section)[0]
    rng = np.random.default_rng(0)
    decayed = limit = torch.zeros(section.num_blocks)
    ours = theirs = (np.zeros(section.num_blocks, np.float32),) * 2
    for step in range(4):
        maxima = rng.random(section.num_blocks, dtype=np.float32) * np.float32(1e-3)
        if step < 2:
            for first, _ in adapter_pairs(section):
                maxima[first.block_start : first.block_start + first.num_blocks] = 0
        decayed, limit = fixed_point.update_scales(section, decayed, limit, torch.from_numpy(maxima), first=step == 0)
        ours = (decayed.numpy(), limit.numpy())
        theirs = scale_replay.update_scales(section, *theirs, maxima, first=step == 0)
        assert all(np.array_equal(x, y) for x, y in zip(ours, theirs, strict=True))
        of_a, of_b = limit[a.block_start], limit[b.block_start : b.block_start + b.num_blocks].amax()
        if step < 2:
            assert of_a == of_b / 16
        elif step == 2:
            assert of_a == max(
                2 * maxima[a.block_start], 0.5 * maxima[a.block_start : a.block_start + a.num_blocks].max()
            )


@pytest.mark.parametrize(
    ("section", "words"),
    [
        (TrainableSection(kind="lora", targets=("query",)), "'query' matches no linear layer.*self_attn.q_proj"),
        (TrainableSection(kind="lora", layers=(4,)), "names layer 4: the model has 4.*0 to 3"),
        (TrainableSection(kind="layers", layers=(3,)), "trains nothing of stage 0.*name layers of every stage"),
    ],
)
def test_what_trains_nothing_is_refused_with_the_remedy(section: TrainableSection, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        tuned_plan("llama", section)
    assert re.search(words, f"{caught.value.reason} {caught.value.hint}")


def test_golden_tasks_know_what_is_trained() -> None:
    made = {hardware_class(tuned_plan("llama", s, objective=o)) for s in (FULL, LORA, LAYERS) for o in (None, SFT)}
    assert len(made) == 6


def _loss(tokens: np.ndarray, rows: int) -> float:
    """Of one microbatch of dialogues at a lone stage."""
    base = tuned_plan("llama", FULL, (0,), objective=SFT, chunks=1)
    pipeline = msgspec.structs.replace(base.config.pipeline, microbatch_rows=rows)
    data = msgspec.structs.replace(base.config.data, sequence_length=tokens.shape[1] - 1)
    config = msgspec.structs.replace(base.config, pipeline=pipeline, data=data)
    run = TunedRun(ModelPlan(config, base.model_config, base.units, (0,)))
    item = run.stages[0].forward(ItemKey(-1, 0, 0), None, tokens, keep_graph=False)
    return float(np.uint32(item.loss_bits or 0).view(np.float32))


def _dialogue(seed: int, size: int) -> np.ndarray:
    tokens = np.random.default_rng(seed).integers(0, 64, size).astype(np.int64)
    tokens[size // 2 :] |= LEARNT
    tokens[0] |= STARTS
    return tokens


def test_dialogues_that_share_a_row_have_the_loss_of_dialogues_in_rows_of_their_own() -> None:
    sizes, length = (5, 4, 6), 15
    parts = [_dialogue(n, size) for n, size in enumerate(sizes)]
    packed = np.concatenate([*parts, [STARTS]])[None]
    alone = np.stack([np.concatenate([p, np.full(length + 1 - len(p), STARTS)]) for p in parts])
    assert abs(_loss(packed, 1) - _loss(alone, 3)) < 1e-6


def test_no_dialogue_sees_another() -> None:
    shape, parts = ItemShape(1, 1, 15, 32, 64, dialogues=True), [_dialogue(n, 5) for n in range(3)]
    plan = tuned_plan("llama", FULL, (0,), objective=SFT)
    module = TunedRun(plan).stages[0].state.module
    rows = np.concatenate([*parts, [STARTS]])[None]
    other = rows.copy()
    other[0, 1:5] ^= 1  # another first dialogue

    def states(tokens: np.ndarray) -> torch.Tensor:
        given = shape.inputs(tokens, torch.device("cpu"), is_first=True, is_last=True)[0]
        assert given.tokens_BL is not None
        with torch.no_grad():
            return module.through(Boundary(given.tokens_BL), given.positions_BL).hidden_BLH

    one, two = states(rows), states(other)
    assert torch.equal(one[0, 5:], two[0, 5:])
    assert not torch.equal(one[0, 1:5], two[0, 1:5])


def test_tokens_of_dialogues_are_checked() -> None:
    shape = ItemShape(2, 1, 7, 32, 64, dialogues=True)
    rows = np.zeros((2, 8), np.int64)
    for place, value, words in ((0, 64, "outside of 0 to 63"), (3, -1, "32-bit"), (1, 1 << 32, "32-bit")):
        wrong = rows.copy()
        wrong[1, place] = value
        with pytest.raises(InputError, match=words):
            shape.inputs(wrong, torch.device("cpu"), is_first=True, is_last=False)
    with pytest.raises(InputError, match="not \\(2, 8\\)"):
        shape.inputs(None, torch.device("cpu"), is_first=False, is_last=False)


def test_every_stage_reads_tokens_of_dialogues_alone() -> None:
    assert [tuned_plan("llama", LORA).needs_tokens(stage) for stage in range(3)] == [True, False, True]
    assert all(tuned_plan("llama", LORA, objective=SFT).needs_tokens(stage) for stage in range(3))
    assert dialogue_streams()[0].max() >= LEARNT


def test_a_tied_embedding_that_is_frozen_is_in_no_section() -> None:
    plan = tuned_plan("qwen3", LORA)
    assert plan.units.tied is not None
    assert len(plan.layout.groups) == 3
    tied: TensorSpec = plan.units.tied
    assert tied in plan.stage_tensors[0]
    assert tied in plan.stage_tensors[2]
    also = tuned_plan("qwen3", TrainableSection(kind="layers", layers=(0, 1, 3), also=("head",)))
    assert also.layout.sections[-1].name == "tied"
