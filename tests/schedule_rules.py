"""Each rule of the protocol, and how to remove it: named small functions of the production code, replaced in a test.

``RULES[name](patch, sim)`` removes the rule; ``patch`` is pytest's monkeypatch, or anything with its ``setattr``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import schedule_toy as toy

from miner import owed, owed_merges
from subnet.run import state, work
from subnet.words import Member
from validator import decide_leases, decide_members, decide_merges, intake, journal_core, lost_boundaries

Remove = Callable[[Any, Any], None]


def always(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


def segread(patch: Any, sim: Any) -> None:
    """A leader whose acknowledgement was lost never learns that its segment is in."""
    patch.setattr(journal_core, "counts_as_acknowledged", always(False))


def nonce(patch: Any, sim: Any) -> None:
    """Two leaders of one term write the same first segment, and both lead."""
    real = journal_core.term_started
    patch.setattr(journal_core, "term_started", lambda term, hotkey, nonce: real(term, hotkey, ""))


def effective(patch: Any, sim: Any) -> None:
    """Seals leave the coordinator before the log store has them; a takeover takes them back."""
    patch.setattr(journal_core.JournalCore, "effective_end", property(lambda core: core.length))


def cursor(patch: Any, sim: Any) -> None:
    """A member keeps what an older term said behind the point where the journals part."""
    patch.setattr(journal_core.JournalCore, "resume", lambda core, at: None if at.term > core.term else at.number)


def headrule(patch: Any, sim: Any) -> None:
    """A validator that doesn't start a new term because somebody has seen unacknowledged records never starts."""
    sim.leads_on_acknowledged = False


def incterm(patch: Any, sim: Any) -> None:
    """The next term gives an incarnation again that a lost journal had given."""
    patch.setattr(intake, "next_member", lambda st, hotkey: Member(hotkey, 0, st.num_joined + 1))
    patch.setattr(owed_merges, "sum_is", always(True))


def boot(patch: Any, sim: Any) -> None:
    """A late hello of a process joins it again, and ends the incarnation that works."""
    patch.setattr(intake, "boot_seen", always(False))


def backoff(patch: Any, sim: Any) -> None:
    """A member that never answers is dealt the same work for ever."""
    patch.setattr(decide_members, "is_second_silence", always(False))
    patch.setattr(intake, "back_off_left", always(0.0))


def replay(patch: Any, sim: Any) -> None:
    """A lost boundary whose producer is done is never made again."""
    patch.setattr(intake, "replay_allowed", always(False))
    patch.setattr(lost_boundaries, "replay_allowed", always(False))


def skipseal(patch: Any, sim: Any) -> None:
    """A sum is sealed with a microbatch that another stage can't do."""
    patch.setattr(decide_merges, "every_item_settled", always(True))


def skipvoid(patch: Any, sim: Any) -> None:
    """A skipped microbatch stays in the sums that have it; members that compare their sum with the fold are silent."""
    patch.setattr(work, "void_skipped", always(None))
    patch.setattr(owed_merges, "sum_is", always(True))


def skiplone(patch: Any, sim: Any) -> None:
    """Where one replica is left, nobody confirms that an item fails."""
    patch.setattr(decide_leases, "lone_replica_failure", always(None))


def remember(patch: Any, sim: Any) -> None:
    """A member adds under a lease that it has handed back; and commits to what the fold shows, whatever it has."""

    def may_add(state: Any, me: Any, local: Any, owe: Any) -> bool:
        return owe.generation is not None and (owe.step, owe.microbatch, owe.epoch) not in local.added

    patch.setattr(owed, "may_add", may_add)
    patch.setattr(owed, "stays_refused", always(False))
    patch.setattr(owed_merges, "sum_is", always(True))


def epoch(patch: Any, sim: Any) -> None:
    """What was added before a void is still in the sum after it."""
    patch.setattr(state, "epoch", always(0))


def commitset(patch: Any, sim: Any) -> None:
    """A late commitment, to another set of microbatches, gets into the manifest."""
    patch.setattr(intake, "commits_done_set", always(True))


def have(patch: Any, sim: Any) -> None:
    """A partition counts as merged that the store doesn't have."""
    patch.setattr(intake, "blobs_to_confirm", always(()))


def ver(patch: Any, sim: Any) -> None:
    """What was said of an earlier manifest counts for this one."""
    patch.setattr(intake, "is_current", always(True))


def via(patch: Any, sim: Any) -> None:
    """Who withholds a slice can't be told from who doesn't merge."""
    patch.setattr(decide_merges, "routes_through_store", always(False))


def seedver(patch: Any, sim: Any) -> None:
    """A seed that was revealed once is known to whoever merges the next version."""
    patch.setattr(decide_merges, "fresh_seed", lambda rng, step, group: f"{toy.h('seed', sim.seed, step, group):x}")


def checkall(patch: Any, sim: Any) -> None:
    """One replica's word, a liar's, is enough to seal."""
    patch.setattr(decide_merges, "must_check", always([]))


def ack(patch: Any, sim: Any) -> None:
    """A claim is said once; the message is lost."""
    sim.repeats = False


RULES: dict[str, Remove] = {
    rule.__name__: rule
    for rule in (
        segread,
        nonce,
        effective,
        cursor,
        headrule,
        incterm,
        boot,
        backoff,
        replay,
        skipseal,
        skipvoid,
        skiplone,
        remember,
        epoch,
        commitset,
        have,
        ver,
        via,
        seedver,
        checkall,
        ack,
    )
}


# --- rules that cost, but don't break, when they are removed: what else goes up says by how much ------------------


def clock(patch: Any, sim: Any) -> None:
    """Members are late for their neighbours."""
    patch.setattr(decide_leases, "clock_runs", always(True))


COSTS: dict[str, tuple[Remove, str, str]] = {
    "clock": (clock, "Revoking", "calm"),
}
"""By rule: how to remove it, the event there are more of then, and the profile that shows it."""


def hunt(rule: str, profile: str, lie: str, seeds: Iterable[int]) -> tuple[int, str] | None:
    """The first schedule that fails without the rule."""
    import pytest
    from schedule_sim import Sim

    for seed in seeds:
        with pytest.MonkeyPatch.context() as patch:
            sim = Sim(seed, profile=profile, lie=lie, checks_all=False, ahead=False)
            RULES[rule](patch, sim)
            try:
                sim.run()
            except Exception as error:  # noqa: BLE001  any failure will do
                return seed, f"{type(error).__name__}: {error}"
    return None


if __name__ == "__main__":
    from test_protocol_schedules import FOUND

    for name, (profile, lie, _) in FOUND.items():
        print(f'    "{name}": ("{profile}", "{lie}", {hunt(name, profile, lie, range(400))})', flush=True)
