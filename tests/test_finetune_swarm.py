"""Real swarms, real processes: adapters on dialogues, to the reference's bits; a few kilobytes a merge; peft loads the export."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from benchmarks.finetune_reference import FinetuneReference
from iota.export import export_run
from iota.prepare import DialogueSettings, PreparedData, prepare_data
from iota.swarm import LocalSwarm, SwarmOptions
from subnet.errors import ConfigError
from subnet.run.config import AuditSection, DataSection, ModelSection, PipelineSection, RunConfig, RunSection
from subnet.run.objective import ObjectiveSection
from subnet.run.trainable import TrainableSection
from subnet.timing import Deadline
from tests.pretrained_cases import CHAT, save_model, save_tokenizer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*"),
]
STEPS, LENGTH = 4, 48
SYSTEM_END = "{% if add_generation_prompt %}<assistant>{% endif %}"


def run_config(tmp_path: Path) -> RunConfig:
    model = save_tokenizer(save_model(tmp_path / "base", num_hidden_layers=3))
    (model / "chat_template.jinja").write_text(CHAT + SYSTEM_END)
    turns = [
        [{"role": "user", "content": f"{a} and {b}?"}, {"role": "assistant", "content": f"{a + b}."}]
        for a in range(20)
        for b in range(10)
    ]
    chats = tmp_path / "chats.jsonl"
    chats.write_text("".join(json.dumps({"messages": turn}) + "\n" for turn in turns))
    return RunConfig(
        run=RunSection(name="chats", seed=3, steps=STEPS),
        model=ModelSection(pretrained=str(model)),
        data=DataSection(sources=(str(chats),), sequence_length=LENGTH, holdout_fraction=0.1),
        objective=ObjectiveSection(kind="sft"),
        trainable=TrainableSection(kind="lora", targets=("q_proj", "v_proj"), rank=4, alpha=8.0),
        pipeline=PipelineSection(stages=3, microbatches=4, microbatch_rows=2),
        audit=AuditSection(rate=0.5),
    )


def prepared(config: RunConfig, tmp_path: Path) -> PreparedData:
    packed, base = DialogueSettings(LENGTH), Path(config.model.pretrained or "")
    return prepare_data(config.data.sources, tmp_path / "d", tokenizer=base, holdout_fraction=0.1, dialogues=packed)


def reference_of(config: RunConfig, tmp_path: Path) -> FinetuneReference:
    """In one process, from the directory's weights and tokens that are prepared a second time."""
    from subnet.model.pretrained import PretrainedDirectory
    from subnet.model.registry import load_architecture

    data = prepared(config, tmp_path)
    streams = [
        np.concatenate([np.frombuffer(data.files()[s.blob].read_bytes(), "<u4") for s in stream.shards])
        for stream in (data.manifest.train, data.manifest.holdout)
    ]
    source = PretrainedDirectory(Path(config.model.pretrained or ""))
    architecture = load_architecture(source.model_config)
    reference = FinetuneReference(config, architecture.model_config, *streams)
    specs = [spec for unit in architecture.units(LENGTH).units for spec in unit]
    held = {entry.name: entry for entry in (*reference.frozen, *reference.entries)}
    for spec, tensor in source.read(specs):
        held[spec.name].weight.copy_(tensor)
    return reference


def test_adapters_on_dialogues(tmp_path: Path) -> None:
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    config = run_config(tmp_path)
    with LocalSwarm(tmp_path / "swarm", config, 4, SwarmOptions(measure_costs=False)) as swarm:
        root = swarm.wait_finished(Deadline.after(600))
        remote, deadline = swarm.remote(), Deadline.after(200)
        done = export_run(remote, "chats", tmp_path / "adapter", check=True, deadline=deadline)
        merged = export_run(remote, "chats", tmp_path / "merged", merged=True, deadline=deadline)
        with pytest.raises(ConfigError, match="doesn't go with --merged"):
            export_run(remote, "chats", tmp_path / "no", merged=True, check=True, deadline=deadline)
    reference = reference_of(config, tmp_path)
    reference.calibrate()
    for step in range(STEPS):
        reference.step(step)
    assert root == reference.state_root()
    assert done.root == root
    assert done.checked is not None
    assert done.num_parameters == 3 * 2 * 4 * 32 + 3 * 4 * (32 + 16) < merged.num_parameters
    described = msgspec.json.decode((tmp_path / "adapter" / "adapter_config.json").read_bytes())
    assert described["target_modules"] == ["self_attn.q_proj", "self_attn.v_proj"]
    assert (tmp_path / "adapter" / "chat_template.jinja").is_file()
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)
