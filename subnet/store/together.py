"""Several transfers at once: the first that fails for good ends the others, and its error is raised as it is."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from subnet.errors import IotaError

T = TypeVar("T")


async def all_of(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results in order; the first error ends the others and is raised alone (a task group would wrap it)."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except BaseExceptionGroup as errors:
        raise _first(errors) from None
    return [task.result() for task in tasks]


def _first(error: BaseException) -> BaseException:
    """A fault of our own before an error of the tree: it must not be taken for a store that is away."""
    while isinstance(error, BaseExceptionGroup):
        inner: list[BaseException] = list(error.exceptions)
        error = next((one for one in inner if not isinstance(one, IotaError)), inner[0])
    return error
