"""Weights in and out: from a run's seed, from and to ordinary Hugging Face directories, one by one, atomically."""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import GenerationConfig

from subnet.errors import ConfigError, OutOfSpace
from subnet.model.adapters import initial_adapter
from subnet.model.checkpoint_names import stored_parts
from subnet.model.families import FAMILIES, Family
from subnet.model.own_code import MODULES
from subnet.model.plan import ModelPlan
from subnet.model.registry import load_architecture
from subnet.model.sequence import FAMILY, drawn_weights, load_sequence
from subnet.model.sequence_files import renamed, write_code
from subnet.numerics.layout import TensorSpec
from subnet.run.trainable import is_adapter

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
MAX_SHARD_BYTES = 4 << 30
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)
CARRIED_FILES = (*(name for name in TOKENIZER_FILES if name != "tokenizer.json"), "generation_config.json")
"""What an export has as it was in the directory that the run started from, beside ``tokenizer.json``."""
LIMIT_CARRIED_BYTES = 16 << 20
"""Of all of them."""
CARD_FILE = "README.md"


def initial_tensor(spec: TensorSpec, *, seed: int, initializer_range: float, norm_start: float = 1.0) -> Tensor:
    """One entry of the canonical list, from a generator of its own: the same whatever else is drawn."""
    if is_adapter(spec.name):
        return initial_adapter(spec, seed=seed)
    if spec.name.endswith("bias"):
        return torch.zeros(spec.shape)
    if spec.name.endswith("norm.weight"):
        return torch.full(spec.shape, norm_start)
    digest = blake3(b"iota/init/1\0" + seed.to_bytes(8, "little") + spec.name.encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") & (2**63 - 1))
    return torch.empty(spec.shape).normal_(0.0, initializer_range, generator=generator)


def initial_weights(plan: ModelPlan, specs: Sequence[TensorSpec] | None = None) -> dict[str, Tensor]:
    """Initial weights of these entries, or of the whole model."""
    return dict(draw_weights(plan, plan.canonical if specs is None else specs))


def draw_weights(plan: ModelPlan, specs: Sequence[TensorSpec]) -> Iterator[tuple[str, Tensor]]:
    """Names and initial weights, one at a time."""
    seed = plan.config.run.seed
    if plan.model_config["model_type"] == MODULES:
        yield from drawn_weights(load_sequence(plan.model_config), specs, seed)
        return
    spread = float(plan.model_config["initializer_range"])
    start = FAMILIES[str(plan.model_config["model_type"])].norm_start
    for spec in specs:
        yield spec.name, initial_tensor(spec, seed=seed, initializer_range=spread, norm_start=start)


def plan_shards(specs: Sequence[TensorSpec], max_shard_bytes: int) -> list[list[TensorSpec]]:
    """Consecutive tensors, at most ``max_shard_bytes`` of fp32 a shard unless one tensor alone is larger."""
    shards: list[list[TensorSpec]] = [[]]
    used = 0
    for spec in specs:
        size = 4 * spec.num_elements
        if shards[-1] and used + size > max_shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(spec)
        used += size
    return shards


def write_pretrained(
    directory: Path,
    model_config: Mapping[str, Any],
    specs: Sequence[TensorSpec],
    read: Callable[[TensorSpec], Tensor],
    *,
    tokenizer: Path | None = None,
    carried: Mapping[str, bytes] | None = None,
    card: str = "",
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write config, weights, generation config and tokenizer so that plain ``from_pretrained`` loads them.

    The directory appears complete or not at all. ``tokenizer`` is a directory or a ``tokenizer.json``, ``carried`` other
    files of it (:func:`check_carried`), ``card`` the text of a model card.
    """
    with new_directory(directory) as staging:
        if model_config["model_type"] == MODULES:
            write_code(staging, load_sequence(model_config))
            specs, read = renamed(load_sequence(model_config), specs, read)
            _write_weights(staging, FAMILY, specs, read, max_shard_bytes)
        else:
            _write_configs(staging, model_config)
            _write_weights(staging, FAMILIES[str(model_config["model_type"])], specs, read, max_shard_bytes)
        write_beside(staging, model_config, tokenizer=tokenizer, carried=carried, card=card)


def write_beside(
    staging: Path,
    model_config: Mapping[str, Any],
    *,
    tokenizer: Path | None = None,
    carried: Mapping[str, bytes] | None = None,
    card: str = "",
) -> None:
    """What stands beside weights, as for :func:`write_pretrained`."""
    for name, data in check_carried(carried or {}).items():
        (staging / name).write_bytes(data)
    if card:
        (staging / CARD_FILE).write_text(card)
    if tokenizer is not None:
        _copy_tokenizer(tokenizer, staging, model_config)


@contextmanager
def new_directory(directory: Path) -> Generator[Path]:
    """A directory to write files into, which becomes ``directory`` when the block ends well, and is gone otherwise."""
    directory = directory.absolute()
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"{directory} exists and is not an empty directory", hint="choose a new directory")
    directory.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        yield staging
        for path in staging.iterdir():
            _sync(path)
        staging.chmod(0o755)
        if directory.exists():
            directory.rmdir()
        staging.rename(directory)
        _sync(directory.parent)
    except (OSError, SafetensorError) as error:
        full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "os error 28" in str(error)
        if full:
            raise OutOfSpace(
                f"no space left while writing {directory}", hint="free some space and export again"
            ) from error
        raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def check_carried(files: Mapping[str, bytes]) -> Mapping[str, bytes]:
    """The files, whose names and sizes are allowed; foreign ones aren't written under another name."""
    wrong = sorted(set(files) - set(CARRIED_FILES))
    if wrong:
        raise ConfigError(f"{wrong[0]!r} is no file of a tokenizer", hint=f"allowed: {', '.join(CARRIED_FILES)}")
    size_bytes = sum(len(data) for data in files.values())
    if size_bytes > LIMIT_CARRIED_BYTES:
        raise ConfigError(
            f"the files beside tokenizer.json have {size_bytes} bytes",
            hint=f"at most {LIMIT_CARRIED_BYTES}: remove what isn't needed",
        )
    return files


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_configs(staging: Path, model_config: Mapping[str, Any]) -> None:
    architecture = load_architecture(model_config)
    config: Any = architecture.config
    config.architectures = [architecture.family.causal_lm]
    config.dtype = "float32"
    config.save_pretrained(staging)
    GenerationConfig.from_model_config(config).save_pretrained(staging)


def _write_weights(
    staging: Path,
    family: Family,
    specs: Sequence[TensorSpec],
    read: Callable[[TensorSpec], Tensor],
    max_shard_bytes: int,
) -> None:
    shards = plan_shards(specs, max_shard_bytes)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = SINGLE_FILE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors: dict[str, Tensor] = {}
        for spec in shard:
            tensors.update(_as_stored(family, spec, read(spec).detach().cpu()))
        save_file(tensors, staging / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, name))
    if len(shards) > 1:
        total = sum(4 * spec.num_elements for spec in specs)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (staging / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _as_stored(family: Family, spec: TensorSpec, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    if tuple(tensor.shape) != spec.shape:
        raise ValueError(f"{spec.name}: {tuple(tensor.shape)} instead of {spec.shape}")
    for part in stored_parts(family, spec):
        if part.expert is None:
            yield part.name, tensor.contiguous()
        else:
            yield part.name, tensor[part.expert, part.start : part.end].clone()


def _copy_tokenizer(source: Path, staging: Path, model_config: Mapping[str, Any]) -> None:
    if source.is_file():
        shutil.copyfile(source, staging / "tokenizer.json")
    else:
        for name in TOKENIZER_FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, staging / name)
    if not (staging / "tokenizer.json").exists() and not (staging / "tokenizer.model").exists():
        raise ConfigError(f"{source} has no tokenizer.json", hint="give a tokenizer.json or its directory")
    if not (staging / "tokenizer_config.json").exists():
        described = _describe_tokenizer(staging / "tokenizer.json", model_config)
        (staging / "tokenizer_config.json").write_text(json.dumps(described, indent=2, sort_keys=True) + "\n")


def _describe_tokenizer(path: Path, model_config: Mapping[str, Any]) -> dict[str, Any]:
    """What ``AutoTokenizer`` needs beside a bare ``tokenizer.json``; special tokens are those of the model's config."""
    from tokenizers import Tokenizer

    loaded = Tokenizer.from_file(str(path))
    described: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model_config.get("max_position_embeddings"),
        "clean_up_tokenization_spaces": False,
    }
    for kind in ("bos", "eos", "pad"):
        number = model_config.get(f"{kind}_token_id")
        token = loaded.id_to_token(number) if isinstance(number, int) else None
        if token is not None:
            described[f"{kind}_token"] = token
    return described
