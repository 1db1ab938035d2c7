"""The README of an exported model: what it is, how it was trained, and the numbers by which anyone finds it again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from subnet.model.own_code import MODULES
from subnet.run.config import RunConfig


def model_card(
    config: RunConfig,
    model_config: Mapping[str, Any],
    *,
    step: int,
    root: str,
    num_parameters: int,
    adapter: bool = False,
) -> str:
    """Markdown with the front matter that model hubs read; the licence is the builder's to add. ``adapter``: of one alone."""
    run, optimizer, pipeline = config.run, config.optimizer, config.pipeline
    start = "random weights"
    if config.model.pretrained:
        start = f"`{config.model.pretrained}` (content hash `{config.model.pretrained_hash or 'unknown'}`)"
    lora = config.trainable
    trained = {"full": "all parameters", "layers": "some layers"}.get(
        lora.kind, f"LoRA, rank {lora.rank}, alpha {lora.alpha:g}{'' if adapter else ', merged into the weights'}"
    )
    rows = {
        "Run": f"`{run.name}`, seed {run.seed}",
        "Updates": f"{step:,} of {run.steps:,}",
        "Training tokens": f"{step * config.tokens_per_step:,}",
        "Started from": start,
        "Trained": trained,
        "Objective": f"{config.objective.kind}, sequences of {config.data.sequence_length:,} tokens",
        "Optimizer": f"{optimizer.kind}, learning rate {optimizer.learning_rate:g} ({config.schedule.kind}), "
        f"weight decay {optimizer.weight_decay:g}, clip {optimizer.clip_norm:g}",
        "Batch": f"{pipeline.microbatches} microbatches of {pipeline.microbatch_rows} sequences",
        "Compute": f"{config.precision.compute}; weights are fp32",
        "Run root": f"`{root}`",
    }
    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items())
    architecture = model_config["architectures"][0]
    own = model_config["model_type"] == MODULES
    load = _LOAD_MODULES.format(function=model_config["modules"].rpartition(":")[2]) if own else _LOAD
    return f"""---
library_name: {"pytorch" if own else "peft" if adapter else "transformers"}
pipeline_tag: text-generation
tags:
- {model_config["model_type"]}
---
# {run.name}

{f"An adapter of a `{architecture}`" if adapter else f"A `{architecture}`"} with {num_parameters:,} parameters, \
trained by many machines with IOTA.

| | |
|---|---|
{table}

The run root is a hash of all weights, optimizer moments and scales after these updates. It depends on the run file, the
data and the number of updates, not on the machines.

```python
{_LOAD_ADAPTER if adapter else load}
```
"""


_LOAD = """from transformers import AutoModelForCausalLM, AutoTokenizer

model, tokenizer = AutoModelForCausalLM.from_pretrained("."), AutoTokenizer.from_pretrained(".")"""

_LOAD_MODULES = """import json
from pathlib import Path

from safetensors.torch import load_file
from torch import nn
from modules import {function}  # modules.py beside this file: read it before you run it

model = nn.Sequential(*{function}(**json.loads(Path("config.json").read_text())["arguments"])).eval()
model.load_state_dict(load_file("model.safetensors"))"""

_LOAD_ADAPTER = """from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

base = AutoModelForCausalLM.from_pretrained("the model it was trained on")
model, tokenizer = PeftModel.from_pretrained(base, "."), AutoTokenizer.from_pretrained(".")"""
