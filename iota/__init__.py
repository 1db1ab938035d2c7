"""Train one language model on many machines you don't have to trust, in a few lines of Python.

    import iota

    with iota.local(miners=6) as swarm:
        run = swarm.train(iota.Model.from_config(config), iota.Data.from_files("*.txt"), stages=3)
        for report in run:
            print(report.step, report.loss)
        model = run.model()

Everything is in :mod:`iota.sdk` and imported when it is first used. ``docs/sdk.md`` is the reference.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from iota.sdk.callbacks import Callback, ProgressBar, TensorBoard, WandB
    from iota.sdk.data import Data
    from iota.sdk.local import local
    from iota.sdk.model import Model
    from iota.sdk.report import Disruption, Evaluation, StepReport
    from iota.sdk.run import Run
    from iota.sdk.settings import WSD, AdamW, Constant, Cosine, Linear, Muon, Pretrain
    from iota.sdk.swarm import DataIsVisible, Swarm, attach, connect
    from iota.sdk.tuning import SFT, Layers, LoRA

_HOMES = {
    "callbacks": ("Callback", "ProgressBar", "TensorBoard", "WandB"),
    "data": ("Data",),
    "local": ("local",),
    "model": ("Model",),
    "report": ("Disruption", "Evaluation", "StepReport"),
    "run": ("Run",),
    "settings": ("AdamW", "Constant", "Cosine", "Linear", "Muon", "Pretrain", "WSD"),
    "swarm": ("DataIsVisible", "Swarm", "attach", "connect"),
    "tuning": ("SFT", "Layers", "LoRA"),
}
_MODULE_OF = {name: f"iota.sdk.{module}" for module, names in _HOMES.items() for name in names}

__all__ = [
    "SFT",
    "WSD",
    "AdamW",
    "Callback",
    "Constant",
    "Cosine",
    "Data",
    "DataIsVisible",
    "Disruption",
    "Evaluation",
    "Layers",
    "Linear",
    "LoRA",
    "Model",
    "Muon",
    "Pretrain",
    "ProgressBar",
    "Run",
    "StepReport",
    "Swarm",
    "TensorBoard",
    "WandB",
    "attach",
    "connect",
    "local",
]


def __getattr__(name: str) -> object:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'iota' has no attribute {name!r}")
    found = getattr(importlib.import_module(module), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
