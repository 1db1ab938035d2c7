"""How simulated members merge: slices to owners, sums into the store, fetched, fingerprinted, checked; bytes and seconds only.

All slices of a group travel at once, so each end is a queue of its own: a contributor's part is over when its uplink has sent
all, an owner's when its downlink has got all. One transfer an end, not one a pair: thousands of replicas stay cheap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from subnet.numerics.owners import foreseen_owners
from subnet.protocol import messages as msg
from subnet.run import events as ev
from subnet.run import state as st
from subnet.simulate import costs as passes
from subnet.simulate import links
from subnet.words import CALIBRATION_STEP, Commitment, Member

if TYPE_CHECKING:
    from iota.simulate_member import SimMember
    from iota.simulate_world import World

KIND = "slices"


class SimMerges:
    """What all members do of merges; told of each effective event once."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._foreseen: dict[tuple[int, int, int], tuple[Member, ...] | None] = {}
        self._seed_s: dict[tuple[int, int, int], float] = {}
        self._stored_s: dict[tuple[int, int, int, Member, int], tuple[float, int]] = {}
        """By (step, group, partition, owner, sums): when the merged partition is in the store, and its size."""

    def notice(self, event: ev.AnyEvent) -> None:
        match event:
            case ev.Frozen():
                self._frozen(event)
            case ev.ReduceOrdered():
                self._ordered(event)
            case ev.PartitionMerged():
                self._merged(event)
            case ev.SeedRevealed():
                self._revealed(event)
            case ev.Fingerprinted():
                self._fingerprinted(event)
            case ev.StageSealed():
                for node in self._nodes(event.group):
                    node.merging = False  # what is left is waiting for other stages
                    node.look()
            case ev.StepSealed():
                self._foreseen.clear()
                self._stored_s.clear()
                self._seed_s.clear()
                self._world.forget_step(event.step)
            case _:
                pass

    def _nodes(self, group: int) -> list[SimMember]:
        """Members of the group that are there, in order."""
        state = self._world.state
        stages = st.group_shape(state, group).stages
        return [node for node in self._world.nodes if node.online and node.stage in stages and self._is_member(node)]

    def _is_member(self, node: SimMember) -> bool:
        return node.member is not None and node.member in self._world.state.members

    def _is_ready(self, node: SimMember) -> bool:
        state = self._world.state
        info = state.members.get(node.member) if node.member is not None else None
        return info is not None and info.version == state.next_step

    # --- sums

    def may_begin(self, node: SimMember) -> None:
        """A sum to which, as things are, nothing more comes is hashed, and its slices go ahead (as miner.owed_ahead)."""
        world, state = self._world, self._world.state
        work = state.work
        if work is None or not work.num_training or work.undealt[node.stage]:
            return
        if any(not lease.done for (step, _), lease in node.leases.items() if step == work.step):
            return
        mine = tuple(sorted(m for (step, m) in node.leases if step == work.step and m < work.num_training))
        if not mine or (work.step, mine) in node.sums:
            return
        group = st.group_of(state, node.stage)
        key = (work.step, group, len(state.members) + 100_000 * state.num_joined)
        if key not in self._foreseen:
            self._foreseen[key] = foreseen_owners(state, group)
        self._send(node, work.step, group, mine, self._foreseen[key] or (), world.now_s)

    def _send(
        self, node: SimMember, step: int, group: int, mine: tuple[int, ...], owners: tuple[Member, ...], now_s: float
    ) -> None:
        world = self._world
        calibration = step == CALIBRATION_STEP
        sizes = world.costs.partition_bytes(world.plan.layout.groups[group], len(mine), calibration=calibration)
        parts = st.partitions_of(world.state, group, node.stage)
        hashed_s = now_s + world.costs.pass_s(node.stage, node.gpu, passes.COMMIT_BYTES)
        if calibration:
            sent_s = links.put(
                world.store_start_s(hashed_s), node.link, world.store, sum(sizes[p] for p in parts), KIND
            )
            begin_s = hashed_s = sent_s
        else:
            size = sum(sizes[p] for p in parts if p >= len(owners) or owners[p] != node.member)
            begin_s, sent_s = node.link.up.bulk(hashed_s, size, KIND)
        node.sums[step, mine] = (hashed_s if calibration else begin_s, sent_s, owners)
        node.said.discard(("commit", step))
        node.hashed_s = hashed_s

    def _frozen(self, event: ev.Frozen) -> None:
        world, work = self._world, self._world.state.work
        if work is None:
            return
        for node in self._nodes(event.group):
            node.merging = True
            node.look()
            self._commit(node, event.step, event.group, event.number, world.now_s + node.link.one_way_s)

    def _commit(self, node: SimMember, step: int, group: int, number: int, when_s: float) -> None:
        state = self._world.state
        assert node.member is not None
        done = st.done_set(state, node.member)
        if not done:
            return
        if (step, done) not in node.sums:
            owners = foreseen_owners(state, group) or ()
            self._send(node, step, group, done, owners, when_s)
        parts = st.partitions_of(state, group, node.stage)
        hashes = tuple((p, f"slice-{node.member.number}-{step}-{number}-{p}") for p in parts)
        claim = msg.CommitClaim(step, group, number, Commitment(node.member, node.stage, done, hashes))
        node.after(max(when_s, node.hashed_s), node.say, claim)

    # --- reducing

    def _ordered(self, event: ev.ReduceOrdered) -> None:
        """Slices reach their owners; each adds what it owns and puts the sums into the store.

        What an owner has been sent under an earlier version of the same sums it has, or is getting; nothing is sent twice.
        """
        world = self._world
        contributors = [world.by_hotkey[entry.member.hotkey] for entry in event.entries]
        if any(node.member != entry.member for node, entry in zip(contributors, event.entries, strict=True)):
            return  # somebody has gone: there will be another version
        lives = [(node, node.life) for node in contributors]
        sums = hash(tuple((entry.member, entry.microbatches) for entry in event.entries))
        fresh = {
            p: owner
            for p, owner in enumerate(event.owners)
            if (event.step, event.group, p, owner, sums) not in self._stored_s
        }
        if fresh:
            self._transfer(event, fresh, sums, contributors)
        for p, owner in enumerate(event.owners):
            stored_s = self._stored_s.get((event.step, event.group, p, owner, sums))
            node = world.by_hotkey[owner.hotkey]
            if stored_s is not None and node.member == owner and node.online:
                when_s = max(stored_s[0], world.now_s + node.link.one_way_s)
                node.after(when_s, self._publish, node, event, p, stored_s[1], lives)

    def _transfer(
        self, event: ev.ReduceOrdered, fresh: dict[int, Member], sums: int, contributors: list[SimMember]
    ) -> None:
        """Reserves the links for partitions that their owners don't have yet."""
        world, entries = self._world, event.entries
        layout = world.plan.layout.groups[event.group]
        calibration = event.step == CALIBRATION_STEP
        by_entry = [
            (entry, world.costs.partition_bytes(layout, len(entry.microbatches), calibration=calibration))
            for entry in entries
        ]
        sent = [self._sent(node, event, entry, fresh) for node, entry in zip(contributors, entries, strict=True)]
        whole = world.costs.partition_bytes(layout, world.plan.config.pipeline.microbatches, calibration=calibration)
        elements = max(1, sum(part.num_elements for part in layout.partitions))
        for owner in sorted(set(fresh.values())):
            node = world.by_hotkey[owner.hotkey]
            if node.member != owner or not node.online:
                continue
            others = [times for times, entry in zip(sent, entries, strict=True) if entry.member != owner]
            first_s = min((begin_s for begin_s, _ in others), default=world.now_s)
            last_s = max((end_s for _, end_s in others), default=world.now_s)
            travel_s = 2 * node.link.one_way_s
            owned = [p for p, other in fresh.items() if other == owner]
            for number, p in enumerate(owned):
                here = sum(sizes[p] for entry, sizes in by_entry if entry.member != owner and _holds(entry, p))
                # contributors send partition by partition, so an owner can add the first while the last is under way
                there_s = first_s + (last_s - first_s) * (number + 1) / len(owned)
                if calibration:
                    got_s = links.get(world.store_start_s(last_s), node.link, world.store, here, KIND)
                else:
                    got_s = node.link.down.bulk(first_s + travel_s, here, KIND)[1]
                ready_s = max(world.now_s + node.link.one_way_s, got_s, there_s + travel_s)
                share = layout.partitions[p].num_elements / elements
                ready_s += world.costs.pass_s(node.stage, node.gpu, passes.REDUCE_BYTES, share) * len(entries)
                stored_s = links.put(world.store_start_s(ready_s), node.link, world.store, whole[p], "merged")
                self._stored_s[event.step, event.group, p, owner, sums] = (stored_s, int(whole[p]) + 1)

    def _sent(
        self, node: SimMember, event: ev.ReduceOrdered, entry: Commitment, fresh: dict[int, Member]
    ) -> tuple[float, float]:
        """From when to when its slices leave; again to owners whom it hasn't foreseen."""
        known = node.sums.get((event.step, entry.microbatches))
        if known is not None and (known[2] == event.owners or event.step == CALIBRATION_STEP):
            return known[0], known[1]
        begin_s = self._world.now_s + node.link.one_way_s
        layout = self._world.plan.layout.groups[event.group]
        sizes = self._world.costs.partition_bytes(layout, len(entry.microbatches), calibration=False)
        ahead = known[2] if known is not None else ()
        size = sum(
            sizes[p]
            for p, owner in fresh.items()
            if owner != node.member and _holds(entry, p) and not (p < len(ahead) and ahead[p] == owner)
        )
        begin_s, sent_s = node.link.up.bulk(begin_s, size, KIND)
        if known is not None:
            begin_s, sent_s = min(begin_s, known[0]), max(sent_s, known[1])
        return begin_s, sent_s

    def _publish(
        self, node: SimMember, event: ev.ReduceOrdered, p: int, size: int, lives: list[tuple[SimMember, int]]
    ) -> None:
        if any(other.life != life for other, life in lives):
            return  # a slice never came
        blob = f"merged-{event.step}-{event.group}-{event.version}-{p}"
        node.say(msg.MergedClaim(event.step, event.group, event.version, p, blob, blob, size, f"{p + 1:x}"))

    def _merged(self, event: ev.PartitionMerged) -> None:
        """Whoever holds the partition fetches it, its owner apart."""
        world = self._world
        merge = st.merge_of(world.state, event.step, event.group)
        if merge is None:
            return
        key = (event.step, event.group, event.version)
        stages = st.group_shape(world.state, event.group).partitions[event.partition]
        for node in self._nodes(event.group):
            if node.stage in stages and self._is_ready(node) and node.member != merge.owners[event.partition]:
                start_s = world.store_start_s(world.now_s + node.link.one_way_s)
                here_s = links.get(start_s, node.link, world.store, event.size_bytes, "merged")
                node.fetched_s[key] = max(node.fetched_s.get(key, 0.0), here_s)
            elif node.stage in stages and self._is_ready(node):
                node.fetched_s.setdefault(key, world.now_s)

    # --- checking

    def _revealed(self, event: ev.SeedRevealed) -> None:
        world = self._world
        merge = st.merge_of(world.state, event.step, event.group)
        if merge is None or merge.version != event.version:
            return
        self._seed_s[event.step, event.group, event.version] = world.now_s
        for entry in merge.entries:
            node = world.by_hotkey[entry.member.hotkey]
            if node.member == entry.member and node.online:
                self._fingerprint(node, event.step, event.group, event.version)

    def _fingerprint(self, node: SimMember, step: int, group: int, version: int) -> None:
        merge = st.merge_of(self._world.state, step, group)
        if merge is None or ("fingerprint", step, group, version) in node.said:
            return
        entry = next((entry for entry in merge.entries if entry.member == node.member), None)
        if entry is None:
            return
        node.said.add(("fingerprint", step, group, version))
        values = tuple((p, (1,)) for p, _ in entry.hashes)
        took_s = self._world.costs.pass_s(node.stage, node.gpu, passes.FINGERPRINT_BYTES)
        claim = msg.FingerprintClaim(step, group, version, entry.stage, values)
        node.after(self._world.now_s + node.link.one_way_s + took_s, node.say, claim)

    def _fingerprinted(self, event: ev.Fingerprinted) -> None:
        merge = st.merge_of(self._world.state, event.step, event.group)
        if merge is None or merge.version != event.version or len(merge.fingerprints) < len(merge.entries):
            return
        for node in self._nodes(event.group):
            if self._is_ready(node):
                self._check(node, event.step, event.group, event.version)

    def _check(self, node: SimMember, step: int, group: int, version: int) -> None:
        key = (step, group, version)
        if ("check", *key) in node.said:
            return
        node.said.add(("check", *key))
        world = self._world
        seed_s = self._seed_s.get(key, world.now_s) + node.link.one_way_s
        if key not in node.fetched_s:  # it came while this was under way
            merge = st.merge_of(world.state, step, group)
            size = sum(part.size_bytes for part in merge.merged.values()) if merge is not None else 0
            node.fetched_s[key] = links.get(world.store_start_s(), node.link, world.store, size, "merged")
        examined_s = max(seed_s, node.fetched_s[key]) + world.costs.pass_s(
            node.stage, node.gpu, passes.FINGERPRINT_BYTES
        )
        when_s = max(world.now_s + node.link.one_way_s, examined_s)
        node.after(when_s, node.say, msg.CheckClaim(step, group, version, ok=True))

    # --- whatever was missed

    def ensure(self, node: SimMember) -> None:
        """A member that was away, or came late, does what the open merge still lacks of it."""
        state, work = self._world.state, self._world.state.work
        if work is None or not work.num_training or node.member is None or not self._is_ready(node):
            return
        group = st.group_of(state, node.stage)
        merge = work.merges[group]
        if merge.phase == st.FROZEN and node.member not in merge.commitments:
            said = ("commit", work.step, merge.number)
            if said not in node.said and not any(isinstance(claim, msg.CommitClaim) for claim in node.pending):
                node.said.add(said)
                self._commit(node, work.step, group, merge.number, self._world.now_s)
        elif merge.phase == st.REVEALED:
            self._fingerprint(node, work.step, group, merge.version)
            if len(merge.fingerprints) == len(merge.entries):
                self._check(node, work.step, group, merge.version)

    def owes(self, node: SimMember, claim: msg.AnyClaim) -> bool:
        """Whether a claim about a merge is still to be said."""
        assert isinstance(claim, msg.CommitClaim | msg.MergedClaim | msg.FingerprintClaim | msg.CheckClaim)
        merge = st.merge_of(self._world.state, claim.step, claim.group)
        if merge is None or node.member is None:
            return False
        match claim:
            case msg.CommitClaim():
                return (
                    merge.phase == st.FROZEN and claim.number == merge.number and node.member not in merge.commitments
                )
            case msg.MergedClaim():
                current = merge.phase == st.REDUCING and claim.version == merge.version
                return current and claim.partition not in merge.merged
            case msg.FingerprintClaim():
                current = merge.phase == st.REVEALED and claim.version == merge.version
                return current and node.member not in merge.fingerprints
            case msg.CheckClaim():
                current = merge.phase == st.REVEALED and claim.version == merge.version
                return current and node.member not in merge.checks


def _holds(entry: Commitment, partition: int) -> bool:
    return any(p == partition for p, _ in entry.hashes)
