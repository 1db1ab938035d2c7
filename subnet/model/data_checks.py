"""Whether a run and its prepared data fit each other; each mistake is one line with the remedy."""

from __future__ import annotations

import msgspec

from subnet.errors import ConfigError
from subnet.model.data import DataManifest, num_samples
from subnet.run.config import RunConfig


def check_data(config: RunConfig, manifest: DataManifest, model_vocab_size: int) -> None:
    """Refuse data that the run cannot train or evaluate on, with the remedy."""
    length = config.data.sequence_length
    _check_form(config, manifest)
    _check_weights(config, manifest)
    if manifest.train.num_tokens == 0:
        raise ConfigError("data.sources hold no text to train on", hint="name files that are not empty")
    if num_samples(manifest.train.num_tokens, length) == 0:
        raise ConfigError(
            f"the training text has {manifest.train.num_tokens} tokens, a sample needs {length + 1}",
            hint="add text to data.sources or lower data.sequence_length",
        )
    if config.evaluation.rows and num_samples(manifest.holdout.num_tokens, length) == 0:
        raise ConfigError(
            f"the hold-out text has {manifest.holdout.num_tokens} tokens, a sample needs {length + 1}",
            hint="raise data.holdout_fraction, add text, lower data.sequence_length, or set evaluation.rows = 0",
        )
    if manifest.vocab_size > model_vocab_size:
        raise ConfigError(
            f"the data's vocabulary has {manifest.vocab_size} tokens, the model's vocab_size is {model_vocab_size}",
            hint=f"set vocab_size to {manifest.vocab_size} or more in the model's config, or prepare the data with a "
            f"vocabulary of at most {model_vocab_size}",
        )


def _check_form(config: RunConfig, manifest: DataManifest) -> None:
    rows, wanted = manifest.dialogues, config.data.sequence_length
    if (rows is not msgspec.UNSET) != (config.objective.kind == "sft"):
        there, remedy = ("dialogues", "sft") if rows is not msgspec.UNSET else ("running text", "causal_lm")
        raise ConfigError(
            f"the data are {there}, objective.kind is {config.objective.kind!r}",
            hint=f"set objective.kind = {remedy!r}, or prepare other data",
        )
    if rows is not msgspec.UNSET and rows != wanted:
        raise ConfigError(
            f"the data are rows of {rows} tokens, data.sequence_length is {wanted}",
            hint=f"set data.sequence_length = {rows}, or prepare the dialogues again",
        )


def _check_weights(config: RunConfig, manifest: DataManifest) -> None:
    weights = config.data.weights
    if not weights:
        return
    if len(weights) != max(1, len(manifest.domain_names)):
        raise ConfigError(
            f"data.weights has {len(weights)} numbers, the data has {max(1, len(manifest.domain_names))} sources",
            hint="give one weight for each of data.sources, in their order",
        )
    rows = manifest.domain_rows(config.data.sequence_length, holdout=False)
    for name, (_, count) in zip(manifest.domain_names, rows, strict=True):
        if not count:
            raise ConfigError(
                f"the source {name} is shorter than a row of {config.data.sequence_length} tokens",
                hint="add text to it, or leave it and its weight out",
            )
