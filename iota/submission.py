"""What a run starts from, made from its run file: checked data, a cut model, snapshot 0; same file, same bytes.

Nothing here speaks to anybody; blobs are left as files in a directory the caller owns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from blake3 import blake3
from tokenizers import Tokenizer

from iota.own_modules import for_others as with_code_named
from iota.own_modules import load_modules
from iota.prepare import PreparedData, Progress, is_prepared, prepare_for_run
from subnet.errors import ConfigError
from subnet.model.checkpoints import TOKENIZER_FILES, draw_weights
from subnet.model.data_checks import check_data
from subnet.model.own_code import MODULES
from subnet.model.plan import ModelPlan
from subnet.model.pretrained import PretrainedDirectory
from subnet.model.registry import Architecture, check_run, load_architecture, plan_model
from subnet.model.snapshots import KINDS, SnapshotManifest, TensorEntry, array_bytes, store_tensor
from subnet.numerics.layout import TensorSpec
from subnet.numerics.roots import leaf_hash
from subnet.numerics.state_arrays import LIMIT_BEFORE, state_kinds
from subnet.run.config import DataSection, RunConfig
from subnet.run.trainable import is_adapter
from subnet.store.disk import atomic_write
from subnet.words import BlobHash
from validator.stage_plan import plan_cuts


@dataclass(frozen=True)
class PreparedRun:
    """A run that could be submitted."""

    config: RunConfig
    architecture: Architecture
    data: PreparedData


def load_model(config: RunConfig) -> tuple[Architecture, PretrainedDirectory | None]:
    """The run's architecture, and the directory its weights come from where it names one."""
    if config.model.modules:
        return load_modules(config), None
    if config.model.pretrained is None:
        assert config.model.config is not None  # the section's own check
        return load_architecture(config.model.config), None
    source = PretrainedDirectory(Path(config.model.pretrained))
    architecture = load_architecture(source.model_config)
    source.check([spec for unit in architecture.units(config.data.sequence_length).units for spec in unit])
    return architecture, source


def prepare_run(
    config: RunConfig, work_dir: Path, *, progress: Callable[[Progress], None] = lambda progress: None
) -> PreparedRun:
    """Load the model, prepare the data in ``work_dir`` (or find it there), and check that they fit."""
    architecture, source = load_model(config)
    check_run(config, architecture)
    section = config.data
    if source is not None:
        section = _with_tokenizer(section, source)
    objective = config.objective
    form: tuple[object, ...] = (objective.packing,) if objective.kind == "sft" else ()
    described = (msgspec.structs.replace(section, weights=()), architecture.vocab_size, *form)
    out_dir = work_dir / "data" / blake3(msgspec.json.encode(described)).hexdigest()[:16]
    data = prepare_for_run(section, architecture.vocab_size, out_dir, objective=objective, progress=progress)
    check_data(config, data.manifest, architecture.vocab_size)
    if source is not None and source.tokenizer is not None:
        check_tokenizers(data.tokenizer_path, source.tokenizer)
    return PreparedRun(config, _with_ends(architecture, config.model.config, data.manifest.end_of_text), data)


def _with_tokenizer(section: DataSection, source: PretrainedDirectory) -> DataSection:
    """Weights are tied to their tokenizer: the directory's, if the run file names none.

    Only where a directory has no trace of one (weights just drawn, say) is one trained.
    """
    if section.tokenizer or (len(section.sources) == 1 and is_prepared(Path(section.sources[0]))):
        return section
    if source.tokenizer is None:
        traces = [name for name in TOKENIZER_FILES if (source.directory / name).is_file()]
        if not traces:
            return section
        raise ConfigError(
            f"{source.directory} has {traces[0]} but no tokenizer.json, and a new one would not fit its weights",
            hint="AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR) writes it, or name one in data.tokenizer",
        )
    return msgspec.structs.replace(section, tokenizer=str(source.tokenizer))


def check_tokenizers(data: Path, model: Path) -> None:
    """Raises :class:`ConfigError` unless both ``tokenizer.json`` give the same numbers to the same tokens."""
    if data.read_bytes() == model.read_bytes():
        return
    ours, theirs = (Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True) for path in (data, model))
    if ours == theirs:
        return
    differing = min((token for token in {**ours, **theirs} if ours.get(token) != theirs.get(token)), key=str)
    raise ConfigError(
        f"the data's tokenizer has another vocabulary than {model}: {differing!r} is {ours.get(differing)} there, "
        f"{theirs.get(differing)} in the model's",
        hint=f"leave data.tokenizer out, or prepare the data again with --tokenizer {model}",
    )


def pin_weights(config: RunConfig, source: PretrainedDirectory | None) -> RunConfig:
    """The config with the hash of what the run starts from; :class:`ConfigError` where the run file says another."""
    if source is None:
        return config
    found, wanted = source.content_hash(), config.model.pretrained_hash
    if wanted and wanted != found:
        raise ConfigError(
            f"{source.directory} has hash {found}, the run file says model.pretrained_hash = {wanted}",
            hint="get the directory it was made for, or leave the key out",
        )
    return msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, pretrained_hash=found))


def _with_ends(architecture: Architecture, given: Mapping[str, Any] | None, end_of_text: int) -> Architecture:
    """The architecture with the data's end-of-text token, where the run file names none: what generation stops at."""
    if given is None or "eos_token_id" in given or architecture.family.model_type == MODULES:
        return architecture
    ends = {"eos_token_id": end_of_text, "bos_token_id": given.get("bos_token_id", end_of_text)}
    return load_architecture({**architecture.model_config, **ends})


def for_others(config: RunConfig) -> RunConfig:
    """The config as everybody gets to see it: of the submitter's paths only the last names."""
    config = with_code_named(config)
    data, model = config.data, config.model
    sources = tuple(Path(source).name for source in data.sources)
    pretrained = Path(model.pretrained).name if model.pretrained else model.pretrained
    return msgspec.structs.replace(
        config,
        data=msgspec.structs.replace(data, sources=sources, tokenizer=Path(data.tokenizer).name),
        model=msgspec.structs.replace(model, pretrained=pretrained),
    )


def cut_model(run: PreparedRun, unit_costs: tuple[float, ...]) -> ModelPlan:
    """The model cut so that the slowest stage is as fast as it can be."""
    return plan_model(run.config, run.architecture, plan_cuts(unit_costs, run.config.pipeline.stages))


def chosen_device(device: str) -> str:
    """``auto``: CUDA where there is one."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device


def write_snapshot(plan: ModelPlan, source: PretrainedDirectory | None, directory: Path) -> SnapshotManifest:
    """Snapshot 0: the chunks of the initial weights as files named by their hashes, and the manifest of them."""

    def put(blob: BlobHash, data: memoryview) -> None:
        if not (directory / blob).exists():
            atomic_write(directory / blob, data, durable=False)

    entries: list[TensorEntry] = []
    for spec, weight in _initial(plan, source):
        frozen = not plan.is_trainable(spec.name)
        kinds = ("weight",) if frozen else initial_kinds(plan.config)
        leaf = zero_state_leaf(spec, weight, kinds)
        entries.append(store_tensor(spec, {**dict.fromkeys(kinds), "weight": weight}, leaf, put, frozen=frozen))
    return SnapshotManifest(0, tuple(entries))


def initial_kinds(config: RunConfig) -> tuple[str, ...]:
    """The arrays of a state that isn't calibrated."""
    return tuple(kind for kind in state_kinds(config) if kind != LIMIT_BEFORE)


def zero_state_leaf(spec: TensorSpec, weight: memoryview, kinds: Sequence[str] = KINDS) -> bytes:
    """The leaf of a tensor before its first update: all but its weights is zero."""
    zeros = (bytes(array_bytes(spec, kind)) for kind in kinds if kind != "weight")
    return leaf_hash(spec.name, spec.shape, weight, *zeros)


def _initial(plan: ModelPlan, source: PretrainedDirectory | None) -> Iterator[tuple[TensorSpec, memoryview]]:
    for spec in plan.canonical:
        if source is not None and not is_adapter(spec.name):
            yield spec, _bytes_of(next(source.read([spec]))[1])
        else:
            yield spec, _bytes_of(next(draw_weights(plan, [spec]))[1])


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.detach().to(torch.float32).contiguous().numpy().data).cast("B")
