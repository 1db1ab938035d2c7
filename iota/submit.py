"""From a run file to a run: prepare, cut, draw the weights, put everything into the store, tell the validator.

Nothing is told to the validator before every blob is in the store; one that fails leaves no half of itself.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from iota.fork import Fork, Start
from iota.prepare import Progress
from iota.remote import BlobFile, Remote
from iota.submission import (
    PreparedRun,
    chosen_device,
    cut_model,
    for_others,
    load_model,
    pin_weights,
    prepare_run,
    write_snapshot,
)
from iota.submit_settings import SubmitSettings
from subnet.model.plan import ModelPlan
from subnet.model.registry import check_run
from subnet.numerics import layout
from subnet.protocol.api import RunSubmission, RunSummary
from subnet.protocol.signing import load_wallet
from subnet.protocol.wire import blob_hash, encode
from subnet.run.config import RunConfig
from subnet.run.runfile import load_run_file
from subnet.store.disk import full_disk_is_ours
from subnet.timing import Deadline
from subnet.words import PROTOCOL_VERSION, TensorSpec

Say = Callable[[str], None]
RETENTION = "data"


def say_now(text: str) -> None:
    """Print a line that whoever reads a pipe or a file sees at once."""
    print(text, flush=True)


def run_submit(settings: SubmitSettings, say: Say = say_now, fork: Fork | None = None) -> int:
    """The whole of it; exit status 0 when the validator has taken the run. ``fork``: it begins where another one was."""
    summary = submit(settings, say, fork)
    where = "it is the active run" if summary.place == 0 else f"{summary.place} before it in the queue"
    say(f"run {summary.name} ({summary.run_id}) is submitted: {where}")
    return 0


def submit(settings: SubmitSettings, say: Say, fork: Fork | None = None) -> RunSummary:
    """Raises ConfigError for what can't be, Refused for what the validator says no to, DeadlinePassed."""
    deadline = Deadline.after(settings.timeout_s)
    config = load_run_file(settings.run_file)
    signer = load_wallet(settings.wallet_name, settings.wallet_hotkey, settings.wallet_path.expanduser())
    remote = Remote(settings.validator_url, signer, hotkey=settings.validator_hotkey)
    remote.hello(deadline.sooner(60.0))
    work_dir = settings.work_dir.expanduser().absolute()
    if fork is None:
        return _submit(settings, config, remote, work_dir, deadline, say, None)
    with fork.open(remote, work_dir, deadline) as start:
        config = start.settings(config, work_dir)
        begins = "its weights" if fork.weights_only else "its weights and moments"
        say(f"fork of {fork.name} after {start.parent.info.step} updates: {begins}")
        return _submit(settings, config, remote, work_dir, deadline, say, start)


def _submit(
    settings: SubmitSettings,
    config: RunConfig,
    remote: Remote,
    work_dir: Path,
    deadline: Deadline,
    say: Say,
    start: Start | None,
) -> RunSummary:
    architecture, source = load_model(config)
    check_run(config, architecture)
    run = prepare_run(config, work_dir, progress=_Reporter(say))
    costs = _unit_costs(settings, run)
    plan = cut_model(run, costs)
    if source is not None:
        say(f"weights: {source.directory}, as fp32")
    say(f"model: {plan.units.num_parameters:,} parameters in {plan.num_stages} stages, layers cut at {plan.cuts}")
    if config.trainable.kind != "full":
        say(f"trained: {plan.num_trained:,} parameters; the others are frozen")
    if run.data.words:
        say(f"data: {run.data.words}")
    with _scratch(work_dir) as scratch:
        if start is not None:
            start.check(plan, run.data.tokenizer_path)
        first = write_snapshot(plan, source, scratch) if start is None else start.write(plan, scratch)
        manifest = first.encode()
        snapshot = blob_hash(manifest)
        files: list[BlobFile] = [(blob, path, RETENTION) for blob, path in run.data.files().items()]
        files += [(path.name, path, RETENTION) for path in sorted(scratch.iterdir())]
        files.append((snapshot, manifest, RETENTION))
        carried = b"" if source is None else encode(source.carried_files())
        if carried:
            files.append((blob_hash(carried), carried, RETENTION))
        total = sum(len(source) if isinstance(source, bytes) else source.stat().st_size for _, source, _ in files)
        say(f"store: {len(files)} blobs, {total / 1e6:.1f} MB")
        remote.put(config.run.name, files, deadline)
    submission = RunSubmission(
        version=PROTOCOL_VERSION,
        config=encode(for_others(pin_weights(config, source))),
        model_config=dict(plan.model_config),
        unit_tensors=tuple(tuple(_as_word(spec) for spec in unit) for unit in plan.units.units),
        unit_flops_per_token=plan.units.unit_flops_per_token,
        unit_costs=costs,
        tied=None if plan.units.tied is None else _as_word(plan.units.tied),
        data=blob_hash(run.data.manifest_path.read_bytes()),
        snapshot=snapshot,
        tokenizer=run.data.manifest.tokenizer,
        hardware_class=_hardware_class(plan, settings.device) if settings.hardware_class else None,
        cuts=plan.cuts,
        carried=blob_hash(carried) if carried else "",
    )
    return remote.submit(submission, deadline)


def _as_word(spec: layout.TensorSpec) -> TensorSpec:
    return TensorSpec(spec.name, spec.shape, spec.row_blocked)


def _unit_costs(settings: SubmitSettings, run: PreparedRun) -> tuple[float, ...]:
    """Seconds of embedding, each layer and head here; where they aren't measured, FLOPs."""
    flops = run.architecture.units(run.config.data.sequence_length).unit_flops_per_token
    if not settings.measure_costs:
        return flops
    from iota.plan import measure_unit_costs

    return tuple(measure_unit_costs(run.config, run.architecture.model_config))


def _hardware_class(plan: ModelPlan, device: str) -> tuple[str, ...]:
    from subnet.model.hardware_class import hardware_class
    from subnet.model.stage import prepare_torch

    prepare_torch(plan.config.precision.num_threads)
    return hardware_class(plan, chosen_device(device))


class _Reporter:
    """Says each phase of a preparation once, and its end."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._phase = ""

    def __call__(self, progress: Progress) -> None:
        if progress.phase != self._phase:
            self._phase = progress.phase
            tokens = f", {progress.num_tokens:,} training tokens" if progress.phase == "done" else ""
            self._say(f"data: {progress.phase} ({progress.total_bytes / 1e6:.1f} MB of text{tokens})")


@contextmanager
def _scratch(work_dir: Path) -> Generator[Path]:
    """A directory for the blobs of one submission, gone afterwards; a full disk is an error of ours."""
    made: Path | None = None
    try:
        with full_disk_is_ours(str(work_dir)):
            work_dir.mkdir(parents=True, exist_ok=True)
            made = Path(tempfile.mkdtemp(prefix=".submission.", dir=work_dir))
        yield made
    finally:
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)
