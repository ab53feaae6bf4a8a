"""What a member may do to a node's loop, disk and log, and whom it may do that in the name of."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import zmq
from keyed_nodes import allowed
from net_nodes import KEYS, MODEL, TestNode, wait_until

from kvcomm_p2p.net.admission import WAITING_EACH_MAX, WAITING_MAX, Admission
from kvcomm_p2p.net.counters import WireCounters
from kvcomm_p2p.net.durable import open_life
from kvcomm_p2p.net.gate import Gate
from kvcomm_p2p.net.identity import Identity
from kvcomm_p2p.net.limits import WORK_BURST_S, PeerLimits
from kvcomm_p2p.net.peer_reports import LINES_BURST, PeerReports
from kvcomm_p2p.net.seal import Sealer
from kvcomm_p2p.net.signatures import signed_record
from kvcomm_p2p.net.zmq_transport import ZmqTransport
from kvcomm_p2p.protocol.events import ReportPeer, SaveState
from kvcomm_p2p.protocol.ids import NodeId
from kvcomm_p2p.protocol.messages import (
    PROTOCOL_VERSION,
    Hello,
    MemberRecord,
    Message,
    Ping,
    Rumour,
    Status,
    Syn,
    Welcome,
)
from kvcomm_p2p.protocol.wire import encode

ME, PEER, LIAR = Identity.new(), Identity.new(), Identity.new()
SEAL = Sealer(KEYS.seal)


def node_of(identity: Identity, name: str) -> MemberRecord:
    member = MemberRecord(identity.public.node_id(name), 1, name, MODEL, "127.0.0.1:1", "127.0.0.1:2")
    return signed_record(identity, member)


def admission(gate: Gate, limits: PeerLimits | None = None) -> tuple[Admission, WireCounters]:
    """Call on a loop."""
    counters = WireCounters()
    made = Admission(gate, Sealer(KEYS.seal), counters, limits)
    made.start()
    return made, counters


def opens(made: Admission, sender: NodeId, message: Message, key: bytes) -> bool:
    return made.open(SEAL.seal(encode(sender, message)), key) is not None


def test_nobody_uses_up_the_limits_of_another_and_new_names_bring_no_new_room() -> None:
    async def check() -> None:
        gate = Gate(ME, (allowed(PEER, "peer"), allowed(LIAR, "liar")), required=True)
        gate.learn((node_of(PEER, "n"), node_of(LIAR, "n")))
        made, counters = admission(gate, PeerLimits(frames_per_s=10.0, burst_s=1.0))
        peer, theirs, liars = PEER.public.node_id("n"), PEER.public.curve, LIAR.public.curve
        assert sum(opens(made, peer, Syn(bytes(8), bytes(8)), liars) for _ in range(50)) == 10
        assert counters.dropped["over_limit"] == 40
        assert all(opens(made, peer, Syn(bytes(8), bytes(8)), theirs) for _ in range(9))
        fresh = (NodeId(number.to_bytes(16, "big")) for number in range(50))
        assert not any(opens(made, name, Syn(bytes(8), bytes(8)), liars) for name in fresh)
        assert opens(made, LIAR.public.node_id("n"), Syn(bytes(8), bytes(8)), liars)
        made.stop()

    asyncio.run(check())


def test_work_is_limited_per_key_and_refills() -> None:
    limits = PeerLimits(work_s_per_s=0.1)
    limits.charge(b"liar", WORK_BURST_S + 1.0, 5.0)
    assert not limits.has_work_left(b"liar", 14.9) and limits.has_work_left(b"liar", 15.1)
    assert limits.has_work_left(b"peer", 5.0)
    limits.charge(b"peer", 0.1, 5.0)
    assert limits.has_work_left(b"peer", 5.0)
    assert not limits.has_work_left(b"liar", 4.0), "a clock that runs backwards gives nothing"


def test_messages_of_one_key_that_wait_for_signatures_leave_room_for_others() -> None:
    async def check() -> None:
        gate = Gate(ME, (allowed(PEER, "peer"), allowed(LIAR, "liar")), required=True)
        made, counters = admission(gate)
        came: list[NodeId] = []

        def take(sender: NodeId, message: Message) -> None:
            came.append(sender)

        for number in range(WAITING_MAX + 10):
            liar = node_of(LIAR, f"n{number}")
            made.admit(liar.node_id, Welcome(liar, ()), LIAR.public.curve, take)
        assert counters.dropped["unverified"] == WAITING_MAX + 10 - WAITING_EACH_MAX
        peer = node_of(PEER, "n")
        made.admit(peer.node_id, Hello(1, PROTOCOL_VERSION, bytes(16), peer), PEER.public.curve, take)
        while peer.node_id not in came:
            await asyncio.sleep(0.01)
        assert len(came) == WAITING_EACH_MAX + 1
        made.admit(peer.node_id, Welcome(node_of(PEER, "n"), (node_of(PEER, "m"),)), PEER.public.curve, take)
        assert counters.dropped["unverified"] == WAITING_MAX + 10 - WAITING_EACH_MAX, "what was taken makes room"
        made.stop()

    asyncio.run(asyncio.wait_for(check(), 10.0))


def test_reports_of_peers_are_logged_only_so_often(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvcomm_p2p.net")
    reports = PeerReports()
    report = ReportPeer(NodeId(bytes(16)), "n", "refused", "d")
    for _ in range(5000):
        reports.write(report, 1.0)
    assert len(caplog.records) == LINES_BURST
    reports.write(report, 1.2)
    assert [record.getMessage() for record in caplog.records[-2:]] == [
        "4000 more reports of peers were not logged",
        "peer n (00000000) refused: d",
    ]


def test_lies_about_a_node_cost_it_no_queue_of_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each makes it contradict with a higher incarnation, which it keeps on disk."""
    life = open_life(tmp_path, "default", "a")
    writing, written, go_on = threading.Event(), [], threading.Event()

    def slowly(state: SaveState, keys: Sequence[bytes]) -> None:
        written.append(state.incarnation)
        writing.set()
        assert go_on.wait(5.0)

    monkeypatch.setattr(life, "save", slowly)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with TestNode("a", ZmqTransport(), life=life) as node:
        liar = context.socket(zmq.DEALER)
        liar.connect(f"tcp://{node.driver.addresses.control}")
        for incarnation in range(300):
            rumour = Rumour(node.driver.node_id, life.epoch, incarnation, Status.SUSPECT)
            liar.send(SEAL.seal(encode(NodeId(b"l" * 16), Ping(1, (rumour,)))))
        assert writing.wait(5.0)
        assert wait_until(lambda: node.ask(lambda driver: driver.stats().wire.received["Ping"]) == 300)
        go_on.set()
        assert wait_until(lambda: 300 in written)
        time.sleep(0.05)
        assert len(written) <= 3 and written[-1] == 300
        liar.close(0)
    context.term()
