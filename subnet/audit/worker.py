"""The process that replays cases: reads requests from stdin, answers on stdout, and answers every request, whatever fails.

``python -m subnet.audit.worker``: each message is a length (u32, big-endian) and msgpack. Torch is set up exactly as in
miners, once: a run with other settings needs a new process, and is told so. Stage states are kept between requests of one
run. It runs at a low priority and ends with its input.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import msgspec

from subnet.allocator import bound_heap, give_back
from subnet.audit.bundle import Bundle, open_bundle
from subnet.audit.case import Case, Findings
from subnet.audit.messages import (
    LIMIT_MESSAGE_BYTES,
    OTHER_HARDWARE,
    OTHER_SETTINGS,
    ReplayAnswer,
    ReplayRequest,
)
from subnet.audit.redo import MachineFault, redo
from subnet.audit.shadow import ShadowPool
from subnet.errors import ConfigError, InputError, IotaError
from subnet.model.hardware_class import golden_hash
from subnet.model.registry import load_architecture
from subnet.model.stage import prepare_torch
from subnet.protocol import wire
from subnet.words import short

NICENESS = 10
_PR_SET_PDEATHSIG = 1


class OtherSettings(IotaError):
    """This process was set up for a run with other threads or another device."""

    code = OTHER_SETTINGS
    retryable = True


class OtherHardware(IotaError):
    """This machine computes other bits than the run's: what it finds says nothing."""

    code = OTHER_HARDWARE


class Replayer:
    """Replays bundles in this process, one after the other; one run's settings for its whole life."""

    def __init__(self, said: Callable[[str], None] = lambda words: None) -> None:
        self._said = said
        self._settings: tuple[int, str] | None = None
        self._golden: dict[tuple[str, int], str] = {}
        self._run = ""
        self._pool: ShadowPool | None = None

    @property
    def held(self) -> dict[int, int]:
        return {} if self._pool is None else self._pool.versions

    def replay(self, request: ReplayRequest) -> Findings:
        """Raises our errors where nothing can be said; no state survives one."""
        bundle = open_bundle(Path(request.directory))
        case = bundle.case
        self._set_up(case, request.device)
        try:
            pool = self._pool_of(bundle, request)
            self._check_hardware(bundle, request.device)
            bundle.require(pool.goes_on_from(case.stage, case.state))
            return redo(case, pool, bundle.blob, bundle.tokens, graph_budget_bytes=request.graph_bytes, said=self._said)
        except IotaError:
            raise
        except BaseException:
            self._pool = None
            raise

    def _set_up(self, case: Case, device: str) -> None:
        wanted = (case.planned.config.precision.num_threads, device)
        if self._settings is None:
            prepare_torch(wanted[0])
            self._settings = wanted
        if self._settings != wanted:
            raise OtherSettings(f"set up for {self._settings[0]} threads on {self._settings[1]}, asked for {wanted}")

    def _pool_of(self, bundle: Bundle, request: ReplayRequest) -> ShadowPool:
        run = wire.blob_hash(wire.encode(bundle.case.planned))
        if self._pool is None or self._run != run:
            self._pool = None
            check_model(bundle)
            try:
                self._pool = ShadowPool(bundle.plan, budget_bytes=request.budget_bytes, device=request.device)
            except RuntimeError as error:
                raise ConfigError(f"no device {request.device!r}: {error}") from error
            self._run = run
        self._pool.budget_bytes = request.budget_bytes
        return self._pool

    def _check_hardware(self, bundle: Bundle, device: str) -> None:
        case = bundle.case
        if not case.hardware_class:
            return
        key = (self._run, case.stage)
        if key not in self._golden:
            self._golden[key] = golden_hash(bundle.plan, case.stage, device)
        ours, theirs = self._golden[key], case.hardware_class[case.stage]
        if ours != theirs:
            raise OtherHardware(
                f"this machine's class at stage {case.stage} is {short(ours)}, the run's is {short(theirs)}",
                hint="replay it on a machine of the run's hardware class",
            )


def check_model(bundle: Bundle) -> None:
    """Raises unless the tensors that the case names are those of the model that it names, as they will be built here."""
    planned = bundle.case.planned
    units = load_architecture(planned.model_config).units(planned.config.data.sequence_length)
    if units.units != planned.unit_tensors or units.tied != planned.tied:
        raise InputError("the case's tensors are not those of its model")


def answer(replayer: Replayer, data: bytes) -> ReplayAnswer:
    """One request's answer; an exception of any kind is one, too."""
    try:
        request = wire.decode(data, ReplayRequest, limit_bytes=LIMIT_MESSAGE_BYTES, what="a request")
        return ReplayAnswer(findings=replayer.replay(request), held=tuple(replayer.held.items()))
    except IotaError as error:
        words = ReplayAnswer(code=error.code, reason=error.reason, hint=error.hint, retryable=error.retryable)
    except (Exception, MemoryError) as error:  # noqa: BLE001 - said to who asked, with its trace on stderr
        traceback.print_exc()
        reason = f"{type(error).__name__}: {error}"
        words = ReplayAnswer(code=MachineFault.code, reason=reason[:2000], hint="see the worker's stderr")
    return msgspec.structs.replace(words, held=tuple(replayer.held.items()))


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Until the end of the input."""
    replayer = Replayer()
    while len(head := requests.read(wire.FRAME_LENGTH.size)) == wire.FRAME_LENGTH.size:
        (size,) = wire.FRAME_LENGTH.unpack(head)
        if size > LIMIT_MESSAGE_BYTES:
            raise InputError(f"a request of {size} bytes")
        data = requests.read(size)
        if len(data) < size:
            return
        encoded = wire.encode(answer(replayer, data))
        answers.write(wire.FRAME_LENGTH.pack(len(encoded)) + encoded)
        answers.flush()
        give_back()


def _end_with_parent() -> None:
    """Where the system can: a replay under way doesn't outlive whoever waits for it."""
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    except (AttributeError, OSError):
        return


def main() -> int:
    """What libraries print goes to stderr: stdout is for answers alone."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    os.nice(NICENESS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started it is interrupted as well, and ends it
    _end_with_parent()
    bound_heap()
    with answers:
        serve(sys.stdin.buffer, answers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
