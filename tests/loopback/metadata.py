"""The recorded metadata of a real runtime, from the SDK's source distribution; changed in small ways for fault tests."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, replace
from pathlib import Path

CACHE = Path(__file__).resolve().parents[2] / ".cache" / "chain-metadata"
MISSING = (
    "no recorded chain metadata: run scripts/chain-metadata (it downloads the SDK's source distribution from PyPI)"
)


@dataclass(frozen=True)
class RecordedRuntime:
    spec_version: int
    transaction_version: int
    v14: bytes
    v15: bytes
    """Both begin with ``meta``."""

    def without(self, name: str) -> RecordedRuntime:
        """A runtime in which a storage item, call or pallet has another name of the same length."""
        other = name[:-1] + ("Q" if name[-1] != "Q" else "R")

        def renamed(blob: bytes) -> bytes:
            return blob.replace(_scale_text(name), _scale_text(other))

        assert _scale_text(name) in self.v14, f"{name} isn't in the metadata"
        return replace(self, v14=renamed(self.v14), v15=renamed(self.v15))


def _scale_text(name: str) -> bytes:
    assert len(name) < 64
    return bytes([len(name) << 2]) + name.encode()


def recorded_file() -> Path | None:
    return next(iter(sorted(CACHE.glob("golden-*.json"), reverse=True)), None)


@functools.cache
def recorded_runtime() -> RecordedRuntime:
    path = recorded_file()
    if path is None:
        raise FileNotFoundError(MISSING)
    golden = json.loads(path.read_text())
    v14, v15 = (bytes.fromhex(golden["metadata"][key].removeprefix("0x")) for key in ("v14_hex", "v15_hex"))
    return RecordedRuntime(
        spec_version=golden["network"]["spec_version"],
        transaction_version=golden["network"]["transaction_version"],
        v14=v14[v14.index(b"meta") :],
        v15=v15[v15.index(b"meta") :],
    )
