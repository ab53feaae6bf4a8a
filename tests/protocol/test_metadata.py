"""What gossip costs and how fast it is; what a node makes of wrong logs, broken promises and signatures."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from protocol_harness import MODEL, Network, held, joined, log_news, make_node, meta, record

from kvcomm_p2p.protocol import events as ev
from kvcomm_p2p.protocol import messages as m
from kvcomm_p2p.protocol import wire
from kvcomm_p2p.protocol.anchors import AnchorMeta, Miss, MissReason
from kvcomm_p2p.protocol.announcer import ANNOUNCE_DELAY_S, WRITES_BURST, WRITES_PER_S, Announcer
from kvcomm_p2p.protocol.budget import Budget
from kvcomm_p2p.protocol.config import NodeConfig
from kvcomm_p2p.protocol.ids import NodeId
from kvcomm_p2p.protocol.lookup import Lookup
from kvcomm_p2p.protocol.node import Node
from kvcomm_p2p.protocol.origin_log import OwnLog
from kvcomm_p2p.protocol.pool import PoolChange

FRIEND = record(1)
SIGNER = record(1, public_key=b"p" * 32)


def hello(member: m.MemberRecord) -> ev.MessageReceived:
    return ev.MessageReceived(member.node_id, m.Hello(m.PROTOCOL_VERSION, m.PROTOCOL_VERSION, bytes(16), member))


def puts_known(network: Network, node_id: NodeId, origin: NodeId) -> int:
    log = network.nodes[node_id]._community.replicas.log(origin)
    return 0 if log is None else log.puts


def identical(network: Network, ids: list[NodeId]) -> bool:
    return all(network.nodes[a].known_of(b) == network.nodes[b].known_of(b) for a in ids for b in ids)


def record_messages(network: Network) -> list[tuple[NodeId, NodeId, Any]]:
    """Messages from now on, as they are sent."""
    seen: list[tuple[NodeId, NodeId, Any]] = []
    inner = network.fault

    def fault(source: NodeId, target: NodeId, message: Any) -> list[float]:
        seen.append((source, target, message))
        return inner(source, target, message)

    network.fault = fault
    return seen


# ------------------------------------------------------------------------------------------------------ cost and speed


def test_an_idle_cluster_exchanges_nothing_but_two_hashes() -> None:
    network, _ = joined(16)
    network.run(5.0)
    seen = record_messages(network)
    network.frames_bytes = 0
    network.run(10.0)
    gossip = [message for _, _, message in seen if isinstance(message, m.SynAck | m.Ack | m.Want | m.Buckets | m.Dense)]
    assert gossip == []
    syns = [message for _, _, message in seen if isinstance(message, m.Syn)]
    assert len(syns) > 16 * 10 / 0.25 and len(wire.pack(syns[0])) <= 24
    assert network.frames_bytes / 10.0 / 16 < 500, "bytes per node and second, probes included"


def test_a_quiet_exchange_does_not_look_at_every_log(monkeypatch: pytest.MonkeyPatch) -> None:
    network, ids = joined(8)
    network.run(5.0)
    node = network.nodes[ids[0]]
    exchange = node._community.exchange
    quiet = exchange.quiet

    def never(*args: Any) -> None:
        raise AssertionError("looked at a log")

    for name in ("have", "lacks", "cut", "_touch"):
        monkeypatch.setattr(exchange._replicas, name, never)
    peer = node._members.alive()[0]
    syn = exchange.begin(peer, network.now).message
    assert exchange.syn(peer.node_id, syn, network.now) == [] and exchange.quiet == quiet + 1


@pytest.mark.parametrize("count", [16, 120])
def test_one_change_among_many_logs_costs_few_bytes(count: int) -> None:
    """Past DENSE_MEMBERS_MAX members by way of buckets."""
    nodes = [make_node(0), make_node(1)]
    members = [record(index) for index in range(2, count)]
    for index, node in enumerate(nodes):
        for member in [*members, nodes[1 - index].me]:
            node.handle(hello(member), 0.0)
        for member in members:
            news = log_news(member, 1, [m.Put.of(1, meta(member.name))])
            node.handle(ev.MessageReceived(member.node_id, m.Ack((news,))), 0.1)
    changed = log_news(members[0], 2, [m.Put.of(2, meta("new"))], from_seq=1)
    nodes[0].handle(ev.MessageReceived(members[0].node_id, m.Ack((changed,))), 0.2)
    exchange = nodes[1]._community.exchange
    peer = nodes[1]._members.get(nodes[0].me.node_id)
    assert peer is not None
    under_way: list[tuple[int, m.Message]] = [(0, exchange.begin(peer, 0.3).message)]
    bytes_sent, kinds = 0, []
    while under_way:
        reader, message = under_way.pop(0)
        bytes_sent += len(wire.pack(message))
        kinds.append(type(message))
        event = ev.MessageReceived(nodes[1 - reader].me.node_id, message)
        effects = nodes[reader].handle(event, 0.3)
        under_way += [(1 - reader, e.message) for e in effects if isinstance(e, ev.SendMessage)]
    assert nodes[1].known_of(members[0].node_id) == nodes[0].known_of(members[0].node_id)
    assert (m.Buckets in kinds) is (count > 96)
    assert bytes_sent < 800, kinds


def test_one_update_is_known_to_sixteen_nodes_within_a_second() -> None:
    network, ids = joined(16)
    rng = random.Random(1)
    times = []
    for step in range(40):
        network.run(rng.uniform(0.2, 0.6))
        origin, anchor = rng.choice(ids), meta(("update", step))
        began = network.now
        network.publish(origin, anchor)
        for _ in range(200):
            network.run(0.005)
            if all(network.nodes[key].knows(origin, anchor.anchor_id) for key in ids):
                break
        times.append(network.now - began)
    times.sort()
    assert times[len(times) // 2] < 0.2 and times[-1] < 1.0


def test_a_partition_of_a_minute_heals_to_identical_directories_within_five_seconds() -> None:
    network, ids = joined(16)
    left = set(ids[:8])
    network.fault = lambda source, target, message: [0.001] if (source in left) == (target in left) else []
    anchors: list[tuple[NodeId, AnchorMeta]] = []
    for step in range(60):  # seconds
        node_id = ids[step % 16]
        anchors.append((node_id, meta(("split", step))))
        network.publish(node_id, anchors[-1][1])
        if step % 4 == 3:
            owner, gone = anchors.pop(0)
            network.handle(owner, ev.AnchorsForgotten((gone.anchor_id,)))
        network.run(1.0)
    network.fault = lambda source, target, message: [0.001]
    healed_at = network.now

    def whole() -> bool:
        return identical(network, ids) and all(node.stats().peers_alive == 15 for node in network.nodes.values())

    network.run(30.0, until=whole)
    assert whole() and network.now - healed_at < 5.0
    assert {anchor.anchor_id for _, anchor in anchors} == {a for key in ids for a in network.nodes[key].known_of(key)}


def test_a_newcomer_asks_each_writer_for_its_log_and_little_comes_twice() -> None:
    network, ids = joined(8)
    for index, node_id in enumerate(ids):
        network.publish(node_id, *(meta((index, count)) for count in range(150)))
    network.run(20.0, until=lambda: identical(network, ids))
    newcomer = network.add(50)
    seen = record_messages(network)
    began = network.now
    network.join(newcomer, ids[0])
    network.run(5.0, until=lambda: all(puts_known(network, newcomer, key) == 150 for key in ids))
    assert network.now - began < 0.5
    to_it = [
        (source, delta)
        for source, target, message in seen
        if target == newcomer and isinstance(message, m.Ack)
        for delta in message.deltas
    ]
    sent = [raw for _, delta in to_it for raw in delta.entries]
    assert len(sent) <= 1.35 * 8 * 150
    assert len({source for source, delta in to_it if delta.entries}) >= 7


def test_a_cut_answer_is_continued_at_once() -> None:
    config = NodeConfig(delta_bytes_max=8192)
    network, ids = joined(2, config=config)
    network.publish(ids[0], *(meta(count) for count in range(400)))
    began = network.now
    network.run(5.0, until=lambda: puts_known(network, ids[1], ids[0]) == 400)
    assert network.now - began < 0.5, "more than ten messages, each begun by the one before, not by a round"


def test_answers_keep_to_the_budget_and_go_on_when_it_allows() -> None:
    config = NodeConfig(gossip_bytes_per_s_max=100_000, delta_bytes_max=8192)
    network, ids = joined(2, config=config)
    assert not network.nodes[ids[0]]._community.exchange.supply.affords(2**20 + 1, 1, network.now)
    assert network.nodes[ids[0]]._community.exchange.supply.affords(2**20, 1, network.now), "a quiet time was saved"
    network.publish(ids[0], *(meta(count) for count in range(2000)))
    began, before = network.now, network.frames_bytes
    network.run(30.0, until=lambda: puts_known(network, ids[1], ids[0]) == 2000)
    assert puts_known(network, ids[1], ids[0]) == 2000
    seconds = network.now - began
    assert network.frames_bytes - before < 110_000 * seconds + 8192 and seconds < 5.0


def test_a_budget_saves_up_to_its_burst_and_pays_its_debts() -> None:
    budget = Budget(100.0, 50.0, 0.0)
    assert budget.left(9.0) == 50.0
    budget.spend(80.0, 9.0)
    assert budget.left(9.0) == -30.0 and budget.ready_at(20.0, 9.0) == pytest.approx(9.5, abs=1e-5)
    assert budget.left(9.5) == pytest.approx(20.0)


# ---------------------------------------------------------------------------------------------------------- what is told


def change(added: list[AnchorMeta], removed: list[AnchorMeta]) -> PoolChange:
    return PoolChange(added=tuple(added), removed=tuple(removed))


def test_what_comes_and_goes_in_a_full_pool_is_never_announced() -> None:
    log, announcer = OwnLog(1, MODEL), Announcer(0.0)
    announcer.change(change([meta("old")], []), log, 0.0)
    announcer.write(log, 0.0)
    announcer.change(change([meta("short")], [meta("old")]), log, 1.0)
    announcer.write(log, 1.0)
    announcer.change(change([meta("stays")], [meta("short")]), log, 1.1)
    announcer.write(log, announcer.due_at)
    assert [entry.meta for entry in log.after(0)] == [None], "the eviction is told in time, the newcomer not yet"
    for _ in range(2):
        announcer.write(log, announcer.due_at)
    assert log.anchor_ids() == [meta("stays").anchor_id] and log.max_seq == 3
    assert announcer.unspoken == 1 and len(announcer) == 0 and announcer.due_at == math.inf


def test_an_eviction_is_told_with_what_took_its_place_or_at_once() -> None:
    log, announcer = OwnLog(1, MODEL), Announcer(0.0)
    announcer.change(change([meta(name) for name in ("a", "b", "c")], []), log, 0.0)
    announcer.write(log, 0.0)
    announcer.change(change([], [meta("a")]), log, 1.0)
    assert announcer.due_at == 1.0, "nothing takes its place"
    announcer.write(log, 1.0)
    announcer.change(change([meta("d")], [meta("b")]), log, 2.0)
    assert announcer.due_at == 2.0 + ANNOUNCE_DELAY_S
    announcer.write(log, 2.1)
    assert log.max_seq == 4, "not yet"
    announcer.change(change([], [meta("c")]), log, 2.15)
    announcer.write(log, announcer.due_at)
    assert log.max_seq == 7 and log.anchor_ids() == [meta("d").anchor_id], "both evictions, and the newcomer"
    assert len(announcer) == 0


def test_writes_are_limited_and_what_waits_is_told_in_its_last_state() -> None:
    log, announcer = OwnLog(1, MODEL), Announcer(0.0)
    first = [meta(("a", count)) for count in range(int(WRITES_BURST))]
    announcer.change(change(first, []), log, 0.0)
    announcer.write(log, 0.0)
    assert log.max_seq == WRITES_BURST
    late = [meta(("b", count)) for count in range(300)]
    announcer.change(change(late, []), log, 0.0)
    announcer.write(log, 0.5)
    assert log.max_seq == WRITES_BURST + WRITES_PER_S / 2
    announcer.change(change([], late[250:]), log, 0.6)
    announcer.write(log, 3.0)
    assert log.max_seq == WRITES_BURST + 250 and len(announcer) == 0


def test_relays_keep_what_a_newer_version_appended() -> None:
    network, ids = joined(2)
    writer = record(7)
    raw = m.pack_entry(m.Put.of(1, meta("newer")))
    assert raw[0] == 0x9F, "an array of 15"
    newer = b"\xdc\x00\x10" + raw[1:] + b"\x07"
    assert m.read_entry(newer, MODEL).meta == meta("newer")
    news = m.OriginDelta(writer.node_id, 1, False, 0, 1, 0, (newer,), log_seq=1, member=writer)
    network.handle(ids[0], ev.MessageReceived(writer.node_id, m.Ack((news,))))
    network.run(3.0)
    log = network.nodes[ids[1]]._community.replicas.log(writer.node_id)
    assert log is not None and [entry.raw for entry in log.after(0)] == [newer]


# ------------------------------------------------------------------------------------------------------- what is wrong


def lookup(anchor: AnchorMeta) -> Lookup:
    return Lookup(anchor.model_id, (anchor.chain_end,), np.empty(0, np.uint32))


def test_a_replica_that_differs_from_its_writer_is_found_thrown_away_and_brought_anew() -> None:
    network, ids = joined(3)
    anchors = [meta(count) for count in range(5)]
    network.publish(ids[0], *anchors)
    network.run(3.0)
    replicas = network.nodes[ids[1]]._community.replicas
    log = replicas.log(ids[0])
    assert log is not None
    log._entries.pop(anchors[2].anchor_id)  # a bit that fell over, or a bug
    lost = m.read_entry(m.pack_entry(m.Put.of(3, anchors[2], MODEL)), MODEL)
    log.set_digest ^= lost.digest
    log.puts -= 1
    replicas._touch(ids[0])
    network.run(5.0, until=lambda: identical(network, ids))
    assert identical(network, ids)
    assert replicas.diverged == 1
    assert all(network.nodes[key]._community.replicas.diverged == 0 for key in (ids[0], ids[2]))


def test_who_does_not_have_what_it_announces_is_not_found_with_it_any_more() -> None:
    node = make_node(0)
    node.handle(hello(FRIEND), 0.0)
    anchors = [meta(count) for count in range(12)]
    news = log_news(FRIEND, 12, [m.Put.of(seq, anchor) for seq, anchor in enumerate(anchors, 1)])
    node.handle(ev.MessageReceived(FRIEND.node_id, m.Ack((news,))), 0.0)
    for count, anchor in enumerate(anchors):
        now = 1.0 + count
        assert node.find(lookup(anchor)).hits
        effects = node.handle(ev.TokensRequested(count, FRIEND.node_id, anchor, now + 1), now)
        messages = [effect.message for effect in effects if isinstance(effect, ev.SendMessage)]
        (question,) = [message for message in messages if isinstance(message, m.GetTokens)]
        effects = node.handle(ev.MessageReceived(FRIEND.node_id, m.NoTokens(question.request_id)), now)
        (answer,) = [e for e in effects if isinstance(e, ev.FinishTokens)]
        assert isinstance(answer.result, Miss) and answer.result.reason is MissReason.NOT_FOUND
        assert any(isinstance(e, ev.SendMessage) and isinstance(e.message, m.Syn) for e in effects)
        assert not node.find(lookup(anchor)).hits
        if count == 9:
            break
    assert node.peers()[0].penalty_s > 0, "ten asks in vain out of ten"


def test_who_sees_more_of_our_log_than_we_wrote_makes_us_begin_a_new_epoch() -> None:
    node = make_node(0)
    node.handle(hello(FRIEND), 0.0)
    claim = m.SynAck((m.DigestEntry(node.me.node_id, 1, 0, 9, 0),))
    effects = node.handle(ev.MessageReceived(FRIEND.node_id, claim), 1.0)
    assert [effect.epoch for effect in effects if isinstance(effect, ev.RenewIdentity)] == [2]
    again = node.handle(ev.MessageReceived(FRIEND.node_id, claim), 2.0)
    assert not any(isinstance(effect, ev.RenewIdentity) for effect in again)


# --------------------------------------------------------------------------------------------------------- signed heads


def sign(head_bytes: bytes) -> bytes:
    return hashlib.sha512(b"key" + head_bytes).digest()


def head_of(anchors: list[AnchorMeta], right: bool = True) -> dict[str, Any]:
    log = OwnLog(1, MODEL)
    for anchor in anchors:
        log.put(anchor)
    head = m.Head(log.max_seq, log.set_digest)
    signature = sign(m.origin_head(SIGNER.node_id, 1, head)) if right else b"f" * 64
    return {"head_seq": head.seq, "head_digest": head.digest.to_bytes(8, "little"), "head_signature": signature}


def news_of(anchors: list[AnchorMeta], **head: Any) -> ev.MessageReceived:
    puts = [m.Put.of(seq, anchor, MODEL) for seq, anchor in enumerate(anchors, 1)]
    news = log_news(SIGNER, len(anchors), puts, **head)
    return ev.MessageReceived(SIGNER.node_id, m.Ack((news,)))


def verify(node: Node, effects: list[ev.Effect]) -> list[ev.Effect]:
    (question,) = [effect for effect in effects if isinstance(effect, ev.VerifyHead)]
    ok = question.signature == sign(question.head_bytes)
    return node.handle(ev.HeadVerified(question.origin, question.head_bytes, ok), 0.2)


def test_own_head_is_signed_when_it_changes_at_most_once_a_second_and_told_with_the_news() -> None:
    node = make_node(0, public_key=b"p" * 32)
    node.handle(hello(FRIEND), 0.0)
    node.handle(ev.AnchorsPublished((held(meta("one")),)), 1.0)
    signing = [e for e in node.handle(ev.TimerExpired(), 1.02) if isinstance(e, ev.SignHead)]
    assert len(signing) == 1
    node.handle(ev.HeadSigned(signing[0].head_bytes, sign(signing[0].head_bytes)), 1.03)
    effects = node.handle(ev.TimerExpired(), 1.2)
    told = [e.message for e in effects if isinstance(e, ev.SendMessage) and isinstance(e.message, m.Ack)]
    assert told[0].deltas[0].head_signature == sign(signing[0].head_bytes) and len(told[0].deltas[0].entries) == 1
    node.handle(ev.AnchorsPublished((held(meta("two")),)), 1.3)
    assert not [e for e in node.handle(ev.TimerExpired(), 1.5) if isinstance(e, ev.SignHead)]
    assert node.next_deadline() <= 2.1
    assert [e for e in node.handle(ev.TimerExpired(), 2.1) if isinstance(e, ev.SignHead)]


def test_a_verified_head_is_kept_and_a_forged_one_takes_its_log_with_it() -> None:
    for right in (True, False):
        node = make_node(0)
        node.handle(hello(SIGNER), 0.0)
        anchors = [meta("a"), meta("b")]
        effects = node.handle(news_of(anchors, **head_of(anchors, right)), 0.1)
        assert len(node.known_of(SIGNER.node_id)) == 2, "used at once, as a hint"
        verify(node, effects)
        assert len(node.known_of(SIGNER.node_id)) == (2 if right else 0)
        assert bool(node.find(lookup(anchors[0])).hits) is right
        effects = node.handle(news_of(anchors, **head_of(anchors)), 0.3)
        assert len(node.known_of(SIGNER.node_id)) == (2 if right else 0), "who sent it is not listened to for a while"


def test_a_log_that_its_signed_head_contradicts_is_thrown_away() -> None:
    node = make_node(0)
    node.handle(hello(SIGNER), 0.0)
    effects = node.handle(news_of([meta("a"), meta("forged")], **head_of([meta("a"), meta("b")])), 0.1)
    verify(node, effects)
    assert node.known_of(SIGNER.node_id) == frozenset()
    assert node._community.replicas.diverged == 1


def test_where_signatures_are_required_unsigned_news_are_not_listened_to() -> None:
    node = make_node(0, config=NodeConfig(require_signatures=True))
    node.handle(hello(SIGNER), 0.0)
    node.handle(news_of([meta("a")]), 0.1)
    assert node.known_of(SIGNER.node_id) == frozenset()
    node.handle(news_of([meta("a")], **head_of([meta("a")])), 0.2)
    assert len(node.known_of(SIGNER.node_id)) == 1


def answering(network: Network) -> Callable[[], bool]:
    """Answers what nodes ask their drivers about signatures; says whether there was anything."""

    def step() -> bool:
        found = False
        for key in list(network.nodes):
            for asked in network.take(key, ev.SignHead):
                found = True
                network.handle(key, ev.HeadSigned(asked.head_bytes, sign(asked.head_bytes)))
            for asked in network.take(key, ev.VerifyHead):
                found = True
                ok = asked.signature == sign(asked.head_bytes)
                network.handle(key, ev.HeadVerified(asked.origin, asked.head_bytes, ok))
        return found

    return step


def test_everybody_ends_with_everybodys_verified_head() -> None:
    network = Network()
    config = NodeConfig(require_signatures=True)
    ids = [network.add(index, config, public_key=bytes([index + 1]) * 32) for index in range(5)]
    for key in ids[1:]:
        network.join(key, ids[0])
    answer = answering(network)
    rng = random.Random(4)
    for step in range(300):
        if step < 100 and step % 5 == 0:
            network.publish(rng.choice(ids), meta(("signed", step)))
        network.run(0.05)
        answer()
    assert identical(network, ids)
    for key in ids:
        for origin in ids:
            log = network.nodes[key]._community.replicas.log(origin)
            assert log is not None and log.head.signature and log.head.seq == log.max_seq
        assert network.nodes[key]._community.replicas.diverged == 0


# ------------------------------------------------------------------------------------------------------------ what first


def test_unknown_origins_come_first_then_those_with_the_fewest_news() -> None:
    node = make_node(0)
    members = {index: record(index) for index in (1, 2, 3, 4)}
    for index, entries in ((1, 5), (2, 1), (3, 3), (4, 0)):
        node.handle(hello(members[index]), 0.0)
        puts = [m.Put.of(seq, meta((index, seq))) for seq in range(1, entries + 1)]
        node.handle(ev.MessageReceived(members[index].node_id, m.Ack((log_news(members[index], entries, puts),))), 0.0)
    known = tuple(m.DigestEntry(members[index].node_id, 1, 0, 0, 0) for index in (1, 2, 4))
    effects = node.handle(ev.MessageReceived(members[4].node_id, m.SynAck(known, True)), 0.1)
    (news,) = [e.message for e in effects if isinstance(e, ev.SendMessage) and isinstance(e.message, m.Ack)]
    order = [delta.node_id for delta in news.deltas if delta.node_id != node.me.node_id]
    assert order == [members[3].node_id, members[2].node_id, members[1].node_id]


def test_nothing_is_asked_about_who_left() -> None:
    node = make_node(0)
    for index in (1, 2):
        node.handle(hello(record(index)), 0.0)
    node.handle(ev.MessageReceived(FRIEND.node_id, m.Bye(1)), 0.1)
    answers = node.handle(ev.MessageReceived(record(2).node_id, m.SynAck(())), 0.2)
    (full,) = [e.message for e in answers if isinstance(e, ev.SendMessage) and isinstance(e.message, m.SynAck)]
    told = {entry.node_id: entry for entry in full.digest}
    assert told[FRIEND.node_id].max_seq == m.COUNTER_MAX and told[record(2).node_id].max_seq == 0
