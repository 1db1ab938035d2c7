"""A swarm as seen by a model builder: submit a run, look at runs; :func:`iota.connect` to one, or :func:`iota.local`."""

from __future__ import annotations

import asyncio
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from iota.remote import Remote
from iota.sdk.callbacks import Callback
from iota.sdk.calls import Calls
from iota.sdk.data import Data
from iota.sdk.model import Model
from iota.sdk.run import CALL_S, Run
from iota.sdk.settings import AdamW, Cosine, Optimizer, Pretrain, Schedule, Section, make_config
from iota.sdk.tuning import SFT, Layers, LoRA
from subnet.errors import NotFound
from subnet.protocol.api import RunSummary
from subnet.protocol.signing import Signer, load_wallet
from subnet.run.config import RunConfig
from subnet.run.runfile import config_to_toml, load_run_file
from subnet.store.disk import atomic_write
from subnet.timing import Deadline

WALLETS = Path("~/.bittensor/wallets")
WORK_DIR = Path("~/.iota/submissions")
SUBMIT_S = 3600.0
Say = Callable[[str], None]


class DataIsVisible(UserWarning):
    """Whoever mines for an open swarm reads the training text, the hold-out text and the weights."""


class Swarm:
    """A validator, its miners and its store. Made by :func:`iota.connect` or :func:`iota.local`; a context manager.

    Methods block and may be called from any thread, also where an event loop runs (a notebook). In asyncio code:
    ``run = await asyncio.to_thread(swarm.train, model, data)``.
    """

    def __init__(
        self,
        url: str,
        *,
        wallet: str = "default",
        wallet_path: str | Path = WALLETS,
        hotkey: str | None = None,
        work_dir: str | Path = WORK_DIR,
        warn: bool = True,
        same_class: bool = False,
        poll_s: float = 1.0,
    ) -> None:
        self.url, self.poll_s = url.rstrip("/"), poll_s
        self.calls = Calls()
        self._wallet, _, self._wallet_hotkey = wallet.partition("/")
        self._wallet_path, self._hotkey = Path(wallet_path).expanduser(), hotkey
        self._work_dir = Path(work_dir).expanduser().absolute()
        self._warn, self._same_class = warn, same_class
        self._signer: Signer | None = None

    def __repr__(self) -> str:
        return f"<iota.Swarm at {self.url}>"

    # ---- life

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """Let go of it; a swarm that isn't this process's own goes on. Safe to call twice."""
        self.calls.close()

    def shutdown(self) -> None:
        """End a swarm of this machine, also one that :meth:`close` leaves running; of others this is :meth:`close`."""
        self.close()

    # ---- runs

    def train(
        self,
        model: Model,
        data: Data,
        objective: Pretrain | SFT | Section = Pretrain(),
        optimizer: Optimizer | Section = AdamW(),
        schedule: Schedule | Section = Cosine(),
        *,
        stages: int = 1,
        steps: int | None = None,
        name: str | None = None,
        seed: int = 0,
        trainable: LoRA | Layers | Section | None = None,
        callbacks: Sequence[Callback] = (),
        timeout_s: float = SUBMIT_S,
        **sections: Section,
    ) -> Run:
        """Prepare the data, draw (or read) the weights, put both into the store, start or queue the run.

        ``stages``: pieces the model is cut into, each on its own miners. ``trainable``: what is trained, where not all
        is. ``sections``: any section of a run file with its
        keys, for example ``precision={"compute": "bf16"}``. Raises ConfigError for what can't be, Refused where the
        validator says no, DeadlinePassed after ``timeout_s``. ``callbacks`` are called while the run is iterated.
        """
        config = make_config(
            name=name or f"{model.family}-{time.strftime('%Y%m%d-%H%M%S')}",
            seed=seed,
            steps=steps,
            stages=stages,
            model=model.section(self._work_dir),
            data=data.section(self._work_dir),
            objective=objective,
            optimizer=optimizer,
            schedule=schedule,
            sections=sections,
            trainable=trainable,
        )
        return self.submit(config, callbacks=callbacks, timeout_s=timeout_s)

    def submit(
        self, run: RunConfig | str | Path, *, callbacks: Sequence[Callback] = (), timeout_s: float = SUBMIT_S
    ) -> Run:
        """Start (or queue) the run of a run file or a config; see :meth:`train`."""
        config = run if isinstance(run, RunConfig) else load_run_file(Path(run).expanduser())
        self._warn_of_visible_data()
        path = self._work_dir / "runs" / f"{config.run.name}.toml"
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, config_to_toml(config).encode())

        def say(text: str) -> None:
            for callback in callbacks:
                callback.on_prepare(text)

        self._submit(path, Deadline.after(timeout_s), say)
        return Run(self, config.run.name, tuple(callbacks), config)

    def run(self, name: str, *, callbacks: Sequence[Callback] = ()) -> Run:
        """A run that was submitted before, by anybody; NotFound comes when it is asked for something."""
        return Run(self, name, tuple(callbacks))

    def runs(self) -> tuple[RunSummary, ...]:
        """The validator's runs, queued ones included, in order of submission."""
        return self.calls.blocking(lambda: self.remote().runs(Deadline.after(CALL_S)))

    # ---- how

    @property
    def cache(self) -> Path:
        """Where fetched weights are kept."""
        return self._work_dir

    def remote(self, *, signed: bool = False) -> Remote:
        """The validator's interface; ``signed``: with the wallet's hotkey."""
        if not signed:
            return Remote(self.url, hotkey=self._hotkey)
        if self._signer is None:
            self._signer = load_wallet(self._wallet, self._wallet_hotkey or "default", self._wallet_path)
        return Remote(self.url, self._signer, hotkey=self._hotkey)

    def check(self) -> None:
        """Raise where the swarm can't go on, as far as that can be known without asking it."""

    def detached_words(self, name: str) -> str:
        """What is printed when somebody stops looking at a run."""
        return f'detached; run {name} goes on. Look again: iota.attach("{self.url}", "{name}")'

    def _warn_of_visible_data(self) -> None:
        if self._warn:
            self._warn = False
            warnings.warn(
                f"the miners of {self.url} will see this run's text and weights (iota.connect(..., warn=False): you know)",
                DataIsVisible,
                stacklevel=4,
            )

    def _submit(self, path: Path, deadline: Deadline, say: Say) -> None:
        from iota.sdk.submitting import submit_in_process

        submit_in_process(self._arguments(path), deadline, say)

    def submit_fork(self, parent: str, path: Path, more: Sequence[str], deadline: Deadline, say: Say) -> None:
        """For :meth:`iota.Run.fork`, which see."""
        from iota.sdk.submitting import submit_in_process

        submit_in_process([parent, *self._arguments(path), *more], deadline, say, "fork")

    def _arguments(self, path: Path) -> list[str]:
        arguments = [str(path), "--validator.url", self.url, "--work-dir", str(self._work_dir)]
        arguments += ["--wallet.name", self._wallet, "--wallet.hotkey", self._wallet_hotkey or "default"]
        arguments += ["--wallet.path", str(self._wallet_path)]
        arguments += ["--validator.hotkey", self._hotkey] if self._hotkey else []
        return [*arguments, *(["--same-class"] if self._same_class else [])]


def connect(
    url: str,
    wallet: str = "default",
    *,
    wallet_path: str | Path = WALLETS,
    hotkey: str | None = None,
    warn: bool = True,
    same_class: bool = False,
    work_dir: str | Path = WORK_DIR,
    timeout_s: float = CALL_S,
) -> Swarm:
    """A swarm whose validator answers at ``url``. ``wallet``: NAME or NAME/HOTKEY, needed to submit and to fetch weights.

    ``hotkey``: the validator's, where another must not answer. ``warn=False``: no :class:`DataIsVisible`.
    ``same_class``: the miners run on machines like this one. Raises Unreachable where nothing answers.
    """
    swarm = Swarm(
        url,
        wallet=wallet,
        wallet_path=wallet_path,
        hotkey=hotkey,
        work_dir=work_dir,
        warn=warn,
        same_class=same_class,
    )
    try:
        swarm.calls.blocking(lambda: swarm.remote().hello(Deadline.after(timeout_s)))
    except BaseException:
        swarm.close()
        raise
    return swarm


def attach(url: str, run: str, wallet: str = "default", *, callbacks: Sequence[Callback] = (), **more: Any) -> Run:
    """A run of a swarm by its name: ``connect(url, wallet, ...).run(run)``; raises NotFound where there is none."""
    swarm = connect(url, wallet, **more)
    names = [summary.name for summary in swarm.runs()]
    if run not in names:
        swarm.close()
        raise NotFound(f"{url} has no run called {run!r}", hint=f"it has: {', '.join(names[-8:]) or 'none'}")
    return swarm.run(run, callbacks=callbacks)
