"""Logs: convergence under bad networks, no gaps, no resurrection, bounded deltas."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st
from protocol_harness import MODEL, Network, joined, log_news, meta, record

from kvcomm_p2p.protocol import events as ev
from kvcomm_p2p.protocol import messages as m
from kvcomm_p2p.protocol import wire
from kvcomm_p2p.protocol.anchors import MissReason
from kvcomm_p2p.protocol.config import NodeConfig
from kvcomm_p2p.protocol.gossip import Have, Replicas, Verdict
from kvcomm_p2p.protocol.ids import AnchorId, NodeId
from kvcomm_p2p.protocol.lookup import Lookup
from kvcomm_p2p.protocol.origin_log import OriginLog

LIMITS: dict[str, Any] = {"anchors_per_peer_max": 1000, "anchors_max": 10_000}


def replicas(index: int) -> Replicas:
    return Replicas(record(index).node_id, 1, MODEL, **LIMITS)


def live(log: OriginLog) -> set[AnchorId]:
    return {entry.anchor_id for entry in log.after(0) if entry.meta is not None}


def known_ids(network: Network, node_id: NodeId, origin: NodeId) -> set[AnchorId]:
    log = network.nodes[node_id]._community.replicas.log(origin)
    return set() if log is None else live(log)


def bad_network(seed: int) -> Any:
    rng = random.Random(seed)

    def fault(source: NodeId, target: NodeId, message: object) -> list[float]:
        if rng.random() < 0.2:
            return []
        return [rng.uniform(0.001, 0.4) for _ in range(2 if rng.random() < 0.1 else 1)]

    return fault


def test_sixteen_nodes_converge_over_a_network_that_loses_repeats_and_reorders() -> None:
    network, ids = joined(16)
    network.fault = bad_network(3)
    published: dict[NodeId, list[Any]] = {node_id: [] for node_id in ids}
    rng = random.Random(5)
    for step in range(40):
        node_id = rng.choice(ids)
        anchor = meta(("step", step))
        network.publish(node_id, anchor)
        published[node_id].append(anchor.anchor_id)
        if step % 5 == 4:
            network.handle(node_id, ev.AnchorsForgotten((published[node_id].pop(0),)))
        network.run(0.1)

    def same() -> bool:
        return all(known_ids(network, a, b) == set(published[b]) for a in ids for b in ids)

    network.run(30.0, until=same)
    assert same()


def test_news_reach_a_small_cluster_at_once() -> None:
    network, ids = joined(4)
    published_at = network.now
    anchor = meta("doc")
    network.publish(ids[0], anchor)
    network.run(5.0, until=lambda: all(anchor.anchor_id in known_ids(network, key, ids[0]) for key in ids))
    assert network.now - published_at < 0.05


def test_eviction_is_announced() -> None:
    config = NodeConfig(pool_anchors_max=1)
    network, ids = joined(2, config=config)
    first, second = meta("first"), meta("second")
    network.publish(ids[0], first)
    network.run(1.0)
    network.publish(ids[0], second)
    network.run(1.0)
    assert known_ids(network, ids[1], ids[0]) == {second.anchor_id}


def test_who_was_away_longer_than_tombstones_gets_a_snapshot() -> None:
    config = NodeConfig(tombstone_s=4.0)
    network, ids = joined(2, config=config)
    gone, kept = meta("gone"), meta("kept")
    network.publish(ids[0], gone, kept)
    network.run(2.0)
    assert known_ids(network, ids[1], ids[0]) == {gone.anchor_id, kept.anchor_id}
    network.fault = lambda source, target, message: []
    network.handle(ids[0], ev.AnchorsForgotten((gone.anchor_id,)))
    network.run(10.0)
    log = network.nodes[ids[0]]._community.replicas.own
    assert log.gc_floor == 3 and len(log) == 1
    network.fault = lambda source, target, message: [0.001]
    network.run(60.0, until=lambda: known_ids(network, ids[1], ids[0]) == {kept.anchor_id})
    assert known_ids(network, ids[1], ids[0]) == {kept.anchor_id}
    lookup = Lookup(MODEL, (gone.chain_end,), np.empty(0, np.uint32))
    assert network.nodes[ids[1]].find(lookup).miss is MissReason.NOT_FOUND


def have(reader: Replicas, origin: NodeId) -> Have:
    return reader.have(origin, 1)


def cut(source: Replicas, origin: NodeId, theirs: Have | None, bytes_max: int = 10**6) -> m.OriginDelta | None:
    found = source.cut(origin, theirs, bytes_max, record(0) if theirs is None else None, 1)
    return None if found is None else found.delta


def test_a_gap_is_never_skipped() -> None:
    writer, reader = replicas(0), replicas(1)
    for count in range(6):
        writer.own.put(meta(count))
    member = record(0)
    later = cut(writer, writer.me, Have(1, 3))
    assert later is not None
    assert reader.apply(later, MODEL) == (Verdict.GAP, None) and reader.log(member.node_id) is None
    raws = tuple(entry.raw for entry in writer.own.after(0)[:2])
    first = m.OriginDelta(member.node_id, 1, False, 0, 2, 0, raws, log_seq=6)
    assert reader.apply(first, MODEL)[0] is Verdict.APPLIED
    assert reader.apply(later, MODEL) == (Verdict.GAP, None)
    log = reader.log(member.node_id)
    assert log is not None and log.max_seq == 2 and not log.whole


@given(st.integers(600, 6000), st.integers(1, 60))
@settings(deadline=None, max_examples=40)
def test_deltas_keep_to_their_bytes_and_still_bring_everything(bytes_max: int, anchors: int) -> None:
    writer, reader = replicas(0), replicas(1)
    for count in range(anchors):
        writer.own.put(meta(count))
    for _ in range(200):
        delta = cut(writer, writer.me, have(reader, writer.me), bytes_max)
        if delta is None or delta.to_seq == have(reader, writer.me).max_seq:
            break
        assert len(wire.pack(delta)) <= bytes_max
        assert reader.apply(delta, MODEL)[0] is Verdict.APPLIED
    log = reader.log(record(0).node_id)
    assert log is not None and live(log) == live(writer.own) and log.max_seq == anchors and log.whole
    assert log.set_digest == writer.own.set_digest


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.sampled_from(["put", "del", "sync", "relay", "collect", "lose"])), max_size=120
    )
)
@example([(0, "put"), (0, "sync"), (0, "del"), (0, "wait"), (0, "wait"), (0, "collect")])
@example([(0, "put"), (0, "del"), (0, "wait"), (0, "wait"), (0, "collect")])
@settings(deadline=None, max_examples=150)
def test_replicas_never_believe_what_the_writer_did_not_say(steps: list[tuple[int, str]]) -> None:
    """Whatever is lost, late or relayed: a replica equals the writer's state at its `max_seq`, once it is caught up the
    writer's state, and it never goes back."""
    writer, near, far = replicas(0), replicas(1), replicas(2)
    me = writer.me
    now = 0.0
    late: list[m.OriginDelta] = []

    def exchange(source: Replicas, target: Replicas) -> None:
        theirs = have(target, me)
        delta = cut(source, me, theirs, 700)
        if delta is not None:
            late.append(delta)
            target.apply(delta, MODEL)
        mine = have(source, me)
        target.learn_floor(m.DigestEntry(me, 1, 1, mine.max_seq, mine.gc_floor))

    for label, action in steps:
        now += 1.0
        anchor = meta(label)
        if action == "put":
            writer.own.put(anchor)
        elif action == "del":
            writer.own.delete(anchor.anchor_id, now)
        elif action in ("sync", "relay"):
            exchange(*((writer, near) if action == "sync" else (near, far)))
        elif action == "collect":
            writer.own.collect(now, 3.0)
        elif late:
            far.apply(late[label % len(late)], MODEL)
    for _ in range(60):
        exchange(writer, near)
        exchange(near, far)
    for replica in (near, far):
        log = replica.log(record(0).node_id)
        # A log without entries is false, so ask for None: it still has to know how far the writer got.
        log = OriginLog(1) if log is None else log
        assert live(log) == live(writer.own)
        assert log.max_seq == writer.own.max_seq


def test_late_snapshot_does_not_throw_newer_entries_away() -> None:
    reader = replicas(1)
    member = record(0)
    puts = [m.Put.of(seq, meta(seq)) for seq in (5, 6)]
    assert reader.apply(log_news(member, 6, puts, reset=True, gc_floor=4), MODEL)[0] is Verdict.APPLIED
    assert reader.apply(log_news(member, 5, puts[:1], reset=True, gc_floor=4), MODEL) == (Verdict.KNOWN, None)
    log = reader.log(member.node_id)
    assert log is not None and log.max_seq == 6


def test_a_delta_that_leaves_out_deletions_we_never_saw_is_not_applied() -> None:
    reader = replicas(1)
    member = record(0)
    puts = [m.Put.of(seq, meta(seq)) for seq in (1, 2, 3)]
    reader.apply(log_news(member, 3, puts), MODEL)
    late = log_news(member, 6, [m.Put.of(6, meta(6))], from_seq=2, gc_floor=5)
    assert reader.apply(late, MODEL) == (Verdict.GAP, None)
    log = reader.log(member.node_id)
    assert log is not None and log.max_seq == 3
