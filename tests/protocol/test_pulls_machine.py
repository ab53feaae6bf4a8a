"""Any order of requests, chunks, failures, cancellations and time: every fetch ends once, in time, and no handle is lost."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from protocol_harness import make_node, meta, record, wants

from kvcomm_p2p.protocol import events as ev
from kvcomm_p2p.protocol import messages as m
from kvcomm_p2p.protocol.anchors import BlockHandle
from kvcomm_p2p.protocol.config import NodeConfig
from kvcomm_p2p.protocol.ids import NodeId
from kvcomm_p2p.protocol.pace import GROWTH_MAX

PEERS = [record(1), record(2), record(3)]
ANCHORS = [meta(label) for label in range(3)]
PIECE = 3 * 256
"""Bytes: fetches of two anchors and more come in pieces."""


def hello(peer: m.MemberRecord) -> ev.MessageReceived:
    return ev.MessageReceived(peer.node_id, m.Hello(m.PROTOCOL_VERSION, m.PROTOCOL_VERSION, bytes(16), peer))


class PullMachine(RuleBasedStateMachine):
    CAPABILITIES: tuple[int, ...] = (0, 0, 0)
    """Of the three peers; this node has those of the first."""

    KEEPS_TO_PIECES = True

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.node_config = NodeConfig(pulls_per_peer_max=2, pull_piece_bytes=PIECE, passing_on_s=0.3)
        self.node = make_node(0, config=self.node_config, capabilities=self.CAPABILITIES[0])
        self.open: dict[int, ev.FetchRequested] = {}
        self.done: dict[int, ev.FinishFetch] = {}
        self.references: dict[BlockHandle, int] = {}
        self.sizes: dict[BlockHandle, int] = {}
        self.filled: dict[BlockHandle, int] = {}
        self.verifying: list[BlockHandle] = []
        self.pulls: dict[int, tuple[NodeId, m.Pull]] = {}
        self.busy = False
        self.received: dict[tuple[int, int], int] = {}
        self.next_fetch = 1
        self.lives = 1
        self.left = False
        for peer in range(len(PEERS)):
            self.say_hello(peer)

    def say_hello(self, peer: int) -> None:
        self.do(hello(record(1 + peer, epoch=self.lives, capabilities=self.CAPABILITIES[peer])))

    def do(self, event: ev.Event) -> None:
        for effect in self.node.handle(event, self.now):
            self.carry_out(effect)

    def carry_out(self, effect: ev.Effect) -> None:
        if isinstance(effect, ev.SendMessage) and isinstance(effect.message, m.Pull):
            assert effect.to is not None
            assert effect.message.pull_id not in self.pulls, "asked twice under one id"
            if self.KEEPS_TO_PIECES:
                assert sum(block.wire_bytes for block in effect.message.blocks) <= GROWTH_MAX * PIECE
            self.pulls[effect.message.pull_id] = (effect.to, effect.message)
        elif isinstance(effect, ev.StoreChunk):
            assert self.references[effect.handle] > 0, "written to a dropped handle"
            assert effect.offset + effect.length <= effect.kv_bytes == self.sizes[effect.handle]
            assert effect.offset == self.filled.get(effect.handle, 0), "written twice, or with a gap"
            self.filled[effect.handle] = effect.offset + effect.length
        elif isinstance(effect, ev.ResetBlock):
            assert self.references[effect.handle] > 0
            self.filled[effect.handle] = 0
        elif isinstance(effect, ev.VerifyBlock):
            assert self.filled[effect.handle] == self.sizes[effect.handle], "checked before it was whole"
            self.verifying.append(effect.handle)
        elif isinstance(effect, ev.DropBlock):
            self.references[effect.handle] -= 1
            assert self.references[effect.handle] >= 0, "dropped twice"
        elif isinstance(effect, ev.RetainBlock):
            assert self.references[effect.handle] > 0
            self.references[effect.handle] += 1
        elif isinstance(effect, ev.FinishFetch):
            self.finish(effect)

    def finish(self, effect: ev.FinishFetch) -> None:
        event = self.open.pop(effect.fetch_id)
        assert effect.fetch_id not in self.done
        self.done[effect.fetch_id] = effect
        # A frozen holder costs one patience, however many are asked; only waiting for busy ones may cost more.
        patience_s = min(NodeConfig().pull_stall_timeout_s, event.stall_s)
        assert 0.0 <= effect.wait_lost_s <= (0.6 if self.busy else patience_s) + 1e-6
        found = {block.key for block in effect.found}
        missed = {block.key for block in effect.missed}
        assert not found & missed and found | missed == {want.key for want in event.wants}
        order = [want.key for want in event.wants]
        assert [block.key for block in effect.found] == [key for key in order if key in found]
        for block in effect.found:
            assert self.references[block.handle] > 0, "handed out a dropped handle"
            assert self.filled[block.handle] == self.sizes[block.handle], "handed out a part"
            self.references[block.handle] -= 1

    @precondition(lambda self: len(self.open) < 6)
    @rule(
        anchors=st.sets(st.integers(0, 2), min_size=1),
        peers=st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True),
        deadline_s=st.floats(0.0, 0.6),
        stall_s=st.sampled_from([0.0, 0.05, math.inf]),
        busy_s=st.sampled_from([0.1, 0.4]),
        passing_on=st.booleans(),
    )
    def fetch(
        self,
        anchors: set[int],
        peers: list[int],
        deadline_s: float,
        stall_s: float = math.inf,
        busy_s: float = 0.4,
        passing_on: bool = False,
    ) -> None:
        wanted = tuple(want for index in sorted(anchors) for want in wants(ANCHORS[index]))
        holders = tuple(PEERS[peer].node_id for peer in peers)
        metas = tuple(ANCHORS[index] for index in sorted(anchors)) if passing_on else ()
        deadline = self.now + deadline_s
        event = ev.FetchRequested(self.next_fetch, holders, wanted, deadline, stall_s, busy_s, metas)
        self.next_fetch += 1
        for want in wanted:
            self.references[want.handle] = 1
            self.sizes[want.handle] = want.kv_bytes
        self.open[event.fetch_id] = event
        self.do(event)

    def pick(self, data: Any) -> tuple[NodeId, m.Pull]:
        return self.pulls[data.draw(st.sampled_from(sorted(self.pulls)[-4:]))]

    @precondition(lambda self: self.pulls)
    @rule(data=st.data(), whole=st.booleans())
    def honest_chunk(self, data: Any, whole: bool) -> None:
        holder, pull = self.pick(data)
        for ordinal, block in enumerate(pull.blocks):
            offset = self.received.get((pull.pull_id, ordinal), block.offset)
            if offset < block.wire_bytes:
                length = block.wire_bytes - offset if whole else min(100, block.wire_bytes - offset)
                self.received[pull.pull_id, ordinal] = offset + length
                self.do(ev.ChunkReceived(holder, pull.pull_id, ordinal, offset, length))
                break

    @precondition(lambda self: self.pulls)
    @rule(
        data=st.data(),
        ordinal=st.integers(0, 7),
        offset=st.integers(0, 300),
        length=st.integers(1, 300),
        liar=st.booleans(),
    )
    def any_chunk(self, data: Any, ordinal: int, offset: int, length: int, liar: bool) -> None:
        holder, pull = self.pick(data)
        sender = next(peer.node_id for peer in PEERS if (peer.node_id != holder) is liar)
        self.do(ev.ChunkReceived(sender, pull.pull_id, ordinal, offset, length))

    @precondition(lambda self: self.pulls)
    @rule(
        data=st.data(),
        ordinal=st.none() | st.integers(0, 6),
        reason=st.sampled_from(m.PullFailedReason),
        referred=st.sets(st.integers(0, 2)),
    )
    def failure(self, data: Any, ordinal: int | None, reason: m.PullFailedReason, referred: set[int]) -> None:
        holder, pull = self.pick(data)
        self.busy = self.busy or reason is m.PullFailedReason.BUSY
        referrals = tuple(PEERS[peer].node_id for peer in sorted(referred))
        self.do(ev.MessageReceived(holder, m.PullFailed(pull.pull_id, ordinal, reason, 0.02, referrals)))

    @precondition(lambda self: self.verifying)
    @rule(ok=st.sampled_from([True, True, True, False]))
    def verified(self, ok: bool) -> None:
        self.do(ev.BlockVerified(self.verifying.pop(0), ok))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def cancel(self, data: Any) -> None:
        self.do(ev.FetchCancelled(data.draw(st.sampled_from(sorted(self.open)))))

    @rule(peer=st.integers(0, 2), back=st.booleans())
    def peer_goes(self, peer: int, back: bool) -> None:
        self.do(ev.PeerUnreachable(PEERS[peer].node_id))
        if back:
            self.lives += 1
            self.say_hello(peer)

    @rule(seconds=st.sampled_from([0.001, 0.05, 0.11, 0.3]))
    def time_passes(self, seconds: float) -> None:
        end = self.now + seconds
        for _ in range(10_000):
            wake_at = self.node.next_deadline()
            if wake_at > end:
                break
            self.now = max(self.now, wake_at)
            self.do(ev.TimerExpired())
        else:
            raise AssertionError("the node wants to be woken again and again at the same time")
        self.now = end

    @invariant()
    def nothing_is_overdue(self) -> None:
        due = [event.deadline for event in self.open.values()]
        assert all(self.node.next_deadline() <= deadline for deadline in due)

    @invariant()
    def budgets_hold(self) -> None:
        table = self.node._pulls._table
        for peer in PEERS:
            assert table.active(peer.node_id) <= 2
        carried = [flight for pull in table.pulls.values() for flight in pull.flights if flight.pull is pull]
        for flight in table.flights.values():
            places = (flight.key in table.waiting) + carried.count(flight) + (flight.handle in table.verifying)
            taken = flight.arrived and flight.pull is not None and flight.pull.shared
            assert places == 1 + taken, "a flight is carried, waits, or is being checked"
        for pull in table.pulls.values():
            assert pull.rival is None or pull.rival.rival is pull

    @invariant()
    def idle_means_empty(self) -> None:
        if not self.open:
            stats = self.node.stats()
            assert stats.fetches == stats.pulls == 0

    def teardown(self) -> None:
        if self.next_fetch % 2:
            self.do(ev.LeaveRequested())
        else:
            self.time_passes(1.0)
        assert not self.open
        assert not any(self.references.values()), "a handle has no owner"
        table = self.node._pulls._table
        assert not (table.flights or table.verifying or table.waiting or table.pulls)


PullMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestPulls = PullMachine.TestCase


def test_machine_can_fail() -> None:
    """The machine notices a handle that is dropped twice."""
    machine = PullMachine()
    machine.fetch({0}, [0], 0.5)
    handle = machine.open[1].wants[0].handle
    machine.carry_out(ev.DropBlock(handle))
    with pytest.raises(AssertionError, match="dropped twice"):
        machine.carry_out(ev.DropBlock(handle))
