"""A GGUF file as a Hugging Face directory that a run can start from: dequantised by ``transformers``, written as safetensors."""

from __future__ import annotations

import importlib.util
import struct
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from subnet.errors import ConfigError
from subnet.model.checkpoints import write_pretrained
from subnet.model.registry import load_architecture

LIBRARIES = ("gguf", "accelerate")
_ANY_LENGTH = 8


def convert_gguf(file: Path, directory: Path) -> int:
    """Writes ``directory``, which is new, with fp32 weights; gives the number of parameters.

    Raises :class:`ConfigError` for a file that isn't there or isn't one, an architecture that isn't in the table of
    families, and without the libraries it takes. The whole model is in memory.
    """
    if not file.is_file():
        raise ConfigError(f"{file} does not exist", hint="name a .gguf file")
    lacking = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]
    if lacking:
        raise ConfigError(
            f"reading GGUF files takes the library {lacking[0]}, which isn't installed",
            hint=f"pip install {' '.join(LIBRARIES)}",
        )
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
        tokenizer: Any = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    except (ValueError, OSError, KeyError, NotImplementedError, IndexError, struct.error) as error:
        words = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(
            f"{file} can't be read: {words[0]}", hint="it must be a GGUF file of a model that transformers knows"
        ) from error
    described = {key: value for key, value in model.config.to_dict().items() if key != "quantization_config"}
    architecture = load_architecture(described)  # the weights are dequantised by now
    specs = [spec for unit in architecture.units(_ANY_LENGTH).units for spec in unit]
    held = model.state_dict()
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer.save_pretrained(scratch)
        write_pretrained(
            directory, architecture.model_config, specs, lambda spec: held[spec.name], tokenizer=Path(scratch)
        )
    return sum(spec.num_elements for spec in specs)
