"""Miners that cheat: each is the production miner with exactly one behaviour patched, in its own process; ``miner`` knows nothing.

A swarm starts one by ``SwarmOptions(before_miners={3: cheating("wrong_forward", directory)})``. A cheat lies in a share of its
work, drawn item by item from a seed, from a step on; each lie is noted in ``directory`` (time, step, microbatch, stage), so that
a benchmark knows when the first was told. ``slots``: all processes may be given the cheat, and the first so many that come to
serve a stage that suits it are the liars; with more than one they share a stage, know each other and lie in the same steps.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from blake3 import blake3

from iota.entries import Before
from subnet.words import CALIBRATION_STEP

if TYPE_CHECKING:  # a benchmark reads this table without torch
    from miner.context import RunContext

NO_ITEM = -1
"""In place of a microbatch, where the lie is about a whole step."""


class Terms(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a cheating process is told."""

    cheat: str
    directory: str
    """Where lies are noted and roles are claimed; one per swarm."""
    share: float = 1.0
    """Of its items, or of its steps, where it is a step that is lied about."""
    from_step: int = CALIBRATION_STEP
    seed: int = 1
    slots: int = 0
    """0: this process is a liar; else the first so many that suit."""
    honest_while: str = ""
    """``probation``, or ``watched`` (in probation, or an open audit names it)."""
    covers: bool = False
    """As a third party it says what the accused claims, whoever that is."""


class Cheat(msgspec.Struct, frozen=True):
    """One way to cheat. ``install`` is ``module:function``, which patches this process."""

    words: str
    install: str
    stage: str = "any"
    """Which stages it is possible at: ``any``, ``first``, ``last``, ``inner`` (not the last)."""
    slots: int = 1
    """Liars that it takes; 0: all replicas of a stage."""
    caught_by: str = "audit"
    """``audit``, ``check`` (the merge's own checks and its trace), ``root``, ``refusal`` (nothing of it is taken), ``evidence``."""

    @property
    def in_work(self) -> bool:
        """Whether the lie is part of what is sealed unless it is found: of the others nothing can survive."""
        return self.caught_by == "audit"


_WORK, _MERGE, _LINKS = "benchmarks.cheats_work", "benchmarks.cheats_merge", "benchmarks.cheats_links"

CHEATS: dict[str, Cheat] = {
    "wrong_forward": Cheat("computes from another input than it was given", f"{_WORK}:wrong_forward"),
    "wrong_backward": Cheat("goes back from another gradient than it was given", f"{_WORK}:wrong_backward"),
    "zero_gradient": Cheat("adds nothing to the sum, all else is right", f"{_WORK}:zero_gradient"),
    "scaled_gradient": Cheat("adds its gradient times 1.05", f"{_WORK}:scaled_gradient"),
    "stale_weights": Cheat("computes with the weights before the last update", f"{_WORK}:stale_weights"),
    "replayed_output": Cheat("sends the output of another microbatch again", f"{_WORK}:replayed_output"),
    "no_work": Cheat("receipts random bytes, computes and adds nothing", f"{_WORK}:no_work"),
    "false_failure": Cheat("says that items fail which don't", f"{_WORK}:false_failure", caught_by="refusal"),
    "sends_nan": Cheat("sends numbers that are none", f"{_WORK}:sends_nan", caught_by="refusal"),
    "wrong_loss": Cheat("reports another loss", f"{_WORK}:wrong_loss", stage="last"),
    "lying_partial": Cheat("one number of one slice is off by 1, committed consistently", f"{_MERGE}:lying_partial"),
    "lying_fingerprint": Cheat("fingerprints that aren't its sum's", f"{_MERGE}:lying_fingerprint", caught_by="check"),
    "lying_owner": Cheat("publishes sums that aren't those of the slices", f"{_MERGE}:lying_owner", caught_by="check"),
    "colluding_owner": Cheat(
        "owner and contributor: the sum has another slice than was committed, its fingerprint fits",
        f"{_MERGE}:colluding_owner",
        slots=2,
    ),
    "inflated_maxima": Cheat("commits block maxima 8 times too large", f"{_MERGE}:inflated_maxima"),
    "inflated_by_owner": Cheat(
        "publishes block maxima 8 times too large", f"{_MERGE}:inflated_by_owner", caught_by="check"
    ),
    "wrong_root": Cheat("reports another state root than its state has", f"{_MERGE}:wrong_root", caught_by="root"),
    "wrong_update": Cheat("all replicas of a stage update wrongly, and alike", f"{_MERGE}:wrong_update", slots=0),
    "refused_opening": Cheat("shows the auditor nothing", f"{_LINKS}:refused_opening", caught_by="evidence"),
    "equivocating_sender": Cheat(
        "sends other bytes than it receipts", f"{_LINKS}:equivocating_sender", caught_by="check"
    ),
    "flooding_peer": Cheat(
        "works honestly, and floods validator and miners", f"{_LINKS}:flooding_peer", caught_by="refusal"
    ),
    "colluding_witness": Cheat(
        "two that scale their gradients, and clear each other when asked as third party",
        f"{_LINKS}:colluding_witness",
        slots=2,
    ),
    "watched_honesty": Cheat("scales gradients unless in probation or watched", f"{_WORK}:scaled_gradient"),
}

COVER = f"{_LINKS}:cover"


def cheating(cheat: str, directory: Path, **more: Any) -> Before:
    """For ``SwarmOptions.before_miners``: what makes a miner's process cheat. ``more``: of :class:`Terms`."""
    if cheat == "watched_honesty":
        more = {"honest_while": "watched", **more}
    terms = Terms(cheat=cheat, directory=str(directory), **more)
    return Before("benchmarks.cheats:install", msgspec.to_builtins(terms))


def install(**arguments: Any) -> None:
    """Make this process, which is to be a miner, cheat."""
    install_in(Liar(msgspec.convert(arguments, Terms)), Patches())


def install_in(liar: Liar, patches: Patches) -> None:
    from miner.context import RunContext

    patches.after(RunContext, "__post_init__", liar.take_part)
    Before(CHEATS[liar.terms.cheat].install).resolve()(liar, patches)
    if liar.terms.covers:
        Before(COVER).resolve()(liar, patches)


class Patches:
    """Attributes replaced, to be put back by tests."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def put(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replace ``owner.name`` by ``make(what was there)``."""
        original = owner.__dict__[name]
        self._before.append((owner, name, original))
        setattr(owner, name, make(original))

    def after(self, owner: Any, name: str, do: Callable[[Any], None]) -> None:
        """Have ``do(self)`` called after a method."""

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def changed(self: Any, *args: Any, **named: Any) -> Any:
                result = original(self, *args, **named)
                do(self)
                return result

            return changed

        self.put(owner, name, make)

    def undo(self) -> None:
        for owner, name, original in reversed(self._before):
            setattr(owner, name, original)
        self._before.clear()


class Liar:
    """This process's decision to lie, item by item; what is said to whom is the cheat's."""

    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        self.context: RunContext | None = None
        self._cheat = CHEATS[terms.cheat]
        self._directory = Path(terms.directory)
        self._directory.mkdir(parents=True, exist_ok=True)
        self._role: int | None = None
        self._lock = threading.Lock()
        self._noted: set[tuple[int, int, int]] = set()

    def take_part(self, context: RunContext) -> None:
        """A run begins."""
        self.context = context

    @property
    def hotkey(self) -> str:
        return "" if self.context is None else self.context.signer.hotkey

    def lies(self, step: int, microbatch: int, stage: int) -> bool:
        """Whether to lie about this; if so it is noted."""
        context, terms = self.context, self.terms
        if context is None or step < terms.from_step or microbatch >= context.plan.config.num_items:
            return False
        if not self._is_chosen(stage) or self._is_shy() or not self._begun(step):
            return False
        who = "" if terms.slots > 1 else self.hotkey
        digest = blake3(f"{terms.seed}/{who}/{step}/{microbatch}/{stage}".encode()).digest()
        if int.from_bytes(digest[:7], "little") / 2**56 >= terms.share:
            return False
        self._note(step, microbatch, stage)
        return True

    def lies_of_step(self, step: int, *, group: int | None = None, stage: int | None = None) -> bool:
        """Of the stage that is held, about a whole step. ``group``, ``stage``: whose sum or state it is; no lie if another's."""
        held = None if self.context is None else self.context.stage
        if self.context is None or held is None or stage not in (None, held.stage):
            return False
        if group not in (None, self.context.plan.layout.group_of_stage[held.stage]):
            return False
        return self.lies(step, NO_ITEM, held.stage)

    @property
    def is_one(self) -> bool:
        """Whether this process lies at all: without slots each does, else who has taken one."""
        names = [self._directory / f"slot-{number}" for number in range(self.terms.slots)]
        return not names or any(path.exists() and path.read_text() == self.hotkey for path in names)

    def accomplices(self) -> frozenset[str]:
        """Hotkeys that share the secret, once all slots are taken."""
        names = [self._directory / f"slot-{number}" for number in range(self.terms.slots)]
        if not all(path.exists() for path in names):
            return frozenset()
        return frozenset(path.read_text() for path in names) - {self.hotkey}

    def _is_chosen(self, stage: int) -> bool:
        terms = self.terms
        if not self._suits(stage):
            return False
        if not terms.slots:
            return True
        if self._role is None:
            if terms.slots > 1 and once(self._directory / "stage", str(stage)) != str(stage):
                return False
            taken = (once(self._directory / f"slot-{number}", self.hotkey) for number in range(terms.slots))
            if self.hotkey not in taken:
                return False
            self._role = stage
        return self._role == stage

    def _suits(self, stage: int) -> bool:
        if self.context is None:
            return False
        last = self.context.plan.num_stages - 1
        wanted = {"any": True, "first": stage == 0, "last": stage == last, "inner": stage < last}
        return wanted[self._cheat.stage]

    def _begun(self, step: int) -> bool:
        """Several liars begin together, two steps after the last of them has come."""
        if self.terms.slots < 2:
            return True
        path = self._directory / "pact"
        if not path.exists():
            if not self.accomplices():
                return False
            once(path, str(step + 2))
        return step >= int(path.read_text())

    def _is_shy(self) -> bool:
        """Whether it is honest for now, since it fears to be seen."""
        if not self.terms.honest_while or self.context is None:
            return False
        from subnet.run.audits import in_probation

        state = self.context.run_state
        if in_probation(state, self.hotkey):
            return True
        if self.terms.honest_while == "probation":
            return False
        return any(member.hotkey == self.hotkey for audit in state.audits.open.values() for member in audit.members)

    def _note(self, step: int, microbatch: int, stage: int) -> None:
        key = (step, microbatch, stage)
        with self._lock:
            if key in self._noted:
                return
            self._noted.add(key)
            with (self._directory / f"{self.hotkey}.lies").open("a") as file:
                file.write(f"{time.time_ns()} {step} {microbatch} {stage} {int(self._cheat.in_work)}\n")


class Lie(msgspec.Struct, frozen=True):
    """A lie as it was noted."""

    time_ns: int
    step: int
    microbatch: int
    stage: int
    in_work: int = 1


def lies_told(directory: Path) -> dict[str, list[Lie]]:
    """By hotkey, in the order they were told."""
    found: dict[str, list[Lie]] = {}
    for path in sorted(directory.glob("*.lies")):
        rows = [line.split() for line in path.read_text().splitlines()]
        found[path.stem] = [Lie(*(int(field) for field in row)) for row in rows if len(row) == 5]
    return found


def chosen_liars(directory: Path) -> frozenset[str]:
    """Hotkeys that took a slot."""
    return frozenset(path.read_text() for path in directory.glob("slot-*"))


def once(path: Path, text: str) -> str:
    """What the file says, written by whoever came first, whole."""
    if not path.exists():
        own = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
        own.write_text(text)
        try:
            os.link(own, path)
        except FileExistsError:
            pass
        finally:
            own.unlink()
    return path.read_text()
