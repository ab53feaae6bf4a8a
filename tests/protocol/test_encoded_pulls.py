"""Pulling blocks as int8: from whom, in what order, checked against what, and what a hostile peer can make of it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from protocol_harness import held, make_node, meta, record, wants
from test_pulls import of, reasons, sent
from test_pulls_machine import ANCHORS, PEERS, PullMachine, hello

from kvcomm_p2p.protocol import events as ev
from kvcomm_p2p.protocol import messages as m
from kvcomm_p2p.protocol.anchors import BlockHandle, MissReason
from kvcomm_p2p.protocol.ids import NodeId
from kvcomm_p2p.protocol.node import Node

INT8 = int(m.Capability.INT8)
SHARES = {"host": b"h" * 16, "capabilities": INT8 | int(m.Capability.SHARED_MEMORY)}
PEER, OTHER = record(1, capabilities=INT8), record(2, capabilities=INT8)
OLD = record(3)
DOC = meta("doc", tokens=64)
BLOCK, ENCODED = 256, 72
DIGEST, ANOTHER = b"d" * 32, b"e" * 32


def encoded(*wanted: ev.Want) -> tuple[ev.Want, ...]:
    """The same blocks, wanted as int8."""
    return tuple(replace(want, kv_bytes=ENCODED, raw_bytes=want.kv_bytes) for want in wanted)


def node_of(*peers: m.MemberRecord, **changes: Any) -> Node:
    node = make_node(0, **{"capabilities": INT8, **changes})
    for peer in peers:
        node.handle(hello(peer), 0.0)
    return node


def request(*holders: NodeId, fetch_id: int = 1, anchors: tuple[Any, ...] = ()) -> ev.FetchRequested:
    return ev.FetchRequested(fetch_id, holders or (PEER.node_id,), encoded(*wants(DOC)), 5.0, anchors=anchors)


def told(pull_id: int, ordinal: int, digest: bytes = DIGEST, sender: NodeId = PEER.node_id) -> ev.MessageReceived:
    return ev.MessageReceived(sender, m.EncodedBlock(pull_id, ordinal, digest))


def chunk(pull_id: int, ordinal: int, offset: int = 0, length: int = ENCODED) -> ev.ChunkReceived:
    return ev.ChunkReceived(PEER.node_id, pull_id, ordinal, offset, length)


def asked(node: Node, event: ev.FetchRequested, now: float = 0.0) -> m.Pull:
    (pull,) = sent(node.handle(event, now), m.Pull)
    assert isinstance(pull, m.Pull)
    return pull


# --------------------------------------------------------------------------------------------------------------- puller


def test_an_encoded_pull_step_by_step() -> None:
    node, event = node_of(PEER), request()
    first, second = event.wants
    pull = asked(node, event)
    assert pull.encoding is m.Encoding.INT8 and not pull.shared
    assert pull.blocks == tuple(m.PullBlock(DOC.anchor_id, index, BLOCK, 0, ENCODED) for index in range(2))
    assert node.handle(told(1, 0), 0.01) == []
    assert node.handle(chunk(1, 0, 0, 50), 0.01) == [ev.StoreChunk(first.handle, 0, 50, ENCODED)]
    whole = [ev.StoreChunk(first.handle, 50, 22, ENCODED), ev.VerifyBlock(first.handle, DIGEST)]
    assert node.handle(chunk(1, 0, 50, 22), 0.01) == whole
    node.handle(told(1, 1, ANOTHER), 0.02)
    assert of(node.handle(chunk(1, 1), 0.02), ev.VerifyBlock) == [ev.VerifyBlock(second.handle, ANOTHER)]
    node.handle(ev.BlockVerified(first.handle, True), 0.03)
    (finish,) = of(node.handle(ev.BlockVerified(second.handle, True), 0.03), ev.FinishFetch)
    assert [found.handle for found in finish.found] == [first.handle, second.handle]
    assert node.stats().violations == 0


def test_bytes_without_a_digest_before_them_end_the_pull() -> None:
    node = node_of(PEER)
    pull = asked(node, request())
    effects = node.handle(chunk(pull.pull_id, 0), 0.01)
    assert not of(effects, ev.StoreChunk)
    (finish,) = of(effects, ev.FinishFetch)
    assert reasons(finish) == [MissReason.LENGTH_MISMATCH] * 2
    assert node.stats().violations == 1


@pytest.mark.parametrize("ordinal", [2, 7, 1023])
def test_digests_of_what_was_not_asked_for_end_the_pull(ordinal: int) -> None:
    node = node_of(PEER)
    pull = asked(node, request())
    assert of(node.handle(told(pull.pull_id, ordinal), 0.01), ev.FinishFetch)
    assert node.stats().violations == 1


def test_a_digest_in_the_middle_of_its_block_or_of_one_before_it_ends_the_pull() -> None:
    for told_late in (0, 1):
        node = node_of(PEER)
        pull = asked(node, request())
        node.handle(told(pull.pull_id, 0), 0.01)
        node.handle(chunk(pull.pull_id, 0, 0, 50), 0.01)
        assert of(node.handle(told(pull.pull_id, told_late, ANOTHER), 0.01), ev.FinishFetch)
        assert node.stats().violations == 1


def test_digests_in_a_raw_pull_are_violations_and_those_of_ended_pulls_are_dropped() -> None:
    node = node_of(PEER, OTHER)
    pull = asked(node, ev.FetchRequested(1, (PEER.node_id,), wants(DOC), 5.0))
    assert pull.encoding is m.Encoding.RAW and not any(block.encoded_bytes for block in pull.blocks)
    node.handle(told(pull.pull_id, 0), 0.01)
    assert node.stats().violations == 1
    assert node.handle(told(pull.pull_id, 0), 0.02) == node.handle(told(99, 0), 0.02) == []
    later = asked(node, request(OTHER.node_id, fetch_id=2), 2.0)
    node.handle(told(later.pull_id, 0), 2.0)
    assert node.stats().violations == 2, "in the name of somebody else"


def test_a_block_that_is_not_what_its_sender_said_is_a_violation_and_comes_from_nobody_else() -> None:
    node = node_of(PEER, OTHER)
    event = request(PEER.node_id, OTHER.node_id)
    pull = asked(node, event)
    node.handle(told(pull.pull_id, 0), 0.01)
    node.handle(chunk(pull.pull_id, 0), 0.01)
    effects = node.handle(ev.BlockVerified(event.wants[0].handle, False), 0.02)
    assert node.stats().violations == 1
    assert not sent(effects, m.Pull)
    (finish,) = of(effects, ev.FinishFetch)
    assert set(reasons(finish)) == {MissReason.DIGEST_MISMATCH}


def test_only_the_holder_whose_word_the_fetch_goes_by_is_asked() -> None:
    node = node_of(PEER, OTHER)
    pull = asked(node, request(PEER.node_id, OTHER.node_id))
    busy = m.PullFailed(pull.pull_id, None, m.PullFailedReason.BUSY, 0.02, (OTHER.node_id,))
    assert not sent(node.handle(ev.MessageReceived(PEER.node_id, busy), 0.01), m.Pull)
    asks: list[tuple[NodeId | None, float]] = []
    now = 0.01
    while now < 0.5 and not asks:
        now = max(now + 0.001, node.next_deadline())
        effects = node.handle(ev.TimerExpired(), now)
        asks = [(e.to, now) for e in of(effects, ev.SendMessage) if isinstance(e.message, m.Pull)]
    assert [peer for peer, _ in asks] == [PEER.node_id], (
        "neither the next holder, nor one it was referred to, nor a hedge"
    )


def test_what_is_not_finite_fails_with_that_reason() -> None:
    node = node_of(PEER)
    pull = asked(node, request())
    for ordinal in range(2):
        failed = m.PullFailed(pull.pull_id, ordinal, m.PullFailedReason.NOT_FINITE)
        effects = node.handle(ev.MessageReceived(PEER.node_id, failed), 0.01)
    (finish,) = of(effects, ev.FinishFetch)
    assert reasons(finish) == [MissReason.NOT_FINITE] * 2


def test_holders_without_the_capability_are_not_asked() -> None:
    node = node_of(PEER, OLD)
    (finish,) = of(node.handle(request(OLD.node_id), 0.0), ev.FinishFetch)
    assert reasons(finish) == [MissReason.NOT_FOUND] * 2
    assert node.encodes(PEER.node_id) and not node.encodes(OLD.node_id) and not node.encodes(NodeId(b"?" * 16))
    assert not node_of(PEER, capabilities=0).encodes(PEER.node_id)


def test_what_could_stand_in_shared_memory_is_not_encoded() -> None:
    near = record(4, **SHARES)
    node = node_of(PEER, near, **SHARES)
    assert node.encodes(PEER.node_id) and not node.encodes(near.node_id)
    event = ev.FetchRequested(1, (near.node_id,), encoded(*wants(DOC)), 5.0)
    assert not asked(node, event).shared


def test_encoded_blocks_are_not_passed_on() -> None:
    node, event = node_of(PEER), request(anchors=(DOC,))
    pull = asked(node, event)
    node.handle(told(pull.pull_id, 0), 0.01)
    node.handle(chunk(pull.pull_id, 0), 0.01)
    assert not of(node.handle(ev.BlockVerified(event.wants[0].handle, True), 0.02), ev.RetainBlock)


def test_raw_and_encoded_blocks_of_one_fetch_are_two_pulls() -> None:
    node = node_of(PEER)
    first, second = wants(DOC)
    effects = node.handle(ev.FetchRequested(1, (PEER.node_id,), (first, *encoded(second)), 5.0), 0.0)
    assert sorted(pull.encoding for pull in sent(effects, m.Pull)) == [m.Encoding.RAW, m.Encoding.INT8]


def test_the_same_block_raw_and_encoded_are_two_flights() -> None:
    node = node_of(PEER)
    node.handle(request(), 0.0)
    assert sent(node.handle(ev.FetchRequested(2, (PEER.node_id,), wants(DOC), 5.0), 0.0), m.Pull)


def test_a_pull_that_was_cut_off_goes_on_where_it_was() -> None:
    node, event = node_of(PEER), request()
    pull = asked(node, event)
    node.handle(told(pull.pull_id, 0), 0.01)
    node.handle(chunk(pull.pull_id, 0, 0, 50), 0.01)
    busy = m.PullFailed(pull.pull_id, None, m.PullFailedReason.BUSY, 0.02)
    node.handle(ev.MessageReceived(PEER.node_id, busy), 0.02)
    again = asked(node, ev.TimerExpired(), 0.05)  # type: ignore[arg-type]
    assert again.blocks[0].offset == 50
    node.handle(told(again.pull_id, 0), 0.06)
    effects = node.handle(chunk(again.pull_id, 0, 50, 22), 0.06)
    assert of(effects, ev.VerifyBlock) == [ev.VerifyBlock(event.wants[0].handle, DIGEST)]


# --------------------------------------------------------------------------------------------------------------- holder


def pull_of(*, size: int = BLOCK, offset: int = 0, pull_id: int = 1) -> ev.MessageReceived:
    blocks = tuple(m.PullBlock(DOC.anchor_id, index, size, offset, ENCODED) for index in range(2))
    return ev.MessageReceived(PEER.node_id, m.Pull(pull_id, blocks, 10**6, m.Encoding.INT8))


def holder_of(**changes: Any) -> Node:
    node = node_of(PEER, **changes)
    node.handle(ev.AnchorsPublished((held(DOC),)), 0.0)
    return node


def test_the_holder_sends_encoded_what_is_asked_for_so() -> None:
    node = holder_of()
    blocks = of(node.handle(pull_of(offset=10), 0.0), ev.SendBlock)
    assert [(b.kv_bytes, b.encoded_bytes, b.offset, b.shared) for b in blocks] == [(BLOCK, ENCODED, 10, False)] * 2
    node.handle(ev.MessageReceived(PEER.node_id, m.Credit(1, 2 * (ENCODED - 10))), 0.1)
    assert node.stats().uploads == 0, "what travelled is credited"


def test_a_holder_that_does_not_encode_says_so() -> None:
    node = holder_of(capabilities=0)
    effects = node.handle(pull_of(), 0.0)
    assert not of(effects, ev.SendBlock)
    assert sent(effects, m.PullFailed) == [m.PullFailed(1, None, m.PullFailedReason.NOT_FOUND)]
    assert node.stats().uploads == 0


def test_a_block_of_another_size_is_not_found_encoded_either() -> None:
    effects = holder_of().handle(pull_of(size=BLOCK + 8), 0.0)
    assert [failed.reason for failed in sent(effects, m.PullFailed)] == [m.PullFailedReason.NOT_FOUND] * 2


def test_what_cannot_be_encoded_fails_alone_and_with_its_reason() -> None:
    node = holder_of()
    node.handle(pull_of(), 0.0)
    event = ev.BlockUnavailable(PEER.node_id, 1, 0, m.PullFailedReason.NOT_FINITE)
    assert sent(node.handle(event, 0.1), m.PullFailed) == [m.PullFailed(1, 0, m.PullFailedReason.NOT_FINITE)]
    node.handle(ev.MessageReceived(PEER.node_id, m.Credit(1, ENCODED)), 0.2)
    assert node.stats().uploads == 0


# ------------------------------------------------------------------------------------------------------------ in any order


class EncodedMachine(PullMachine):
    """Everything that `PullMachine` does, with fetches of encoded blocks among the others; the third peer has none."""

    CAPABILITIES = (INT8, INT8, 0)

    def __init__(self) -> None:
        self.digests: dict[BlockHandle, bytes] = {}
        self.told: dict[tuple[NodeId, Any], set[bytes]] = {}
        super().__init__()

    def carry_out(self, effect: ev.Effect) -> None:
        if isinstance(effect, ev.SendMessage) and isinstance(effect.message, m.Pull):
            if effect.message.encoding is m.Encoding.INT8:
                assert effect.to != PEERS[2].node_id, "asked for what it does not do"
        elif isinstance(effect, ev.VerifyBlock) and self.sizes[effect.handle] == ENCODED:
            assert any(effect.digest in stated for stated in self.told.values()), "compared with what nobody stated"
        super().carry_out(effect)

    @precondition(lambda self: len(self.open) < 6)
    @rule(
        anchors=st.sets(st.integers(0, 2), min_size=1),
        peers=st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True),
        deadline_s=st.floats(0.0, 0.6),
        passing_on=st.booleans(),
        some=st.booleans(),
    )
    def fetch_encoded(
        self, anchors: set[int], peers: list[int], deadline_s: float, passing_on: bool, some: bool
    ) -> None:
        wanted = [want for index in sorted(anchors) for want in wants(ANCHORS[index])]
        wanted = [w if some and n % 2 else encoded(w)[0] for n, w in enumerate(wanted)]
        holders = tuple(PEERS[peer].node_id for peer in peers)
        metas = tuple(ANCHORS[index] for index in sorted(anchors)) if passing_on else ()
        event = ev.FetchRequested(self.next_fetch, holders, tuple(wanted), self.now + deadline_s, math.inf, 0.4, metas)
        self.next_fetch += 1
        for want in wanted:
            self.references[want.handle], self.sizes[want.handle] = 1, want.kv_bytes
        self.open[event.fetch_id] = event
        self.do(event)

    def tell(self, holder: NodeId, pull_id: int, ordinal: int, digest: bytes) -> None:
        self.told.setdefault((holder, pull_id), set()).add(digest)
        self.do(ev.MessageReceived(holder, m.EncodedBlock(pull_id, ordinal, digest)))

    @precondition(lambda self: self.pulls)
    @rule(data=st.data(), digest=st.sampled_from([DIGEST, DIGEST, DIGEST, ANOTHER]), parts=st.booleans())
    def honest_block(self, data: Any, digest: bytes, parts: bool) -> None:
        holder, pull = self.pick(data)
        for ordinal, block in enumerate(pull.blocks):
            at = self.received.get((pull.pull_id, ordinal), block.offset)
            if block.encoded_bytes and at == block.offset:
                self.tell(holder, pull.pull_id, ordinal, digest)
                ends = [(at + ENCODED) // 2, ENCODED] if parts else [ENCODED]
                for end in ends:
                    if end > at:
                        self.received[pull.pull_id, ordinal] = end
                        self.do(ev.ChunkReceived(holder, pull.pull_id, ordinal, at, end - at))
                        at = end
                break

    @precondition(lambda self: self.pulls)
    @rule(data=st.data(), ordinal=st.integers(0, 6), liar=st.booleans())
    def any_digest(self, data: Any, ordinal: int, liar: bool) -> None:
        holder, pull = self.pick(data)
        sender = next(peer.node_id for peer in PEERS if (peer.node_id != holder) is liar)
        self.tell(sender, pull.pull_id, ordinal, ANOTHER)


EncodedMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestEncodedPulls = EncodedMachine.TestCase
