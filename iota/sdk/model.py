"""Which model a run trains: a config whose weights are drawn, or a directory (or model) whose weights it starts from."""

from __future__ import annotations

import inspect
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from iota.sdk.bars import without_bars
from subnet.errors import ConfigError
from subnet.model.own_code import MODULES, parse_name, trust
from subnet.store.disk import full_disk_is_ours, sync_directory, sync_files


@dataclass(frozen=True)
class Model:
    """Make one with :meth:`from_config`, :meth:`from_pretrained` or :meth:`from_transformers`.

    Which families can be trained is the engine's to say: another is refused at submission, with the list of them.
    """

    config: Mapping[str, Any] | None = None
    directory: Path | None = None
    module: Any = None
    attention: str = "sdpa"
    modules: str = ""

    @staticmethod
    def from_modules(build: str | Callable[..., Any], **arguments: Any) -> Model:
        """A sequence of your own modules, for a private swarm (``iota.local``, ``iota up --private``).

        ``build``: a function at the top of a Python file (or ``"path.py:name"``) that gives an ``nn.Embedding``, blocks that
        keep (rows, positions, hidden), and an ``nn.Linear`` without bias; ``arguments`` are its keyword arguments. Miners run
        that file by its hash, so it must be importable without its neighbours. Its draws make the initial weights.
        """
        name = build if isinstance(build, str) else _where(build)
        found = parse_name(name)
        trust(found.path)
        return Model(config=arguments or None, modules=f"{found.path}:{found.function}")

    @staticmethod
    def from_config(config: Any, *, attention: str = "sdpa") -> Model:
        """A config of ``transformers``, a dict with its ``model_type``, or the path of a ``config.json``.

        The initial weights are drawn from the run's seed, the same on every machine.
        """
        if isinstance(config, str | Path):
            return Model(config=_read(Path(config)), attention=attention)
        if isinstance(config, Mapping):
            return Model(config=dict(config), attention=attention)
        if not hasattr(config, "to_diff_dict") or not getattr(config, "model_type", ""):
            raise ConfigError(
                f"a {type(config).__name__} is no model config", hint="give a transformers config, a dict or a path"
            )
        plain = json.loads(json.dumps(config.to_diff_dict(), default=str))
        plain["model_type"] = config.model_type
        for key in ("bos_token_id", "eos_token_id"):
            if plain.get(key) == getattr(type(config)(), key, None):
                plain.pop(key, None)  # the library's default: the tokenizer's is meant
        return Model(config=plain, attention=attention)

    @staticmethod
    def from_pretrained(directory: str | Path, *, attention: str = "sdpa") -> Model:
        """A Hugging Face directory (``config.json``, safetensors weights), whose weights the run starts from."""
        path = Path(directory).expanduser().absolute()
        if not (path / "config.json").is_file():
            raise ConfigError(
                f"{path} is no directory with a config.json",
                hint="download the model first, for example with huggingface_hub.snapshot_download",
            )
        return Model(directory=path, attention=attention)

    @staticmethod
    def from_transformers(model: Any, *, attention: str = "sdpa") -> Model:
        """A causal language model of ``transformers`` as it is now; its weights are written to disk at submission."""
        if not hasattr(model, "save_pretrained") or not hasattr(model, "config"):
            raise ConfigError(
                f"a {type(model).__name__} is no model of transformers",
                hint="give a transformers causal language model; Model.from_modules takes modules of your own",
            )
        return Model(module=model, attention=attention)

    @property
    def family(self) -> str:
        """``model_type`` of the config, "model" where it has none."""
        if self.modules:
            return MODULES
        if self.module is not None:
            return str(getattr(self.module.config, "model_type", "model"))
        config = _read(self.directory / "config.json") if self.directory is not None else self.config or {}
        return str(config.get("model_type", "model"))

    def section(self, directory: Path) -> dict[str, Any]:
        """``[model]``; a module's weights are written below ``directory``."""
        if self.modules:
            return {"modules": self.modules, **({} if self.config is None else {"config": dict(self.config)})}
        if self.module is not None:
            return {"pretrained": str(_saved(self.module, directory / "models")), "attention": self.attention}
        if self.directory is not None:
            return {"pretrained": str(self.directory), "attention": self.attention}
        return {"config": dict(self.config or {}), "attention": self.attention}


def _where(build: Callable[..., Any]) -> str:
    """``path.py:name`` of a function."""
    name, file = getattr(build, "__qualname__", ""), inspect.getsourcefile(inspect.unwrap(build))
    if not name.isidentifier() or file is None:
        raise ConfigError(
            f"{build!r} is no function at the top of a Python file", hint="save it in a file, not in a notebook's cell"
        )
    return f"{Path(file).absolute()}:{name}"


def _read(path: Path) -> dict[str, Any]:
    file = path.expanduser() / "config.json" if path.expanduser().is_dir() else path.expanduser()
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} can't be read: {error}", hint="give the path of a config.json") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{file} is not a JSON table", hint="give the path of a config.json")
    return {str(key): value for key, value in found.items()}


def _saved(module: Any, directory: Path) -> Path:
    """The model's directory, named by the hash of its files."""
    with full_disk_is_ours(str(directory)):
        directory.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".model.", dir=directory))
        try:
            with without_bars():
                module.save_pretrained(scratch)
            digest = blake3()
            for file in sorted(scratch.iterdir()):
                digest.update(file.name.encode() + b"\0").update_mmap(file)
            path = directory / digest.hexdigest()[:32]
            if not path.exists():
                scratch.chmod(0o755)
                sync_files(scratch)
                scratch.rename(path)
                sync_directory(directory)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return path
