"""A sequence of a builder's own modules on disk: the code beside the weights, names those of ``nn.Sequential(*build())``."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from subnet.errors import ConfigError
from subnet.model.own_code import MODULES, code_of
from subnet.model.registry import EMBEDDING_NAME
from subnet.model.sequence import SequenceArchitecture, build_modules, config_json, module_names
from subnet.numerics.layout import TensorSpec

CODE_FILE = "modules.py"
Read = Callable[[TensorSpec], Tensor]


def write_code(staging: Path, architecture: SequenceArchitecture) -> None:
    """``config.json`` and ``modules.py``, the builder's file as it was run."""
    config = architecture.config
    (staging / "config.json").write_text(config_json(architecture))
    (staging / CODE_FILE).write_bytes(code_of(config.modules_hash, config.modules))


def renamed(
    architecture: SequenceArchitecture, specs: Sequence[TensorSpec], read: Read
) -> tuple[tuple[TensorSpec, ...], Read]:
    """The tensors under the names that ``load_state_dict`` wants; a tied head is written as well."""
    names, given = module_names(architecture), {spec.name: spec for spec in specs}
    pairs = [(names[spec.name], spec) for spec in specs]
    if architecture.tied and EMBEDDING_NAME in given:
        pairs.append((f"{architecture.num_layers + 1}.weight", given[EMBEDDING_NAME]))
    source = dict(pairs)
    made = tuple(msgspec.structs.replace(spec, name=name) for name, spec in pairs)
    return made, lambda spec: read(source[spec.name]).clone()


def load_directory(directory: Path) -> nn.Sequential:
    """An export as a module in evaluation mode; its code must be allowed here, by its hash.

    Raises :class:`ConfigError` where the directory isn't one, ``CodeNotAllowed`` where its code isn't allowed.
    """
    try:
        config = json.loads((directory / "config.json").read_bytes())
        files = sorted(directory.glob("*.safetensors"))
        weights = {name: tensor for file in files for name, tensor in load_file(file).items()}
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(f"{directory} can't be read: {error}", hint="export again") from error
    if config.get("model_type") != MODULES:
        raise ConfigError(f"{directory} is no export of modules", hint="transformers loads others")
    model = nn.Sequential(*build_modules(config["modules"], config["modules_hash"], config["arguments"]))
    model.load_state_dict(weights)
    return model.eval()
