"""Replicas of logs over a network that loses, repeats and reorders, with writers that restart, with and without memory.

Safety, in every state (the writers' histories are kept by the test):
- every entry held is, byte for byte, one that its writer wrote in that epoch;
- a replica lists what its writer listed at this length, but for anchors of which the writer has said more since: no gaps,
  and nothing deleted comes back;
- (epoch, floor, length) never goes back;
- a replica as long as its writer has the writer's set digest.
Liveness: when the network is quiet and exchanges go on, everybody has what the writers have.
"""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from protocol_harness import MODEL, meta, record

from kvcomm_p2p.protocol import messages as m
from kvcomm_p2p.protocol.gossip import Replicas
from kvcomm_p2p.protocol.ids import AnchorId, NodeId

NODES = 3
WRITERS = 2
TOMBSTONE_S = 4.0
LIMITS: dict[str, Any] = {"anchors_per_peer_max": 1000, "anchors_max": 10_000}

Listed = dict[AnchorId, int]


class GossipMachine(RuleBasedStateMachine):
    """Nodes 0 .. WRITERS-1 write; all replicate. `history` has, by writer and epoch, what was written and what was listed
    at each length."""

    @initialize()
    def begin(self) -> None:
        self.now = 0.0
        self.epochs = [1] * NODES
        self.nodes = [self.fresh(index) for index in range(NODES)]
        self.ids = [record(index).node_id for index in range(NODES)]
        self.under_way: list[tuple[int, m.OriginDelta]] = []
        self.history: dict[tuple[NodeId, int], dict[int, bytes]] = {}
        self.listed: dict[tuple[NodeId, int], dict[int, Listed]] = {}
        self.seen: dict[tuple[int, NodeId], tuple[int, int, int]] = {}

    def fresh(self, index: int) -> Replicas:
        return Replicas(record(index).node_id, self.epochs[index], MODEL, **LIMITS)

    def note(self, index: int) -> None:
        """Remember what the writer has just written."""
        own = self.nodes[index].own
        key = (self.ids[index], own.epoch)
        entries = own.after(0)
        for entry in entries:
            assert self.history.setdefault(key, {}).setdefault(entry.seq, entry.raw) == entry.raw
        self.listed.setdefault(key, {})[own.max_seq] = {e.anchor_id: e.seq for e in entries if e.meta is not None}

    @rule(index=st.integers(0, WRITERS - 1), label=st.integers(0, 4))
    def put(self, index: int, label: int) -> None:
        self.nodes[index].own.put(meta((index, label)))
        self.note(index)

    @rule(index=st.integers(0, WRITERS - 1), label=st.integers(0, 4))
    def delete(self, index: int, label: int) -> None:
        self.nodes[index].own.delete(meta((index, label)).anchor_id, self.now)
        self.note(index)

    @rule(source=st.integers(0, NODES - 1), reader=st.integers(0, NODES - 1), room=st.sampled_from([500, 700, 10**6]))
    def send(self, source: int, reader: int, room: int) -> None:
        """Everything that the reader lacks by its own words goes on its way."""
        if source != reader:
            self.under_way += [(reader, delta) for delta in self.news(source, reader, room)]

    def news(self, source: int, reader: int, room: int = 10**6) -> list[m.OriginDelta]:
        deltas = []
        for index, origin in enumerate(self.ids):
            log = self.nodes[source].log(origin)
            if index == reader or log is None:
                continue
            cut = self.nodes[source].cut(origin, self.nodes[reader].have(origin, log.epoch), room, None, 0)
            deltas += [] if cut is None else [cut.delta]
            self.nodes[reader].learn_floor(m.DigestEntry(origin, log.epoch, 0, log.max_seq, log.gc_floor))
        return deltas

    @rule(choice=st.integers(0, 50), again=st.booleans())
    def arrive(self, choice: int, again: bool) -> None:
        """Any message, not only the oldest; it may come again later."""
        if self.under_way:
            reader, delta = self.under_way[choice % len(self.under_way)]
            self.nodes[reader].apply(delta, MODEL)
            if not again:
                self.under_way.remove((reader, delta))

    @rule(choice=st.integers(0, 50))
    def lose(self, choice: int) -> None:
        if self.under_way:
            del self.under_way[choice % len(self.under_way)]

    @rule(seconds=st.sampled_from([0.5, 2.0, 5.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        for index in range(WRITERS):
            self.nodes[index].collect(self.now, TOMBSTONE_S)

    @rule(index=st.integers(0, WRITERS - 1), keeps=st.booleans())
    def restart(self, index: int, keeps: bool) -> None:
        """A writer comes back in a higher epoch, with or without its anchors, and without memory of others."""
        listed = [entry.meta for entry in self.nodes[index].own.after(0) if entry.meta is not None]
        self.epochs[index] += 1
        self.nodes[index] = self.fresh(index)
        self.seen = {key: value for key, value in self.seen.items() if key[0] != index}
        for anchor in listed if keeps else ():
            self.nodes[index].own.put(anchor)
            self.note(index)

    @rule(index=st.integers(0, WRITERS - 1))
    def renew(self, index: int) -> None:
        """A writer whose disk went back in time learns so from others, and goes on in an epoch that nobody knows."""
        self.epochs[index] += 1
        self.nodes[index].renew(self.epochs[index], MODEL)
        self.note(index)
        written = self.nodes[index].own.after(0)  # all in one go: a reader may have the first of it
        steps = self.listed[self.ids[index], self.epochs[index]]
        for count, entry in enumerate(written):
            steps[entry.seq] = {earlier.anchor_id: earlier.seq for earlier in written[: count + 1]}

    @invariant()
    def is_safe(self) -> None:
        for index, replicas in enumerate(self.nodes):
            for origin in self.ids:
                log = replicas.log(origin)
                if log is None or origin == self.ids[index]:
                    continue
                written = self.history.get((origin, log.epoch), {})
                listed: Listed = {}
                for entry in log.after(0):
                    assert entry.raw == written[entry.seq], "not what the writer wrote"
                    if entry.meta is not None:
                        listed[entry.anchor_id] = entry.seq
                self.has_no_gaps(origin, log.epoch, log.max_seq, listed)
                position = (log.epoch, log.gc_floor, log.max_seq)
                assert position >= self.seen.get((index, origin), position), "went back"
                self.seen[index, origin] = position
                own = self.nodes[self.ids.index(origin)].own
                if (own.epoch, own.max_seq) == (log.epoch, log.max_seq):
                    assert log.whole and log.set_digest == own.set_digest

    def has_no_gaps(self, origin: NodeId, epoch: int, length: int, listed: Listed) -> None:
        history = self.listed.get((origin, epoch), {})
        if not history:
            assert not listed
            return
        at = max((known for known in history if known <= length), default=0)
        true = history.get(at, {})
        replaced = {m.unpack_entry(raw).anchor_id for seq, raw in self.history[origin, epoch].items() if seq > length}
        for anchor_id, seq in listed.items():
            assert true.get(anchor_id) == seq or anchor_id in replaced, "lists what was deleted"
        for anchor_id, seq in true.items():
            assert listed.get(anchor_id) == seq or anchor_id in replaced, "lacks what is listed"

    def teardown(self) -> None:
        if not hasattr(self, "nodes"):
            return
        self.under_way.clear()
        for _ in range(4):
            for source in range(NODES):
                for reader in range(NODES):
                    if source != reader:
                        for delta in self.news(source, reader):
                            self.nodes[reader].apply(delta, MODEL)
        self.is_safe()
        for index in range(WRITERS):
            own = self.nodes[index].own
            for replicas in self.nodes:
                log = replicas.log(self.ids[index])
                assert log is not None or not own.max_seq
                if log is not None and own.max_seq:
                    assert (log.epoch, log.max_seq, log.gc_floor) == (own.epoch, own.max_seq, own.gc_floor)
                    assert log.set_digest == own.set_digest and log.anchor_ids() == own.anchor_ids()
        assert all(replicas.diverged == 0 and replicas.refused == 0 for replicas in self.nodes)


TestGossip = GossipMachine.TestCase
TestGossip.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
