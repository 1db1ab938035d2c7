"""A wallet's files: there, readable by their owner only, and of the kind a server can use."""

from __future__ import annotations

import stat
from pathlib import Path

from subnet.chain.fit import Findings
from subnet.errors import ConfigError
from subnet.protocol.signing import Signer, load_wallet


def wallet_files(findings: Findings, name: str, hotkey: str, path: Path) -> Signer | None:
    """The signer, where there is one."""
    try:
        signer = load_wallet(name, hotkey, path)
    except ConfigError as error:
        findings.bad(error.reason, error.hint)
        return None
    findings.ok(f"wallet {name}/{hotkey}: {signer.hotkey}")
    folder = path / name
    for file in (folder / "hotkeys" / hotkey, folder / "coldkey"):
        if not file.exists():
            continue
        mode = stat.S_IMODE(file.stat().st_mode)
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            findings.note(f"{file} can be read by others (mode {mode:o})", f"chmod 600 {file}")
    if (folder / "coldkey").exists():
        findings.note(
            f"the coldkey of {name} lies on this machine",
            "a miner or validator needs the hotkey alone: keep the coldkey elsewhere (on a local chain it doesn't matter)",
        )
    return signer
