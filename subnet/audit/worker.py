"""The process that replays cases: reads requests from stdin, answers on stdout, and answers every request, whatever fails.

``python -m subnet.audit.worker``: each message is a length (u32, big-endian) and msgpack. Torch is set up exactly as in
miners, once: a run with other settings needs a new process, and is told so. Stage states are kept between requests of one
run. It runs at a low priority, ends with its input, and on a CPU the system holds it to its memory budget: what needs more
fails with :class:`MachineFault`.
"""

from __future__ import annotations

import ctypes
import os
import resource
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
from subnet.audit.memory import replay_bytes
from subnet.audit.messages import (
    LIMIT_MESSAGE_BYTES,
    OTHER_HARDWARE,
    OTHER_SETTINGS,
    ReplayAnswer,
    ReplayRequest,
)
from subnet.audit.redo import MachineFault, redo
from subnet.audit.shadow import ShadowPool, Tick, no_tick
from subnet.audit.tolerance import Elsewhere
from subnet.errors import ConfigError, InputError, IotaError
from subnet.model.hardware_class import golden_hash
from subnet.model.registry import check_run, load_architecture
from subnet.model.stage import prepare_torch
from subnet.protocol import wire
from subnet.words import short

NICENESS = 10
LIBRARIES_BYTES = 512 << 20
"""What libraries map late, and stacks of threads: on top of the budget, mostly never touched."""
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

    def __init__(self, said: Callable[[str], None] = lambda words: None, tick: Tick = no_tick) -> None:
        self._said, self._tick = said, tick
        self._settings: tuple[int, str] | None = None
        self._golden: dict[tuple[str, int], str] = {}
        self._run = ""
        self._pool: ShadowPool | None = None

    @property
    def held(self) -> dict[int, int]:
        return {} if self._pool is None else self._pool.versions

    def replay(self, request: ReplayRequest) -> Findings:
        """Raises our errors where nothing can be said; no state survives another one, which is a :class:`MachineFault`."""
        bundle = open_bundle(Path(request.directory))
        case = bundle.case
        self._set_up(case, request.device)
        try:
            pool = self._pool_of(bundle, request)
            pool.make_room(case.stage)
            elsewhere = self._elsewhere(bundle, request)
            bundle.require(pool.goes_on_from(case.stage, case.state))
            return redo(
                case,
                pool,
                bundle.blob,
                bundle.tokens,
                graph_budget_bytes=request.graph_bytes,
                elsewhere=elsewhere,
                said=self._said,
                tick=self._tick,
            )
        except IotaError:
            raise
        except Exception as error:
            self._pool = None
            raise MachineFault(f"{type(error).__name__}: {error}"[:2000]) from error
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
                self._pool = ShadowPool(
                    bundle.plan,
                    budget_bytes=request.budget_bytes,
                    work_bytes=lambda stage: replay_bytes(bundle.plan, stage),
                    device=request.device,
                )
            except RuntimeError as error:
                raise ConfigError(f"no device {request.device!r}: {error}") from error
            self._run = run
        self._pool.budget_bytes = request.budget_bytes
        return self._pool

    def _elsewhere(self, bundle: Bundle, request: ReplayRequest) -> Elsewhere | None:
        """None on a machine of the run's class, where the case names none, or where it is about roots, which are exact."""
        case = bundle.case
        if not case.hardware_class or case.roots:
            return None
        key = (self._run, case.stage)
        if key not in self._golden:
            self._said("finding out the hardware class of this machine")
            self._golden[key] = golden_hash(bundle.plan, case.stage, request.device)
        ours, theirs = self._golden[key], case.hardware_class[case.stage]
        if ours == theirs:
            return None
        if not request.tolerant or bundle.plan.config.lanes.on:  # what differs a little grows with each inner step
            raise OtherHardware(
                f"this machine's class at stage {case.stage} is {short(ours)}, the run's is {short(theirs)}",
                hint="replay it on a machine of the run's hardware class",
            )
        return Elsewhere(ours, theirs, bundle.find)


def check_model(bundle: Bundle) -> None:
    """Raises unless the tensors that the case names are those of the model that it names, as they will be built here."""
    planned = bundle.case.planned
    architecture = load_architecture(planned.model_config)
    check_run(planned.config, architecture)
    if architecture.num_layers != len(planned.unit_tensors) - 2:
        raise InputError("the case's tensors are not those of its model: another number of layers")
    units = architecture.units(planned.config.data.sequence_length, planned.config.trainable)
    if units.units != planned.unit_tensors or units.tied != planned.tied:
        raise InputError("the case's tensors are not those of its model")


def answer(replayer: Replayer, data: bytes, bound: MemoryBound | None = None) -> ReplayAnswer:
    """One request's answer; an exception of any kind is one, too."""
    try:
        request = wire.decode(data, ReplayRequest, limit_bytes=LIMIT_MESSAGE_BYTES, what="a request")
        if bound is not None:
            bound.set(request.budget_bytes, request.device)
        return ReplayAnswer(findings=replayer.replay(request), held=tuple(replayer.held.items()))
    except IotaError as error:
        if error.__cause__ is not None and isinstance(error, MachineFault):
            traceback.print_exception(error.__cause__)
        words = ReplayAnswer(code=error.code, reason=error.reason, hint=error.hint, retryable=error.retryable)
    except (Exception, MemoryError) as error:  # noqa: BLE001 - said to who asked, with its trace on stderr
        traceback.print_exc()
        reason = f"{type(error).__name__}: {error}"
        words = ReplayAnswer(code=MachineFault.code, reason=reason[:2000], hint="see the worker's stderr")
    return msgspec.structs.replace(words, held=tuple(replayer.held.items()))


class MemoryBound:
    """The system refuses this process more memory than it had at first, a budget, and :data:`LIBRARIES_BYTES`.

    Only on a CPU: a driver maps more than it uses. Where the system can't, only the estimate of each case bounds it.
    """

    def __init__(self) -> None:
        self._first_bytes = private_bytes()

    def set(self, budget_bytes: int, device: str) -> None:
        if device != "cpu" or not self._first_bytes:
            return
        limit = self._first_bytes + LIBRARIES_BYTES + budget_bytes
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        bounded = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (bounded if bounded < 1 << 60 else hard, hard))


def private_bytes() -> int:
    """Private writable memory that this process has mapped; 0 where the system doesn't say."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmData:")), 0)


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Until the end of the input."""
    replayer, bound = Replayer(), MemoryBound()
    while len(head := requests.read(wire.FRAME_LENGTH.size)) == wire.FRAME_LENGTH.size:
        (size,) = wire.FRAME_LENGTH.unpack(head)
        if size > LIMIT_MESSAGE_BYTES:
            raise InputError(f"a request of {size} bytes")
        data = requests.read(size)
        if len(data) < size:
            return
        encoded = wire.encode(answer(replayer, data, bound))
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
