"""A miner's identity in one file of its owner's alone, to be carried to another machine; nothing that exists is overwritten.

The file is JSON: names, the hotkey's key file as Bittensor writes it, the coldkey's address, and the coldkey itself only where
that was asked for. What is read is checked by loading it before anything appears in the wallets' folder.
"""

from __future__ import annotations

import shutil
import stat
from pathlib import Path
from tempfile import mkdtemp

import msgspec

from subnet.errors import ConfigError
from subnet.protocol.signing import Signer, load_wallet
from subnet.store.disk import atomic_write

LIMIT_BYTES = 64 << 10
VERSION = 1
_PUBLIC = "coldkeypub.txt"


class Identity(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Contents of key files, as they are on disk."""

    iota_identity: int
    wallet: str
    hotkey: str
    address: str
    """Of the hotkey."""
    hotkey_file: str
    coldkey_public: str = ""
    coldkey_file: str = ""
    """Empty: not exported."""


def export_identity(name: str, hotkey: str, wallets: Path, out: Path, *, with_coldkey: bool = False) -> Signer:
    """Write ``out``, readable by its owner alone; :class:`ConfigError` where it exists or a key can't be read."""
    signer = load_wallet(name, hotkey, wallets)
    if out.exists():
        raise ConfigError(f"{out} exists already", hint="choose another file: nothing is overwritten")
    folder = wallets / name
    coldkey = folder / "coldkey"
    if with_coldkey and not coldkey.exists():
        raise ConfigError(f"{coldkey} isn't on this machine", hint="leave --coldkey out")
    identity = Identity(
        iota_identity=VERSION,
        wallet=name,
        hotkey=hotkey,
        address=signer.hotkey,
        hotkey_file=(folder / "hotkeys" / hotkey).read_text(encoding="utf-8"),
        coldkey_public=_text(folder / _PUBLIC),
        coldkey_file=_text(coldkey) if with_coldkey else "",
    )
    try:
        atomic_write(out, msgspec.json.format(msgspec.json.encode(identity)) + b"\n", mode=0o600)
    except OSError as error:
        raise ConfigError(f"{out} can't be written: {error.strerror}", hint="choose another file") from error
    return signer


def import_identity(
    file: Path, wallets: Path, name: str | None = None, hotkey: str | None = None
) -> tuple[Signer, str, str]:
    """(signer, wallet's name, hotkey's name); names of one's own instead of those in the file are allowed."""
    found = _read(file)
    name, hotkey = name or found.wallet, hotkey or found.hotkey
    for what in (name, hotkey):
        if not what or "/" in what or what.startswith("."):
            raise ConfigError(f"{what!r} is no name of a wallet", hint="choose one: --wallet.name, --wallet.hotkey")
    folder = wallets / name
    if (folder / "hotkeys" / hotkey).exists():
        raise ConfigError(
            f"wallet {name}/{hotkey} in {wallets} exists already: nothing is overwritten",
            hint="choose another --wallet.name or --wallet.hotkey",
        )
    public = _text(folder / _PUBLIC)
    if public and found.coldkey_public and _address(public) != _address(found.coldkey_public):
        raise ConfigError(f"wallet {name} in {wallets} has another coldkey", hint="choose another --wallet.name")
    _check(found)
    files = {folder / "hotkeys" / hotkey: found.hotkey_file}
    if found.coldkey_public and not public:
        files[folder / _PUBLIC] = found.coldkey_public
    if found.coldkey_file and not (folder / "coldkey").exists():
        files[folder / "coldkey"] = found.coldkey_file
    for path, text in files.items():
        atomic_write(path, text.encode(), mode=0o600)
    return load_wallet(name, hotkey, wallets), name, hotkey


def _read(file: Path) -> Identity:
    try:
        mode = stat.S_IMODE(file.stat().st_mode)
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ConfigError(
                f"{file} can be read by others (mode {mode:o}): its key may be known", hint=f"chmod 600 {file}"
            )
        data = file.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{file} can't be read: {error.strerror}", hint="iota wallet export makes such a file"
        ) from error
    if len(data) > LIMIT_BYTES:
        raise ConfigError(
            f"{file} has {len(data)} bytes, an identity {LIMIT_BYTES} at most", hint="is it the right file?"
        )
    try:
        found = msgspec.json.decode(data, type=Identity)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{file} is no identity: {error}", hint="iota wallet export makes such a file") from error
    if found.iota_identity != VERSION:
        raise ConfigError(f"{file} is of version {found.iota_identity}, this reads {VERSION}", hint="update iota")
    return found


def _check(found: Identity) -> None:
    """In a folder of its own: the key can be used and is the one it says."""
    folder = Path(mkdtemp(prefix="iota-identity-"))
    try:
        atomic_write(folder / "w" / "hotkeys" / "h", found.hotkey_file.encode(), mode=0o600, durable=False)
        address = load_wallet("w", "h", folder).hotkey
    finally:
        shutil.rmtree(folder)
    if address != found.address:
        raise ConfigError(f"the key is that of {address}, the file says {found.address}", hint="the file is damaged")


def _address(public: str) -> str:
    class Public(msgspec.Struct):
        ss58Address: str = ""

    try:
        return msgspec.json.decode(public, type=Public).ss58Address
    except msgspec.MsgspecError:
        return public.strip()


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""
