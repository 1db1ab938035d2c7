"""The coldkey of a wallet as a signer, for what only an owner may sign: registering and staking on a local chain."""

from __future__ import annotations

from pathlib import Path

from bittensor import Wallet
from bittensor.sp_core import KeyfileError

from subnet.errors import ConfigError
from subnet.protocol.signing import Signer


def load_coldkey(name: str, path: str | Path) -> Signer:
    """The coldkey of a wallet whose file isn't encrypted; :class:`ConfigError` with the remedy otherwise."""
    where = f"the coldkey of wallet {name} in {path}"
    try:
        wallet = Wallet(name, "default", str(path))
        if not wallet.coldkey_file.exists_on_device():
            raise ConfigError(f"{where} doesn't exist", hint=f"make it: iota wallet new --wallet.name {name}")
        if wallet.coldkey_file.is_encrypted():
            raise ConfigError(f"{where} is encrypted", hint="a local chain takes unencrypted ones: iota wallet new")
        return Signer(wallet.coldkey)
    except (KeyfileError, ValueError, OSError) as error:
        raise ConfigError(f"{where} can't be read: {error}") from error
