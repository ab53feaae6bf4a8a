"""Blocks in shared memory: who is asked for them, when the holder may let go, and what happens where they cannot be taken."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from protocol_harness import held, make_node, meta, record, wait, wants
from test_pulls_machine import PullMachine

from kvcomm_p2p.protocol import events as ev
from kvcomm_p2p.protocol import messages as m
from kvcomm_p2p.protocol.anchors import BlockHandle, MissReason
from kvcomm_p2p.protocol.ids import NodeId
from kvcomm_p2p.protocol.node import Node
from kvcomm_p2p.protocol.shared_blocks import SENT_INSTEAD_FIRST_S

HOST, ELSEWHERE = b"h" * 16, b"e" * 16
SHARES: dict[str, Any] = {"host": HOST, "capabilities": m.Capability.SHARED_MEMORY}
PEER = record(1, **SHARES)
DOC = meta("doc", tokens=128)  # four blocks
BLOCK = 32 * 8


def hello(peer: m.MemberRecord) -> ev.MessageReceived:
    return ev.MessageReceived(peer.node_id, m.Hello(m.PROTOCOL_VERSION, m.PROTOCOL_VERSION, bytes(16), peer))


def node_of(peer: m.MemberRecord = PEER, **changes: Any) -> Node:
    """A node that shares memory (unless `changes` say otherwise) and knows `peer`, at time 0."""
    node = make_node(0, **{**SHARES, **changes})
    node.handle(hello(peer), 0.0)
    return node


def request(fetch_id: int = 1, deadline: float = 5.0) -> ev.FetchRequested:
    return ev.FetchRequested(fetch_id, (PEER.node_id,), wants(DOC), deadline)


def of(effects: list[ev.Effect], kind: type) -> list[Any]:
    return [effect for effect in effects if isinstance(effect, kind)]


def sent(effects: list[ev.Effect], kind: type) -> list[Any]:
    return [effect.message for effect in of(effects, ev.SendMessage) if isinstance(effect.message, kind)]


def places(*ordinals: int, length: int = BLOCK) -> tuple[m.SharedBlock, ...]:
    return tuple(m.SharedBlock(ordinal, 17, 4711, ordinal * BLOCK, length) for ordinal in ordinals)


def offer(pull_id: int, *ordinals: int, sender: NodeId = PEER.node_id, length: int = BLOCK) -> ev.MessageReceived:
    return ev.MessageReceived(sender, m.SharedBlocks(pull_id, 99, places(*ordinals, length=length)))


def chunk(pull_id: int, ordinal: int) -> ev.ChunkReceived:
    return ev.ChunkReceived(PEER.node_id, pull_id, ordinal, 0, BLOCK)


# ------------------------------------------------------------------------------------------------------------ who is asked


@pytest.mark.parametrize(
    ("mine", "theirs", "asks"),
    [
        ({}, {}, True),
        ({}, {"host": ELSEWHERE}, False),
        ({"host": ELSEWHERE}, {}, False),
        ({"host": b""}, {"host": b""}, False),
        ({}, {"capabilities": 0}, False),
        ({"capabilities": m.Capability.INT8}, {}, False),
    ],
)
def test_only_nodes_of_one_host_that_both_share_do(mine: dict[str, Any], theirs: dict[str, Any], asks: bool) -> None:
    peer = record(1, **{**SHARES, **theirs})
    node = node_of(peer, **mine)
    (pull,) = sent(node.handle(request(), 0.0), m.Pull)
    assert pull.shared is asks


@pytest.mark.parametrize(
    ("mine", "theirs", "asked", "shared"),
    [
        ({}, {}, True, True),
        ({}, {}, False, False),
        ({}, {"host": ELSEWHERE}, True, False),
        ({"capabilities": 0}, {}, True, False),
    ],
)
def test_the_holder_shares_with_its_own_host_and_on_request_only(
    mine: dict[str, Any], theirs: dict[str, Any], asked: bool, shared: bool
) -> None:
    node = node_of(record(1, **{**SHARES, **theirs}), **mine)
    node.handle(ev.AnchorsPublished((held(DOC),)), 0.0)
    pull = m.Pull(1, tuple(m.PullBlock(DOC.anchor_id, i, BLOCK) for i in range(4)), 2**24, shared=asked)
    blocks = of(node.handle(ev.MessageReceived(PEER.node_id, pull), 0.1), ev.SendBlock)
    assert [block.shared for block in blocks] == [shared] * 4


# ------------------------------------------------------------------------------------------------------------- it is taken


def test_offered_blocks_are_checked_then_credited_then_found() -> None:
    node, event = node_of(), request()
    (pull,) = sent(node.handle(event, 0.0), m.Pull)
    effects = node.handle(offer(pull.pull_id, 0, 1, 2, 3), 0.01)
    assert effects == [
        ev.AdoptShared(want.handle, BLOCK, want.digest, 99, place)
        for want, place in zip(event.wants, places(0, 1, 2, 3), strict=True)
    ]
    for number, want in enumerate(event.wants):
        effects = node.handle(ev.BlockVerified(want.handle, True), 0.02)
        # The holder must keep what has not been taken: everything is credited when the last has been.
        assert bool(sent(effects, m.Credit)) is (number == 3)
    assert sent(effects, m.Credit)[-1].received == 4 * BLOCK
    (finish,) = of(effects, ev.FinishFetch)
    assert [found.handle for found in finish.found] == [want.handle for want in event.wants]
    assert (finish.missed, finish.wait_lost_s) == ((), 0.0)
    assert node.stats().pulls == node.stats().fetches == 0


def test_the_holder_keeps_what_is_offered_until_it_is_credited() -> None:
    node = node_of()
    node.handle(ev.AnchorsPublished((held(DOC),)), 0.0)
    pull = m.Pull(1, tuple(m.PullBlock(DOC.anchor_id, i, BLOCK) for i in range(4)), 2**24, shared=True)
    node.handle(ev.MessageReceived(PEER.node_id, pull), 0.1)
    assert node.stats().uploads == 1
    node.handle(ev.MessageReceived(PEER.node_id, m.Credit(1, 4 * BLOCK)), 0.2)
    assert node.stats().uploads == 0


def test_blocks_that_are_being_taken_are_not_a_stall() -> None:
    node, event = node_of(), request()
    (pull,) = sent(node.handle(event, 0.0), m.Pull)
    node.handle(offer(pull.pull_id, 0, 1, 2, 3), 0.01)
    assert not of(wait(node, 1.5), ev.FinishFetch)
    for want in event.wants:
        effects = node.handle(ev.BlockVerified(want.handle, True), 2.0)
    (finish,) = of(effects, ev.FinishFetch)
    assert len(finish.found) == 4 and finish.wait_lost_s == 0.0


def test_a_deadline_during_the_taking_is_kept() -> None:
    node, event = node_of(), request(deadline=1.0)
    (pull,) = sent(node.handle(event, 0.0), m.Pull)
    node.handle(offer(pull.pull_id, 0, 1, 2, 3), 0.01)
    effects = node.handle(ev.TimerExpired(), 1.0)
    (finish,) = of(effects, ev.FinishFetch)
    assert {missed.miss.reason for missed in finish.missed} == {MissReason.DEADLINE}
    assert sorted(drop.handle for drop in of(effects, ev.DropBlock)) == sorted(want.handle for want in event.wants)
    assert all(node.handle(ev.BlockVerified(want.handle, True), 1.1) == [] for want in event.wants)


# ------------------------------------------------------------------------------------------------------ it cannot be taken


def test_what_cannot_be_taken_is_sent_by_the_same_holder_in_the_same_fetch() -> None:
    node, event = node_of(), request()
    (pull,) = sent(node.handle(event, 0.0), m.Pull)
    node.handle(offer(pull.pull_id, 0, 1, 2, 3), 0.01)
    effects: list[ev.Effect] = []
    for want, ok in zip(event.wants, (True, False, True, False), strict=True):
        effects += node.handle(ev.BlockVerified(want.handle, ok), 0.02)
    again = sent(effects, m.Pull)
    assert not any(pull.shared for pull in again)
    assert [block.index for pull in again for block in pull.blocks] == [1, 3]
    assert not of(effects, ev.ReportPeer) and node.stats().violations == 0
    effects = []
    for pull in again:
        for ordinal, block in enumerate(pull.blocks):
            effects += node.handle(chunk(pull.pull_id, ordinal), 0.03)
            effects += node.handle(ev.BlockVerified(event.wants[block.index].handle, True), 0.04)
    (finish,) = of(effects, ev.FinishFetch)
    assert len(finish.found) == 4 and finish.wait_lost_s == 0.0
    assert node.stats().pulls == 0


def test_a_holder_whose_memory_cannot_be_read_is_asked_for_chunks_for_a_while() -> None:
    node = node_of()

    def asks_shared(fetch_id: int, now: float, ok: bool) -> bool:
        event = request(fetch_id, now + 1.0)
        (pull,) = sent(node.handle(event, now), m.Pull)
        effects: list[ev.Effect] = []
        if pull.shared:
            node.handle(offer(pull.pull_id, 0, 1, 2, 3), now)
            for want in event.wants:
                effects += node.handle(ev.BlockVerified(want.handle, ok), now)
        waiting = sent(effects, m.Pull) if pull.shared else [pull]
        while waiting:
            each = waiting.pop()
            for ordinal, block in enumerate(each.blocks):
                waiting += sent(node.handle(chunk(each.pull_id, ordinal), now), m.Pull)
                waiting += sent(node.handle(ev.BlockVerified(event.wants[block.index].handle, True), now), m.Pull)
        assert node.stats().fetches == 0
        return bool(pull.shared)

    assert asks_shared(1, 0.1, ok=False)
    assert not asks_shared(2, 0.2, ok=False)
    assert not asks_shared(3, SENT_INSTEAD_FIRST_S, ok=False)
    node.handle(hello(PEER), SENT_INSTEAD_FIRST_S + 0.1)
    assert asks_shared(4, SENT_INSTEAD_FIRST_S + 0.2, ok=True)
    assert asks_shared(5, SENT_INSTEAD_FIRST_S + 0.3, ok=True)


# --------------------------------------------------------------------------------------------------------------- violations


@pytest.mark.parametrize(
    "bad",
    [
        lambda pull: offer(pull, 4),
        lambda pull: offer(pull, 0, length=BLOCK - 1),
        lambda pull: offer(pull, 0, length=BLOCK + 1),
        lambda pull: offer(pull, 0, 0),
        lambda pull: offer(pull, 1, 0),
    ],
)
def test_offers_that_do_not_continue_the_pull_end_it(bad: Any) -> None:
    node, event = node_of(), request()
    (pull,) = sent(node.handle(event, 0.0), m.Pull)
    effects = node.handle(bad(pull.pull_id), 0.01)
    (finish,) = of(effects, ev.FinishFetch)
    assert {missed.miss.reason for missed in finish.missed} == {MissReason.LENGTH_MISMATCH}
    assert node.stats().violations == 1 and not of(effects, ev.AdoptShared)


def test_what_nobody_asked_to_share_may_not_be_shared() -> None:
    node = node_of(record(1))  # a peer of no host, which offers all the same
    event = ev.FetchRequested(1, (PEER.node_id,), wants(DOC), 5.0)
    (pull,) = sent(node.handle(event, 0.0), m.Pull)
    effects = node.handle(offer(pull.pull_id, 0), 0.01)
    assert node.stats().violations == 1 and not of(effects, ev.AdoptShared)


def test_offers_of_others_and_of_ended_pulls_change_nothing() -> None:
    node = node_of()
    other = record(2, **SHARES)
    node.handle(hello(other), 0.0)
    (pull,) = sent(node.handle(request(), 0.0), m.Pull)
    assert not of(node.handle(offer(pull.pull_id, 0, sender=other.node_id), 0.01), ev.AdoptShared)
    assert node.stats().violations == 1
    node.handle(ev.FetchCancelled(1), 0.02)
    assert node.handle(offer(pull.pull_id, 0), 0.03) == []
    assert node.handle(offer(77, 0), 0.03) == []
    assert node.stats().violations == 1


def test_offers_that_no_region_could_hold_are_not_even_messages() -> None:
    for offset, length in ((m.SHARED_BYTES_MAX, 1), (m.SHARED_BYTES_MAX - 5, 6)):
        with pytest.raises(ValueError, match="largest shared memory"):
            m.SharedBlock(0, 1, 1, offset, length)


# ------------------------------------------------------------------------------------------------------------ in any order


class SharedMachine(PullMachine):
    """Everything that `PullMachine` does, between nodes that share memory: chunks and offers in any order."""

    KEEPS_TO_PIECES = False
    """What memory does not give is asked for as chunks of the same pull."""

    def __init__(self) -> None:
        self.offered: set[BlockHandle] = set()
        super().__init__()
        self.node = make_node(0, config=self.node_config, **SHARES)
        self.peers = [record(1, **SHARES), record(2, **SHARES)]
        for peer in self.peers:
            self.do(hello(peer))

    def carry_out(self, effect: ev.Effect) -> None:
        if isinstance(effect, ev.AdoptShared):
            assert self.references[effect.handle] > 0, "adopted into a dropped handle"
            assert effect.kv_bytes == self.sizes[effect.handle] == effect.source.length
            self.verifying.append(effect.handle)
            self.offered.add(effect.handle)
        else:
            super().carry_out(effect)

    def do(self, event: ev.Event) -> None:
        if isinstance(event, ev.BlockVerified) and event.handle in self.offered:
            self.offered.discard(event.handle)
            if event.ok:  # the whole block was there at once
                self.filled[event.handle] = self.sizes[event.handle]
        super().do(event)

    @precondition(lambda self: self.pulls)
    @rule(data=st.data(), count=st.integers(1, 3))
    def honest_offer(self, data: Any, count: int) -> None:
        holder, pull = self.pick(data)
        fresh = [
            ordinal
            for ordinal, block in enumerate(pull.blocks)
            if not block.offset and (pull.pull_id, ordinal) not in self.received
        ]
        if not pull.shared or not fresh:
            return
        for ordinal in fresh[:count]:
            self.received[pull.pull_id, ordinal] = pull.blocks[ordinal].kv_bytes
        blocks = tuple(m.SharedBlock(o, 3, 4, 0, pull.blocks[o].kv_bytes) for o in fresh[:count])
        self.do(ev.MessageReceived(holder, m.SharedBlocks(pull.pull_id, 7, blocks)))

    @precondition(lambda self: self.pulls)
    @rule(
        data=st.data(), ordinals=st.lists(st.integers(0, 7), min_size=1, max_size=3), length=st.sampled_from([255, 256])
    )
    def any_offer(self, data: Any, ordinals: list[int], length: int) -> None:
        holder, pull = self.pick(data)
        blocks = tuple(m.SharedBlock(ordinal, 3, 4, 0, length) for ordinal in ordinals)
        self.do(ev.MessageReceived(holder, m.SharedBlocks(pull.pull_id, 7, blocks)))


SharedMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestSharedPulls = SharedMachine.TestCase
