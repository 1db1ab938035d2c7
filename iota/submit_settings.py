"""What a submission needs to know, without the heavy imports that doing it needs."""

from __future__ import annotations

from pathlib import Path

import msgspec

from iota.remote import DEFAULT_URL


class SubmitSettings(msgspec.Struct, frozen=True, kw_only=True):
    run_file: Path
    work_dir: Path = Path("~/.iota/submissions")
    """Prepared data is kept here and found again."""
    validator_url: str = DEFAULT_URL
    validator_hotkey: str | None = None
    wallet_name: str = "default"
    wallet_hotkey: str = "default"
    wallet_path: Path = Path("~/.bittensor/wallets")
    device: str = "auto"
    measure_costs: bool = True
    """Measure the layers here to cut the model; else cut by FLOPs."""
    hardware_class: bool = False
    """Report the class of this machine: right where the miners run on its like."""
    timeout_s: float = 3600.0
