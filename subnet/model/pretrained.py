"""A Hugging Face directory as a run's start: read tensor by tensor, everything that doesn't fit refused before any is.

Only safetensors are read and nothing is ever unpickled. bf16 and fp16 become fp32, which is exact; other types are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import torch
from blake3 import blake3
from safetensors import SafetensorError, safe_open
from torch import Tensor

from subnet.errors import ConfigError
from subnet.model.checkpoint_names import Part, stored_parts
from subnet.model.checkpoints import CARRIED_FILES, INDEX_FILE, SINGLE_FILE, check_carried
from subnet.model.families import FAMILIES, Family
from subnet.model.registry import EMBEDDING_NAME, HEAD_NAME
from subnet.numerics.layout import TensorSpec

READ_TYPES = ("F32", "BF16", "F16")
_HASH_TAG = b"iota/pretrained/1\0"


class PretrainedDirectory:
    """A directory with ``config.json`` and safetensors weights; raises :class:`ConfigError` where it can't be one."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        if not directory.is_dir():
            raise ConfigError(f"{directory} is not a directory", hint="model.pretrained takes a local directory")
        self.model_config = self._read_json("config.json")
        self._file_of = self._index()
        self._opened: dict[Path, Any] = {}

    def _read_json(self, name: str) -> dict[str, Any]:
        path = self.directory / name
        try:
            return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        except (OSError, msgspec.MsgspecError) as error:
            raise ConfigError(f"{path} can't be read: {error}") from error

    def _index(self) -> dict[str, Path]:
        if (self.directory / INDEX_FILE).exists():
            weight_map = self._read_json(INDEX_FILE).get("weight_map")
            if not isinstance(weight_map, dict):
                raise ConfigError(f"{self.directory / INDEX_FILE} has no weight_map")
            files = cast("dict[str, object]", weight_map)
            if any(not isinstance(f, str) or Path(f).name != f for f in files.values()):
                raise ConfigError(f"{self.directory / INDEX_FILE} names a file outside its directory")
            names = sorted({str(file) for file in files.values()})
            lost = [name for name in names if not (self.directory / name).is_file()]
            if lost:
                raise ConfigError(
                    f"{self.directory} lacks {lost[0]}, one of {len(names)} shards", hint="copy the whole directory"
                )
            return {name: self.directory / str(file) for name, file in files.items()}
        path = self.directory / SINGLE_FILE
        if not path.exists():
            hint = "only safetensors weights are read; from_pretrained(...).save_pretrained(...) writes them"
            raise ConfigError(f"{self.directory} has no {SINGLE_FILE}", hint=hint)
        return dict.fromkeys(_open(path).keys(), path)

    @property
    def _family(self) -> Family:
        return FAMILIES[str(self.model_config["model_type"])]

    def check(self, specs: Sequence[TensorSpec]) -> None:
        """Names, shapes and types of all tensors of a model, from the files' headers alone."""
        wanted: set[str] = set()
        for spec in specs:
            for part in self._parts(spec):
                wanted.add(part.name)
                self._check_part(part)
        extra = sorted(name for name in self._file_of if name not in wanted and not self._is_aside(name, wanted))
        if extra:
            raise ConfigError(
                f"{self.directory} has {len(extra)} tensors that the model of its config.json hasn't, {extra[0]} for one",
                hint="config.json must be that of these weights",
            )

    def _is_aside(self, name: str, wanted: set[str]) -> bool:
        """What the library leaves out as well: stored rotary tables, a tied head, layers behind the last one."""
        if name.endswith("rotary_emb.inv_freq"):
            return True
        if name == HEAD_NAME:
            return HEAD_NAME not in wanted and EMBEDDING_NAME in wanted
        pieces = name.split(".")
        number = pieces[2] if pieces[:2] == ["model", "layers"] and len(pieces) > 3 else ""
        predicted = int(self.model_config.get("num_nextn_predict_layers") or 0)
        return number.isdigit() and 0 <= int(number) - int(self.model_config["num_hidden_layers"]) < predicted

    def _parts(self, spec: TensorSpec) -> tuple[Part, ...]:
        if spec.name in self._file_of:
            return (Part(spec.name, spec.shape),)
        return stored_parts(self._family, spec)

    def _check_part(self, part: Part) -> None:
        file = self._file_of.get(part.name)
        if file is None:
            hint = "config.json must be that of these weights"
            if part.name == HEAD_NAME:
                hint = "set tie_word_embeddings to true in its config.json if the head is the embedding"
            raise ConfigError(f"{self.directory} has no tensor {part.name}", hint=hint)
        try:
            header = self._open(file).get_slice(part.name)
            shape, kind = tuple(int(size) for size in header.get_shape()), str(header.get_dtype())
        except SafetensorError as error:
            raise ConfigError(f"{file}: {part.name} can't be read: {error}", hint="copy the file again") from error
        if shape != part.shape:
            raise ConfigError(
                f"{file}: {part.name} is {shape}, not {part.shape}", hint="config.json must be that of these weights"
            )
        if kind not in READ_TYPES:
            raise ConfigError(
                f"{file}: {part.name} is {kind}",
                hint=f"allowed: {', '.join(READ_TYPES)}; save the model as one of them",
            )

    def _open(self, path: Path) -> Any:
        if path not in self._opened:
            self._opened[path] = _open(path)
        return self._opened[path]

    def read(self, specs: Sequence[TensorSpec]) -> Iterator[tuple[TensorSpec, Tensor]]:
        """These tensors as fp32, one at a time; raises :class:`ConfigError` where one is missing or misshapen."""
        for spec in specs:
            parts = self._parts(spec)
            if parts[0].expert is None:
                yield spec, self._read_part(parts[0]).contiguous()
                continue
            whole = torch.empty(spec.shape, dtype=torch.float32)
            for part in parts:
                whole[part.expert, part.start : part.end] = self._read_part(part)
            yield spec, whole

    def _read_part(self, part: Part) -> Tensor:
        self._check_part(part)
        file = self._file_of[part.name]
        try:
            tensor: Tensor = self._open(file).get_tensor(part.name)
        except SafetensorError as error:
            raise ConfigError(f"{file}: {part.name} can't be read: {error}", hint="copy the file again") from error
        return tensor.to(torch.float32)

    @property
    def tokenizer(self) -> Path | None:
        """Its ``tokenizer.json``, if it has one."""
        path = self.directory / "tokenizer.json"
        return path if path.is_file() else None

    def carried_files(self) -> dict[str, bytes]:
        """Files that an export gets as they are here."""
        paths = [self.directory / name for name in CARRIED_FILES]
        return dict(check_carried({path.name: path.read_bytes() for path in paths if path.is_file()}))

    def content_hash(self) -> str:
        """BLAKE3 of the config, the weights and the tokenizer: what a run that starts here is a function of."""
        names = {"config.json", *(path.name for path in self._file_of.values())}
        if self.tokenizer is not None:
            names.add("tokenizer.json")
        whole = blake3(_HASH_TAG)
        for name in sorted(names):
            digest = blake3().update_mmap(self.directory / name).digest()
            whole.update(name.encode() + b"\0" + digest)
        return whole.hexdigest()


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path} can't be read: {error}", hint="copy the file again") from error
