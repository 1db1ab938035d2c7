"""Cases that contradict themselves or their run are refused before anything of them is replayed."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from audit_cases import LiveRun, a_plan, edit_item, edit_log, edit_merged, edit_partial, edit_slice, other_hash

from subnet.audit.case import Case
from subnet.audit.check import check_case
from subnet.errors import InputError
from subnet.model.stage import prepare_torch

prepare_torch(1)


@pytest.fixture(scope="module")
def run() -> LiveRun:
    return LiveRun(a_plan((0, 1, 3))).run(2)


def unsound(run: LiveRun) -> dict[str, Case]:
    case, last = run.case(1, 1), run.case(1, 2)
    assert case.merge is not None
    assert case.update is not None
    replace = msgspec.structs.replace
    partial = case.partials[0]
    double = replace(partial.commitment, microbatches=(partial.commitment.microbatches[0],) * 2)
    return {
        "version": replace(case, version=2),
        "stage": replace(case, stage=3),
        "step": replace(case, step=99),
        "log gap": replace(case, state=replace(case.state, log=case.state.log[1:])),
        "log too long": replace(case, state=replace(case.state, log=run.state_ref(1, 2).log)),
        "partitions": edit_log(case, 1, partitions=case.state.log[1].partitions[1:]),
        "scalars": edit_log(case, 1, scalars=None),
        "nobody": replace(case, partials=()),
        "twice": replace(case, partials=(partial, partial)),
        "no items": edit_partial(case, items=(), commitment=replace(partial.commitment, microbatches=())),
        "m-set": edit_partial(case, commitment=replace(partial.commitment, microbatches=(0, 3))),
        "item twice": edit_partial(case, items=(partial.items[0],) * 2, commitment=double),
        "microbatch": edit_item(case, 0, microbatch=-1),
        "no input": edit_item(case, 0, x=""),
        "input where there is none": edit_item(last, 0, gradient=other_hash("g")),
        "path for a hash": edit_item(case, 0, x="../../etc/passwd"),
        "loss": edit_item(case, 0, loss_bits=1 << 32),
        "slice's hash": edit_slice(case, 0, "x"),
        "squares": edit_merged(case, 0, squares="-1"),
        "seed": replace(case, merge=replace(case.merge, seed="xyz")),
        "total": replace(case, merge=replace(case.merge, total_items=3)),
        "group": replace(case, merge=replace(case.merge, group=0)),
        "update": replace(case, update=replace(case.update, step=0)),
        "update without all": replace(case, merge=replace(case.merge, whole=False)),
        "cuts": replace(case, planned=replace(case.planned, groups=case.planned.groups[:1])),
        "shape": replace(case, planned=replace(case.planned, unit_tensors=_huge(case))),
        "class": replace(case, hardware_class=("a",)),
        "skipped twice": replace(case, skipped=(0, 0), merge=None, update=None),
        "skipped nowhere": replace(case, skipped=(99,), merge=None, update=None),
        "skipped and done": replace(case, skipped=(0,), merge=None, update=None),
        "too many": replace(case, merge=replace(case.merge, total_items=4), skipped=(3,)),
    }


def _huge(case: Case) -> Any:
    units = [list(unit) for unit in case.planned.unit_tensors]
    units[0][0] = msgspec.structs.replace(units[0][0], shape=(1 << 40, 32))
    return tuple(tuple(unit) for unit in units)


def test_cases_that_make_no_sense_are_refused(run: LiveRun) -> None:
    assert check_case(run.case(1, 1)).num_stages == 3
    for case in unsound(run).values():
        with pytest.raises(InputError):
            check_case(case)
