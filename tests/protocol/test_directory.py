"""Lookups: ranking, neighbours, filters, bounds, and agreement with a plain search."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from protocol_harness import MODEL, digest16, held, log_news, make_node, meta, record

from kvcomm_p2p.protocol import directory as directory_module
from kvcomm_p2p.protocol import events as ev
from kvcomm_p2p.protocol import messages as m
from kvcomm_p2p.protocol.anchors import AnchorMeta, MissReason, Visibility
from kvcomm_p2p.protocol.directory import HOLDERS_PER_ANCHOR_MAX, Directory
from kvcomm_p2p.protocol.ids import ChainHash, ModelId, NodeId
from kvcomm_p2p.protocol.lookup import Lookup
from kvcomm_p2p.protocol.node import Node

ME = record(0).node_id
NO_FINGERPRINTS = np.empty(0, np.uint32)


def everybody(holder: NodeId, anchor: AnchorMeta) -> bool:
    return True


def lookup(*anchors: AnchorMeta, chains: bool = False, anchors_max: int = 64) -> Lookup:
    values = [np.frombuffer(anchor.fingerprints, "<u4") for anchor in anchors]
    fingerprints = np.unique(np.concatenate([NO_FINGERPRINTS, *values])).astype(np.uint32)
    ends = tuple(anchor.chain_end for anchor in anchors if chains)
    return Lookup(MODEL, ends, fingerprints, anchors_max)


def with_values(label: object, values: list[int], **changes: Any) -> AnchorMeta:
    return meta(label, fingerprints=np.array(sorted(values), "<u4").tobytes(), **changes)


def told(node: Node, peer: m.MemberRecord, *anchors: AnchorMeta) -> None:
    puts = tuple(m.Put.of(seq, anchor) for seq, anchor in enumerate(anchors, 1))
    delta = log_news(peer, len(puts), puts)
    node.handle(ev.MessageReceived(peer.node_id, m.Ack((delta,))), 0.0)


def test_prefix_beats_matches_and_own_beats_peers() -> None:
    index = Directory(ME)
    peer = record(1).node_id
    prefix, run = meta("prefix"), with_values("run", list(range(10)))
    index.add(peer, prefix)
    index.add(peer, run)
    index.add(ME, run)
    asked = Lookup(MODEL, (prefix.chain_end,), np.arange(10, dtype=np.uint32))
    found = [
        (hit.holder, hit.meta.anchor_id, hit.matches, hit.prefix_tokens) for hit in index.find(asked, everybody).hits
    ]
    assert found == [(peer, prefix.anchor_id, 0, 64), (ME, run.anchor_id, 10, 0), (peer, run.anchor_id, 10, 0)]


def test_neighbours_of_a_hit_come_with_it() -> None:
    index = Directory(ME)
    parts = [meta("doc", start=start) for start in (0, 64, 128, 192)]
    for part in parts:
        index.add(ME, part)
    index.add(record(1).node_id, parts[0])
    found = index.find(lookup(parts[1]), everybody).hits
    assert [(hit.meta.start, hit.matches, hit.holder) for hit in found] == [
        (64, 4, ME),
        *sorted([(0, 0, ME), (128, 0, ME)], key=lambda item: parts[item[0] // 64].anchor_id),
    ]


def test_other_models_are_a_miss_with_its_reason() -> None:
    index = Directory(ME)
    foreign = meta("doc", model_id=ModelId(b"X" * 16))
    assert index.find(lookup(foreign), everybody).miss is MissReason.NOT_FOUND
    index.add(record(1).node_id, foreign)
    result = index.find(lookup(foreign), everybody)
    assert result.miss is MissReason.MODEL_MISMATCH and result.hits == ()
    index.add(ME, meta("doc"))
    assert index.find(lookup(foreign), everybody).miss is None


def test_groups_private_anchors_and_the_departed_are_not_found() -> None:
    tag = b"g" * 8
    for groups, expected in (((), {"public"}), ((tag,), {"public", "group"})):
        node = make_node(0, groups=groups)
        public, group = meta("public"), meta("group", visibility=Visibility.GROUP, group=tag)
        told(node, record(1), public, group)
        names = {"public": public.anchor_id, "group": group.anchor_id}
        found = {hit.meta.anchor_id for hit in node.find(lookup(public, group)).hits}
        assert found == {names[name] for name in expected}
        node.handle(ev.PeerUnreachable(record(1).node_id), 0.1)
        assert node.find(lookup(public, group)).miss is MissReason.NOT_FOUND


def test_own_private_and_worn_anchors_are_found_here_and_not_told() -> None:
    node = make_node(0)
    node.handle(
        ev.MessageReceived(record(1).node_id, m.Hello(m.PROTOCOL_VERSION, m.PROTOCOL_VERSION, bytes(16), record(1))),
        0.0,
    )
    private = meta("private", visibility=Visibility.PRIVATE)
    worn = meta("worn", hops=2, chain_end=ChainHash(b""))
    node.handle(ev.AnchorsPublished((held(private), held(worn))), 0.0)
    assert {hit.meta.anchor_id for hit in node.find(lookup(private, worn)).hits} == {private.anchor_id, worn.anchor_id}
    node.handle(ev.TimerExpired(), 0.05)
    answers = node.handle(ev.MessageReceived(record(1).node_id, m.SynAck(())), 0.1)
    messages = [effect.message for effect in answers if isinstance(effect, ev.SendMessage)]
    news = [delta for message in messages if isinstance(message, m.Ack) for delta in message.deltas]
    assert [delta.entries for delta in news if delta.node_id == node.me.node_id] == [()]
    for anchor in (private, worn):
        question = m.GetTokens(1, anchor.anchor_id, anchor.start, anchor.end)
        (reply,) = node.handle(ev.MessageReceived(record(1).node_id, question), 0.2)
        assert isinstance(reply, ev.SendMessage) and reply.message == m.NoTokens(1)


def test_an_anchor_that_everybody_holds_does_not_crowd_out_others() -> None:
    index = Directory(ME)
    popular, rare = with_values("popular", [1, 2, 3]), with_values("rare", [3])
    for count in range(50):
        index.add(record(100 + count).node_id, popular)
    index.add(record(1).node_id, rare)
    hits = index.find(Lookup(MODEL, (), np.array([1, 2, 3], np.uint32), 2), everybody).hits
    counts = Counter(hit.meta.anchor_id for hit in hits)
    assert counts == {popular.anchor_id: HOLDERS_PER_ANCHOR_MAX, rare.anchor_id: 1}


def test_a_fingerprint_claimed_everywhere_is_looked_at_only_so_often() -> None:
    index = Directory(ME)
    for count in range(1500):
        index.add(record(1).node_id, with_values(count, [7], chain_end=ChainHash(b"c" * 16)))
    index._merge()
    asked = Lookup(MODEL, (ChainHash(b"c" * 16),), np.array([7], np.uint32), 10**6)
    assert len(index.find(asked, everybody).hits) <= 2 * directory_module.ROWS_PER_KEY_MAX


operations = st.lists(
    st.tuples(
        st.sampled_from(["add", "remove", "gone"]),
        st.integers(0, 2),
        st.integers(0, 5),
        st.lists(st.integers(0, 12), max_size=6),
    ),
    max_size=40,
)


@given(operations, st.sets(st.integers(0, 12)), st.booleans())
@settings(deadline=None, max_examples=150)
def test_matches_agree_with_a_plain_search(
    steps: list[tuple[str, int, int, list[int]]], prompt: set[int], merge_often: bool
) -> None:
    index = Directory(ME)
    plain: dict[tuple[NodeId, bytes], AnchorMeta] = {}
    for action, holder_index, label, values in steps:
        holder = record(holder_index).node_id
        anchor = with_values(label, values, sequence_id=digest16(label, holder_index)[:8])
        if action == "add":
            index.add(holder, anchor)
            plain[holder, anchor.anchor_id] = anchor
        elif action == "remove":
            index.remove(holder, anchor.anchor_id)
            plain.pop((holder, anchor.anchor_id), None)
        else:
            index.remove_holder(holder)
            plain = {key: value for key, value in plain.items() if key[0] != holder}
        if merge_often:
            index._merge()
    asked = Lookup(MODEL, (), np.array(sorted(prompt), np.uint32))
    found = {(hit.holder, hit.meta.anchor_id): hit.matches for hit in index.find(asked, everybody).hits}
    expected = {}
    for key, anchor in plain.items():
        count = len(prompt & set(np.frombuffer(anchor.fingerprints, "<u4").tolist()))
        if count:
            expected[key] = count
    assert found == expected
    assert len(index) == len(plain)


def alike(label: object, content: int, **changes: Any) -> AnchorMeta:
    """An anchor with this content and nothing else by which it could be found."""
    return meta(label, content=content, fingerprints=b"", chain_end=ChainHash(b""), **changes)


def resembling(*sketches: int, bits_max: int = 9, fingerprints: tuple[int, ...] = ()) -> Lookup:
    values = np.array(fingerprints, np.uint32)
    return Lookup(MODEL, (), values, sketches=sketches, sketch_bits_max=bits_max)


def test_near_duplicates_are_found_after_what_matches() -> None:
    index = Directory(ME)
    peer = record(1).node_id
    near, nearer, far = alike("near", 0b111), alike("nearer", 0b100), alike("far", 2**10 - 1)
    both = with_values("both", [7], content=0b11111)
    for anchor in (near, nearer, far, both):
        index.add(peer, anchor)
    index.add(ME, nearer)
    hits = index.find(resembling(0, fingerprints=(7,)), everybody).hits
    assert [(hit.meta, hit.holder, hit.matches, hit.similar_bits) for hit in hits] == [
        (both, peer, 1, 5),
        (nearer, ME, 0, 1),
        (nearer, peer, 0, 1),
        (near, peer, 0, 3),
    ]
    (hit,) = index.find(Lookup(MODEL, (), np.array([7], np.uint32)), everybody).hits
    assert hit.similar_bits is None
    assert index.find(Lookup(MODEL, (), NO_FINGERPRINTS), everybody).miss is MissReason.NOT_FOUND


def test_near_duplicates_for_another_model_or_unusable_are_no_hits() -> None:
    index = Directory(ME)
    index.add(ME, alike("foreign", 1, model_id=ModelId(b"X" * 16)))
    assert index.find(resembling(1), everybody).miss is MissReason.MODEL_MISMATCH
    index.add(ME, alike("ours", 1))
    assert index.find(resembling(1), lambda holder, anchor: False).hits == ()
    assert len(index.find(resembling(1), everybody).hits) == 1


def test_a_content_that_many_hold_is_searched_once_and_stays_until_the_last_leaves() -> None:
    index = Directory(ME)
    holders = [record(number).node_id for number in range(1, 4)]
    for holder in holders:
        index.add(holder, alike("doc", 5))
    assert len(index._contents._index) == 1
    for left in (3, 2, 1, 0):
        assert len(index.find(resembling(5), everybody).hits) == left
        if left:
            index.remove_holder(holders[3 - left])
    assert len(index._contents._index) == 0


def test_a_false_content_hides_no_true_one() -> None:
    index = Directory(ME)
    liar, honest = record(1).node_id, record(2).node_id
    index.add(liar, alike("doc", 2**40 - 1))
    index.add(honest, alike("doc", 1))
    assert [hit.holder for hit in index.find(resembling(1), everybody).hits] == [honest]


def test_anchors_without_content_resemble_nothing() -> None:
    index = Directory(ME)
    index.add(ME, alike("short", 0))
    assert index.find(resembling(0, bits_max=64), everybody).hits == ()


def test_a_content_claimed_everywhere_is_looked_at_only_so_often() -> None:
    index = Directory(ME)
    for count in range(1_500):
        index.add(record(1).node_id, alike(count, 3))
    asked = Lookup(MODEL, (), NO_FINGERPRINTS, 10**6, (3,))
    assert len(index.find(asked, everybody).hits) == directory_module.ROWS_PER_KEY_MAX


@given(operations, st.lists(st.integers(0, 15), max_size=3), st.integers(0, 3))
@settings(deadline=None, max_examples=150)
def test_resemblance_agrees_with_a_plain_search(
    steps: list[tuple[str, int, int, list[int]]], sketches: list[int], bits_max: int
) -> None:
    index = Directory(ME)
    plain: dict[tuple[NodeId, bytes], AnchorMeta] = {}
    for action, holder_index, label, values in steps:
        holder = record(holder_index).node_id
        anchor = alike(label, sum(values) % 16)
        if action == "add":
            index.add(holder, anchor)
            plain[holder, anchor.anchor_id] = anchor
        elif action == "remove":
            index.remove(holder, anchor.anchor_id)
            plain.pop((holder, anchor.anchor_id), None)
        else:
            index.remove_holder(holder)
            plain = {key: value for key, value in plain.items() if key[0] != holder}
    hits = index.find(resembling(*sketches, bits_max=bits_max), everybody).hits
    expected = {}
    for key, anchor in plain.items():
        bits = min(((anchor.content ^ sketch).bit_count() for sketch in sketches), default=99)
        if anchor.content and bits <= bits_max:
            expected[key] = bits
    assert {(hit.holder, hit.meta.anchor_id): hit.similar_bits for hit in hits} == expected
    assert len(index._contents._index) == len(
        {(key[1], anchor.content) for key, anchor in plain.items() if anchor.content}
    )
