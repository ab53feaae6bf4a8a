"""Bytes of blocks in a World: sending them or saying where they stand, taking them in, checking them. As `net.block_mover`.

Nobody looks at the bytes; digests are right unless a holder was told to spoil them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvcomm_p2p.errors import InternalError
from kvcomm_p2p.protocol import events as ev
from kvcomm_p2p.protocol.anchors import BlockHandle
from kvcomm_p2p.protocol.messages import PULL_BLOCKS_MAX, Chunk, EncodedBlock, SharedBlock, SharedBlocks
from kvcomm_p2p.sim.encoding import Encoders, in_hashing_thread
from kvcomm_p2p.sim.machine import SimNode

if TYPE_CHECKING:
    from kvcomm_p2p.sim.world import World

SHARED_DESCRIPTOR, FIRST_PID, FIRST_FILE = 40, 100_000, 100_000
"""Numbers of open files, processes and inodes are about this large on a real machine; only their length on the wire matters."""

STATED_DIGEST = bytes(32)
"""Of a block as int8: nobody has its bytes to compare."""

SHARED_PLACES = 500
"""Blocks stand behind each other in shared memory."""


class BlockMoves:
    """Of all machines of a world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._encoders = Encoders(world.hardware.int8_encode_bytes_per_s)
        self._payload: tuple[int, BlockHandle] | None = None
        self._stands_at: dict[tuple[int, int, int, int], BlockHandle] = {}
        """What was last told to stand at a place."""

    # -------------------------------------------------------------------------------------------------------------- out

    def send(self, machine: SimNode, effect: ev.SendBlock) -> None:
        """All chunks of a block, or, where the peer can read it, where it stands: that waits for `flush`."""
        world = self._world
        if effect.handle not in machine.references:
            unavailable = ev.BlockUnavailable(effect.to, effect.pull_id, effect.ordinal)
            world.post(0.0, world.delivery(machine, lambda: unavailable))
            return
        if effect.encoded_bytes:
            generation = machine.generation
            ready_at = self._encoders.ready_at(machine, effect, world.now)
            world.at(
                ready_at, lambda: self._send_encoded(machine, effect) if machine.generation == generation else None
            )
            return
        if effect.shared:
            offset = effect.handle.slot % SHARED_PLACES * effect.kv_bytes
            file_id = FIRST_FILE + machine.number
            place = SharedBlock(effect.ordinal, SHARED_DESCRIPTOR, file_id, offset, effect.kv_bytes)
            self._stands_at[place.file_id, place.ordinal, place.offset, place.length] = effect.handle
            machine.offers.append((effect.to, effect.pull_id, place))
            world.payload_bytes_of[machine.number] += effect.kv_bytes
            return
        self.flush(machine)
        self._send_chunks(machine, effect, effect.kv_bytes)

    def _send_encoded(self, machine: SimNode, effect: ev.SendBlock) -> None:
        """What it comes to, then the block, on one connection: nothing overtakes."""
        world, target = self._world, self._world.node_of(effect.to)
        frame, size = world.charged(machine, EncodedBlock(effect.pull_id, effect.ordinal, STATED_DIGEST))
        flow = target.number, effect.pull_id
        world.links.enqueue(machine.number, flow, size, world.delivery(target, frame.event))
        self._send_chunks(machine, effect, effect.encoded_bytes)

    def _send_chunks(self, machine: SimNode, effect: ev.SendBlock, wire_bytes: int) -> None:
        world, target = self._world, self._world.node_of(effect.to)
        for offset in range(effect.offset, wire_bytes, effect.chunk_bytes):
            size = min(effect.chunk_bytes, wire_bytes - offset)
            header = Chunk(effect.pull_id, effect.ordinal, offset, size)
            world.payload_bytes_of[machine.number] += size
            world.links.enqueue(
                machine.number,
                (target.number, effect.pull_id),
                size,
                world.delivery(target, self._chunk(machine, header, effect.handle)),
            )
        if world.links.begin(machine.number):
            self._next_chunk(machine.number)

    def flush(self, machine: SimNode) -> None:
        """Places that wait for one pull go as one message, before anything else does."""
        offers, machine.offers = machine.offers, []
        for (peer, pull_id), group in itertools.groupby(offers, key=lambda offer: offer[:2]):
            blocks = [block for _, _, block in group]
            for at in range(0, len(blocks), PULL_BLOCKS_MAX):
                told = SharedBlocks(pull_id, FIRST_PID + machine.number, tuple(blocks[at : at + PULL_BLOCKS_MAX]))
                self._world.send(machine, ev.SendMessage(peer, "", told, ev.Plane.BULK_REPLY))

    def _chunk(self, machine: SimNode, header: Chunk, handle: BlockHandle) -> Callable[[], ev.Event]:
        sender = machine.node_id

        def arrive() -> ev.Event:
            self._payload = (machine.number, handle)
            return ev.ChunkReceived(sender, header.pull_id, header.ordinal, header.offset, header.length)

        return arrive

    def _next_chunk(self, number: int) -> None:
        sent = self._world.links.send_next(number, self._world.now)
        if sent is None:
            return
        left_at, arrives_at, arrive = sent
        if arrives_at is not None:
            self._world.at(arrives_at, arrive)
        self._world.at(left_at, lambda: self._next_chunk(number))

    # --------------------------------------------------------------------------------------------------------------- in

    def store(self, machine: SimNode, effect: ev.StoreChunk) -> None:
        """A chunk's bytes."""
        if self._payload is None:
            raise InternalError("a chunk was stored that is not being handled")
        number, handle = self._payload
        holder = self._world.nodes[number]
        machine.filled[effect.handle] = effect.kv_bytes
        self._comes_from(machine, effect.handle, holder, handle)
        if holder.spoils or handle in holder.spoiled:
            machine.spoiled[effect.handle] = None

    def verify(self, machine: SimNode, effect: ev.VerifyBlock) -> None:
        """Of a whole block that came as chunks."""
        size = machine.filled.get(effect.handle, 0)
        self._hash(machine, effect.handle, size, effect.handle not in machine.spoiled)

    def adopt(self, machine: SimNode, effect: ev.AdoptShared) -> None:
        """Of a block that stands in shared memory."""
        holder, place = self._world.nodes[effect.source.file_id - FIRST_FILE], effect.source
        source = self._stands_at.get((place.file_id, place.ordinal, place.offset, place.length))
        self._comes_from(machine, effect.handle, holder, source)
        self._hash(machine, effect.handle, effect.kv_bytes, holder.up and not holder.spoils)

    @staticmethod
    def _comes_from(machine: SimNode, handle: BlockHandle, holder: SimNode, source: BlockHandle | None) -> None:
        """Its values are whose they were at the holder."""
        model_id = None if source is None else holder.computed_by.get(source)
        if model_id is not None:
            machine.computed_by[handle] = model_id

    def _hash(self, machine: SimNode, handle: BlockHandle, size: int, ok: bool) -> None:
        world = self._world
        done_at = in_hashing_thread(machine, size / world.hardware.digest_bytes_per_s, world.now)
        world.at(done_at, world.delivery(machine, lambda: ev.BlockVerified(handle, ok)))
