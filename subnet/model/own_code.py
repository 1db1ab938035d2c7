"""A builder's own code, by hash: a file that this machine's operator allowed, and nothing else, is ever run.

Code never crosses the wire. A run names a file's hash; whoever takes part needs the file already, from ``--allow-code`` or,
in a private swarm, from the folder that the swarm's own machine keeps. What is run is the bytes that were hashed. No torch.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from blake3 import blake3

from subnet.errors import ConfigError, Corrupt, IotaError

LIMIT_CODE_BYTES = 1 << 20
MODULES = "modules"
"""The ``model_type`` of a model that is a sequence of a builder's own modules."""
VARIABLE = "IOTA_ALLOWED_CODE"
"""Files and folders that this process and those it starts may run, separated as in PATH. Miners and validators set it from their
settings; commands of a builder (``iota run export``) take it as it is."""
_HASH_LENGTH = 64


class CodeNotAllowed(IotaError):
    """A run is of code that this machine's operator didn't allow."""

    code, http_status = "code_not_allowed", 403


@dataclass(frozen=True)
class CodeName:
    """``FILE:FUNCTION``: where a builder's function is."""

    path: Path
    function: str

    @property
    def short(self) -> str:
        """Without folders: what others see of it."""
        return f"{self.path.name}:{self.function}"


def parse_name(text: str, directory: Path | None = None) -> CodeName:
    """``path.py:build`` (relative to ``directory``) or ``package.module:build``, whose file is looked up, not imported.

    Raises :class:`ConfigError` naming the key ``model.modules``.
    """
    where, _, function = text.rpartition(":")
    if not where or not function.isidentifier():
        raise ConfigError(f"model.modules = {text!r} is not allowed", hint='write it as "path.py:build"')
    if not where.endswith(".py"):
        return CodeName(_file_of_module(text, where), function)
    path = ((directory or Path()) / Path(where).expanduser()).resolve()
    if not path.is_file():
        raise ConfigError(f"model.modules = {text!r}: there is no file {path}", hint="name a Python file")
    return CodeName(path, function)


def _file_of_module(text: str, name: str) -> Path:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"model.modules = {text!r}: {error}", hint="name a Python file, or an installed module"
        ) from error
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        raise ConfigError(f"model.modules = {text!r}: no module {name} is found", hint="name a Python file")
    return Path(spec.origin)


def hash_of(path: Path) -> str:
    """BLAKE3 of the file, which is small."""
    return blake3(read_code(path)).hexdigest()


def read_code(path: Path) -> bytes:
    """The file's bytes; raises :class:`ConfigError` where it can't be read or is too large."""
    try:
        with path.open("rb") as stream:
            data = stream.read(LIMIT_CODE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}", hint="check the path and its rights") from error
    if len(data) > LIMIT_CODE_BYTES:
        raise ConfigError(
            f"{path} is larger than {LIMIT_CODE_BYTES} bytes", hint="name the file with the modules alone"
        )
    return data


def check_allowed(given: str) -> Path:
    """``FILE@HASH`` of ``--allow-code``: the file, if it has that hash; raises :class:`ConfigError`."""
    name, _, wanted = given.rpartition("@")
    if not name or len(wanted) != _HASH_LENGTH or not set(wanted) <= set("0123456789abcdef"):
        found = hash_of(Path(given).expanduser()) if Path(given).expanduser().is_file() else "HASH"
        raise ConfigError(
            f"--allow-code {given} names no hash", hint=f"read the file, then allow it: --allow-code FILE.py@{found}"
        )
    path = Path(name).expanduser().resolve()
    found = hash_of(path)
    if found != wanted:
        raise ConfigError(f"--allow-code: {path} has hash {found}, not {wanted}", hint="read the file again first")
    return path


def allow(files: Sequence[str] = (), folder: Path | None = None) -> None:
    """What this process and those that it starts may run from now on: ``FILE@HASH``, and files of ``folder`` named by hash."""
    paths = [str(check_allowed(given)) for given in files]
    if folder is not None:
        paths.append(str(folder.expanduser().absolute()))
    if any(os.pathsep in path for path in paths):
        raise ConfigError(f"a path with {os.pathsep!r} can't be allowed", hint="move the file")
    os.environ[VARIABLE] = os.pathsep.join(paths)


def trust(path: Path) -> None:
    """A builder's own file, on the builder's own machine, may be run by this process and those it starts."""
    known = [entry for entry in os.environ.get(VARIABLE, "").split(os.pathsep) if entry]
    os.environ[VARIABLE] = os.pathsep.join(dict.fromkeys([*known, str(path.absolute())]))


def check_code(model_config: Mapping[str, Any]) -> None:
    """Raises :class:`CodeNotAllowed` where a run's model is of code that isn't allowed here."""
    if model_config.get("model_type") == MODULES:
        code_of(str(model_config.get("modules_hash")), str(model_config.get("modules")))


def code_of(wanted: str, called: str) -> bytes:
    """The source with this hash; raises :class:`CodeNotAllowed` where nothing allowed here has it."""
    for entry in filter(None, os.environ.get(VARIABLE, "").split(os.pathsep)):
        path = Path(entry)
        path = path / f"{wanted}.py" if path.is_dir() else path
        if not path.is_file():
            continue
        data = read_code(path)
        if blake3(data).hexdigest() == wanted:
            return data
        if path.stem == wanted:
            raise Corrupt(f"{path} isn't what its name says", hint="submit the run again")
    raise CodeNotAllowed(
        f"the run is of code of its builder's, {called} with hash {wanted}, which isn't allowed here",
        hint="a private swarm (iota.local, iota up --private) takes it; a miner or validator that has the file: "
        f"--allow-code FILE.py@{wanted}",
    )


def function_of(wanted: str, called: str) -> Callable[..., Any]:
    """The builder's function, from the allowed file with this hash; ``called`` is ``file.py:function``."""
    name = f"iota_own_code_{wanted[:16]}"
    module = sys.modules.get(name)
    if module is None or getattr(module, "__iota_hash__", "") != wanted:
        source = code_of(wanted, called)
        module = ModuleType(name)
        module.__dict__["__iota_hash__"], module.__file__ = wanted, called.rpartition(":")[0]
        sys.modules[name] = module
        try:
            exec(compile(source, module.__file__, "exec"), module.__dict__)  # allowed by hash; see the top
        except BaseException as error:
            del sys.modules[name]
            raise _failed(called, error) from error
    else:
        code_of(wanted, called)
    function = module.__dict__.get(called.rpartition(":")[2])
    if not callable(function):
        raise ConfigError(f"model.modules: {called} is no function of that file", hint='write it as "path.py:build"')
    return function


def called_with(function: Callable[..., Any], called: str, arguments: dict[str, Any]) -> Any:
    """Its result; what it raises becomes one line."""
    try:
        return function(**arguments)
    except Exception as error:
        raise _failed(called, error) from error


def _failed(called: str, error: BaseException) -> ConfigError:
    words = str(error).splitlines()[0][:300] if str(error) else ""
    return ConfigError(
        f"model.modules: {called} fails: {type(error).__name__}: {words}", hint="try it on its own first"
    )
