"""The parity benchmark's first setting, trained by a swarm of processes: the same state root as the one-process reference.

Two stages of one miner each on the tokens of :mod:`benchmarks.corpus`; the hold-out loss is evaluated by the miners after
each step and goes to ``benchmarks/out/parity/m16-swarm-s0.json``, which ``python -m benchmarks.parity`` takes as
``--swarm-result``. If the reference's part is there, the roots are compared.

    python -m benchmarks.parity_swarm
    python -m benchmarks.parity_swarm --quick    # 8 steps, the reference beside it
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import msgspec
from blake3 import blake3
from numpy.typing import NDArray

from benchmarks.corpus import END_OF_TEXT, OUT, Corpus, corpus, fetch_documents, train_tokenizer
from benchmarks.parity import FULL, Setting
from benchmarks.reference import Reference
from benchmarks.swarms import run_swarm
from iota.prepare import PreparedData, load_prepared
from subnet.model.data import DataManifest, Shard, TokenStream, encode_manifest, row_group_hashes
from subnet.protocol.api import RunStatus
from subnet.run.config import DataSection, EvaluationSection, PipelineSection, RunConfig, SnapshotSection
from subnet.words import BlobHash

LIMIT_S = 7200.0


def _stream(directory: Path, name: str, tokens: NDArray[object]) -> TokenStream:
    data = tokens.astype("<u2").tobytes()
    (directory / f"{name}-00000.tokens").write_bytes(data)
    shard = Shard(BlobHash(blake3(data).hexdigest()), len(data), row_group_hashes(data))
    return TokenStream(len(tokens), (shard,))


def prepared_corpus(text: Corpus, directory: Path) -> PreparedData:
    """The benchmark's token streams as a data directory that a run file can name."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(fetch_documents(), text.vocab_size)
    tokenizer_json = tokenizer.to_str().encode()
    (directory / "tokenizer.json").write_bytes(tokenizer_json)
    manifest = DataManifest(
        tokenizer=BlobHash(blake3(tokenizer_json).hexdigest()),
        vocab_size=text.vocab_size,
        end_of_text=tokenizer.encode(END_OF_TEXT).ids[0],
        token_bytes=2,
        train=_stream(directory, "train", text.training),
        holdout=_stream(directory, "holdout", text.holdout),
    )
    (directory / "manifest.json").write_bytes(encode_manifest(manifest))
    (directory / "prepared.json").write_bytes(json.dumps({"version": 1, "key": "the parity benchmark's"}).encode())
    return load_prepared(directory)


def swarm_config(setting: Setting, steps: int, data: Path) -> RunConfig:
    """The setting's config in two stages, evaluated before each step; cuts and evaluation leave no trace in the root."""
    config = setting.config(0)
    return msgspec.structs.replace(
        config,
        run=msgspec.structs.replace(config.run, steps=steps),
        data=DataSection(sources=(str(data),), sequence_length=setting.sequence_length),
        pipeline=PipelineSection(stages=2, microbatches=setting.microbatches, microbatch_rows=setting.rows),
        evaluation=EvaluationSection(every_steps=1, rows=setting.evaluation_rows),
        snapshot=SnapshotSection(every_steps=50),
    )


def holdout_after_steps(status: RunStatus, steps: int) -> list[tuple[int, float]]:
    """(step, hold-out loss after it): a step's view has the loss of the state that it began with."""
    found = [(view.step - 1, view.holdout_loss) for view in status.steps if view.holdout_loss is not None]
    if status.final_holdout_loss is not None:
        found.append((steps - 1, status.final_holdout_loss))
    return [(step, loss) for step, loss in found if step >= 0]


def reference_root(setting: Setting, steps: int, text: Corpus) -> str | None:
    """Of the finished part where it is about these steps; of a run made now where they are few."""
    part = OUT / "parity" / f"{setting.name}-fixed-s0.json"
    if steps == setting.steps:
        return json.loads(part.read_text()).get("root") or None if part.exists() else None
    config = setting.config(0)
    config = msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, steps=steps))
    reference = Reference(config, setting.model, text.training, text.holdout)
    reference.calibrate()
    for step in range(steps):
        reference.step(step)
    return reference.state_root()


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parity_swarm", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="8 steps")
    options = parser.parse_args(arguments)
    setting = FULL[0]
    steps = 8 if options.quick else setting.steps
    text = corpus(8192)
    data = prepared_corpus(text, OUT / "parity" / "data")
    config = swarm_config(setting, steps, data.directory)
    result = run_swarm(OUT / "parity" / "swarm", config, 2, limit_s=LIMIT_S)
    expected = reference_root(setting, steps, text)
    holdout = holdout_after_steps(result.status, steps)
    if not options.quick:
        found = {"seed": 0, "holdout": holdout, "root": result.root}
        (OUT / "parity" / f"{setting.name}-swarm-s0.json").write_text(json.dumps(found))
    different = int(expected is not None and expected != result.root)
    figures = {
        "steps": steps,
        "root": result.root,
        "reference_root": expected,
        "num_different": different,
        "holdout_last": holdout[-1][1],
        "tokens_per_s": result.status.tokens_per_s,
    }
    ok = not different and expected is not None
    print(json.dumps({"name": "parity_swarm", "figures": figures, "limits": {"num_different": 0}, "ok": ok}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
