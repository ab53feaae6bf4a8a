"""Connections that are half open, never read, silent without an end, or too many."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import zmq
from cluster_proxy import Relays
from net_nodes import CONFIG, KEYS, MODEL, TestNode, make_anchor, wait_until, wants_of

from kvcomm_p2p.evaluation.cluster_processes import Cluster
from kvcomm_p2p.evaluation.process_use import process_use
from kvcomm_p2p.net.lossy_transport import LossyTransport
from kvcomm_p2p.net.seal import Sealer
from kvcomm_p2p.net.zmq_transport import ZmqTransport
from kvcomm_p2p.protocol.ids import NodeId
from kvcomm_p2p.protocol.messages import PROTOCOL_VERSION, Hello, MemberRecord, Message, Pull, PullBlock
from kvcomm_p2p.protocol.wire import encode

BLOCK_BYTES = 1 << 20
SHAPE = {"blocks": 16, "block_kv_bytes": BLOCK_BYTES}
QUICK = {"gossip_interval_s": 0.05, "probe_interval_s": 0.2, "probe_timeout_s": 0.1, "join_retry_s": 0.05}


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


@contextlib.contextmanager
def silent_connections(addresses: list[str], count: int) -> Iterator[list[socket.socket]]:
    """So many connections to each, which never say a word."""
    opened: list[socket.socket] = []
    try:
        for address in addresses:
            opened += [socket.create_connection(("127.0.0.1", port_of(address)), 2) for _ in range(count)]
        yield opened
    finally:
        for each in opened:
            each.close()


def test_connections_that_say_nothing_are_closed_and_disturb_nobody() -> None:
    with TestNode("holder", ZmqTransport()) as holder, TestNode("puller", ZmqTransport()) as puller:
        anchor = make_anchor(holder.store, 1, blocks=4, block_kv_bytes=1 << 16)
        holder.hold(anchor)
        addresses = [holder.driver.addresses.control, holder.driver.addresses.bulk]
        with silent_connections(addresses, 50) as opened:
            assert puller.join(addresses[0]).result == 1
            result = puller.driver.run(puller.driver.fetch(holder.driver.node_id, wants_of(anchor), 5.0)).result(10)
            assert len(result.found) == 4
            for each in opened:
                each.settimeout(6.0)
                while each.recv(1024):  # ZeroMQ's greeting, then the end (HANDSHAKE_MS)
                    pass
        for handle in result.found.values():
            puller.store.drop(handle)


def test_a_puller_that_never_reads_gets_its_credit_and_loses_its_upload() -> None:
    """The holder keeps to the credit, frees the slot after the lease, and serves others meanwhile."""
    config = replace(CONFIG, uploads_max=2, upload_lease_s=0.5)
    holding = LossyTransport(ZmqTransport())
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with TestNode("holder", holding, config=config) as holder, TestNode("puller", ZmqTransport()) as puller:
        try:
            anchor = make_anchor(holder.store, 1, blocks=16, block_kv_bytes=BLOCK_BYTES)
            holder.hold(anchor)
            puller.join(holder.driver.addresses.control)
            lazy = [context.socket(zmq.DEALER) for _ in range(2)]
            for each, address in zip(
                lazy, (holder.driver.addresses.control, holder.driver.addresses.bulk), strict=True
            ):
                each.setsockopt(zmq.RCVHWM, 1)
                each.connect(f"tcp://{address}")
            me = NodeId(b"lazy".ljust(16))
            record = MemberRecord(me, 1, "lazy", MODEL, "127.0.0.1:1", "127.0.0.1:1")
            lazy[0].send(_sealed(me, Hello(PROTOCOL_VERSION, PROTOCOL_VERSION, CONFIG.cluster_id, record)))
            assert wait_until(lambda: any(peer.name == "lazy" for peer in holder.ask(lambda d: d.peers())))
            blocks = tuple(PullBlock(key.anchor_id, key.index, size) for key, size, _ in wants_of(anchor))
            credit = 4 * BLOCK_BYTES
            lazy[1].send(_sealed(me, Pull(1, blocks, credit)))
            assert wait_until(lambda: holder.ask(lambda d: d.stats().node.uploads) == 1)
            result = puller.driver.run(puller.driver.fetch(holder.driver.node_id, wants_of(anchor), 10.0)).result(15)
            assert len(result.found) == 16
            assert wait_until(lambda: holder.ask(lambda d: d.stats().node.uploads) == 0, 3.0)
            sent = holder.ask(lambda d: d.stats().wire.payload_bytes_sent) - 16 * BLOCK_BYTES
            assert 0 < sent <= credit + BLOCK_BYTES
            for handle in result.found.values():
                puller.store.drop(handle)
        finally:
            context.destroy(linger=0)


def _sealed(sender: NodeId, message: Message) -> bytes:
    return Sealer(KEYS.seal).seal(encode(sender, message))


def test_a_peer_that_vanishes_without_closing_costs_a_quarter_second_and_is_found_dead() -> None:
    """No FIN, no RST: its machine has lost power. It is reached through a relay that falls silent."""
    with Cluster(config=QUICK) as cluster:
        (far,) = cluster.start(1, advertise_host="127.0.0.2")
        far.ask("publish", numbers=[1], shape=SHAPE)
        with Relays("127.0.0.2", [port_of(address) for address in far.addresses]) as relays:
            near, other = cluster.start(2)
            near.ask("join", seeds=[far.control])
            other.ask("join", seeds=[near.control])
            cluster.all("wait", timeout_s=10, alive=2)
            assert near.ask("fetch", holder=far.node_id, number=1, shape=SHAPE)["found"] == 16
            relays.fall_silent(after_bytes=4 << 20)
            answer = near.ask("fetch", holder=far.node_id, number=1, shape=SHAPE)
            assert answer["missed"] and answer["right"]
            assert answer["wait_lost_s"] <= 0.25
            for node in (near, other):
                node.ask("wait", timeout_s=20, gone=far.name)
            assert near.ask("stats")["failures"] == 0


def test_a_peer_that_takes_nothing_costs_a_bounded_queue() -> None:
    """A stopped process accepts connections and bytes until its buffers are full; then frames are lost, not kept."""
    transport = ZmqTransport()
    with Cluster() as cluster, TestNode("talker", transport) as talker:
        (deaf,) = cluster.start()
        deaf.signal(signal.SIGSTOP)
        frame = os.urandom(60_000)

        async def flood() -> int:
            return sum(not transport.send_control(deaf.control, frame) for _ in range(3000))

        before = process_use()["rss_bytes"]
        began = time.monotonic()
        lost = talker.driver.run(flood()).result(30)
        assert time.monotonic() - began < 5.0  # it never blocked
        assert lost > 2000
        assert process_use()["rss_bytes"] - before < 64 << 20


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="limits of another process: Linux only")
def test_a_full_table_of_descriptors_turns_newcomers_away_and_keeps_the_old() -> None:
    with Cluster(config=QUICK) as cluster:
        (crowded,) = cluster.start()
        (puller,) = cluster.start()
        cluster.join([puller])
        crowded.ask("publish", numbers=[1], shape={"blocks": 4, "block_kv_bytes": 1 << 16})
        limit = int(process_use(crowded.pid)["descriptors"]) + 20
        resource.prlimit(crowded.pid, resource.RLIMIT_NOFILE, (limit, limit))
        wanted = {"holder": crowded.node_id, "number": 1, "shape": {"blocks": 4, "block_kv_bytes": 1 << 16}}
        assert puller.ask("fetch", **wanted)["found"] == 4
        with silent_connections(crowded.addresses, 40):
            time.sleep(0.3)
            assert process_use(crowded.pid)["descriptors"] >= limit - 2
            assert puller.ask("fetch", **wanted)["found"] == 4
            assert crowded.ask("stats")["failures"] == 0
        (late,) = cluster.start()
        cluster.join([late])
        assert late.ask("fetch", **wanted)["found"] == 4
        assert {peer[2] for peer in late.ask("peers")["peers"]} == {"alive"}
