"""A receiver shows a boundary that is no numbers, if it is what its maker has receipted; and asks for nothing else meanwhile."""

from __future__ import annotations

import asyncio
import struct
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from audit_cases import a_plan
from model_cases import tiny_plan
from test_mismatch import B, F, X, at_work

from miner.boundaries import BoundaryCache
from miner.compute import ComputeThread
from miner.context import MAX_UNUSABLE, RunContext, StageWork
from miner.local_view import BoundaryKey, LocalView
from miner.member_evidence import EvidenceWork
from miner.member_items import ItemWork
from miner.owed import owed
from miner.owes import Compute, Fetch, Report, StoreUnusable
from subnet.errors import HashMismatch, NotFound
from subnet.model.boundary_check import is_unusable
from subnet.model.checkpoints import initial_weights
from subnet.model.memory import boundary_bytes
from subnet.model.plan import ModelPlan
from subnet.numerics.codes import encode
from subnet.protocol import messages as msg
from subnet.protocol.wire import blob_hash
from subnet.run import events as ev
from subnet.run import state as st
from subnet.run.apply import apply


def numbers(plan: ModelPlan) -> bytearray:
    return bytearray(np.random.default_rng(1).standard_normal(boundary_bytes(plan) // 4).astype("<f4").tobytes())


def broken(plan: ModelPlan) -> bytearray:
    data = numbers(plan)
    data[8:12] = struct.pack("<f", float("nan"))
    return data


@pytest.mark.parametrize("code", ["raw", "int8", "int4"])
def test_only_what_decodes_to_finite_numbers_is_usable(code: str) -> None:
    plan, coded = a_plan((0, 2)), a_plan((0, 2), code=code)
    values = np.frombuffer(numbers(plan), "<f4").reshape(-1, plan.hidden_size)
    good = bytearray(values.tobytes() if code == "raw" else encode(code, values, coded.config.pipeline.chunks))
    bad = bytearray(good)
    bad[:] = b"\xff" * len(bad)
    assert not is_unusable(coded, blob_hash(good), good)
    assert is_unusable(coded, blob_hash(bad), bad)
    assert is_unusable(coded, blob_hash(good[4:]), good[4:])
    with pytest.raises(HashMismatch):
        is_unusable(coded, blob_hash(good), bad)


def test_it_is_shown_once_it_is_receipted_and_nothing_is_fetched_under_that_receipt() -> None:
    state, local = at_work(), LocalView(version=-1, restored_stage=1)
    local.unusable[X] = "nan"
    assert any(isinstance(owe, Fetch) for owe in owed(state, B, local)), "its maker may receipt something else"
    apply(state, ev.Forwarded(-1, 0, 0, 1, "nan"))
    assert owed(state, B, local) == [StoreUnusable(X, "nan")]
    local.denounced.add("nan")
    assert owed(state, B, local) == [Report(msg.UnusableClaim(-1, 0, 1, False, "nan"))]
    maker = st.item(state, -1, 0, 0).member  # type: ignore[union-attr]
    assert maker is not None
    apply(state, ev.Gone(maker, "accused"))
    assert [owe for owe in owed(state, B, local) if not isinstance(owe, Fetch)] == []
    local.end_step(-1)
    assert local.unusable == {}


def context_of(plan: ModelPlan, cache: BoundaryCache, **more: Any) -> Any:
    context = SimpleNamespace(
        local=LocalView(version=-1, restored_stage=1, kept=cache.kept), cache=cache, plan=plan, member=B,
        unusable=OrderedDict[str, memoryview](), wake=lambda: None, **more,
    )  # fmt: skip
    context.keep_unusable = lambda *of: RunContext.keep_unusable(context, *of)  # type: ignore[arg-type]
    return context


async def test_what_can_t_be_computed_with_goes_and_is_kept_to_be_shown(tmp_path: Path) -> None:
    """As it comes through the store, where nobody looks at it before it is computed with."""
    plan = tiny_plan((0, 1, 3))
    state = at_work()
    config = msgspec.structs.replace(plan.config, audit=st.config(state).audit)
    stage, compute = StageWork(plan, 1, "cpu", 1 << 30), ComputeThread()
    stage.state.load_weights(initial_weights(plan))
    cache = BoundaryCache(tmp_path, memory_bytes=1 << 24, disk_bytes=1 << 24)
    context = context_of(
        ModelPlan(config, plan.model_config, plan.units, plan.cuts),
        cache,
        compute=compute,
        stage=stage,
        run_state=state,
        held_stage=lambda: stage,
    )
    data = broken(plan)
    hash_ = str(blob_hash(data))
    context.local.boundaries[X] = hash_
    cache.put(X, data, hash_)
    try:
        await ItemWork(context).run(Compute(-1, 0, 1, backward=False, generation=1))
    finally:
        await asyncio.to_thread(compute.stop)
    assert context.local.unusable == {X: hash_}
    assert bytes(context.unusable[hash_]) == data
    assert X not in context.local.boundaries
    assert F not in context.local.boundaries
    assert X not in cache


async def test_its_bytes_are_put_into_the_store_and_only_a_few_are_kept(tmp_path: Path) -> None:
    stored: dict[str, bytes] = {}

    async def put_many(blobs: list[tuple[str, Any]], retention: str, deadline: Any) -> None:
        stored.update({name: bytes(data) for name, data in blobs})

    plan = tiny_plan((0, 2))
    cache = BoundaryCache(tmp_path, memory_bytes=1 << 24, disk_bytes=1 << 24)
    context = context_of(plan, cache, blobs=SimpleNamespace(put_many=put_many))
    keys = [BoundaryKey(-1, m, 0, False) for m in range(MAX_UNUSABLE + 1)]
    for number, key in enumerate(keys):
        context.keep_unusable(key, f"h{number}", bytes([number]))
    work = EvidenceWork(context)
    await work.denounce(StoreUnusable(keys[1], "h1"))
    assert stored == {"h1": b"\x01"}
    assert context.local.denounced == {"h1"}
    with pytest.raises(NotFound):
        await work.denounce(StoreUnusable(keys[0], "h0"))
    assert keys[0] not in context.local.unusable, "it is fetched again"
    await work.close()
