"""Real nodes over a transport of choice, for tests: cheap to make, joined by their own protocol."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import numpy as np

from kvcomm_p2p.net.driver import Driver
from kvcomm_p2p.net.durable import NodeLife
from kvcomm_p2p.net.keys import ClusterKeys
from kvcomm_p2p.net.shared_memory import SharedMemory, host_tag
from kvcomm_p2p.net.transport import Addresses, Transport
from kvcomm_p2p.protocol.anchors import BLOCK_TOKENS, AnchorMeta, BlockKey, HeldAnchor, KVLayout, Visibility
from kvcomm_p2p.protocol.config import NodeConfig
from kvcomm_p2p.protocol.events import FinishJoin
from kvcomm_p2p.protocol.ids import AnchorId, ChainHash, ModelId, NodeId, SequenceId
from kvcomm_p2p.protocol.messages import Capability, MemberRecord
from kvcomm_p2p.protocol.node import Node
from kvcomm_p2p.store import BlockStore

KEYS = ClusterKeys.derive(b"k" * 32)
MODEL = ModelId(b"m" * 16)
CONFIG = NodeConfig(gossip_interval_s=0.05, join_retry_s=0.05)

T = TypeVar("T")


class TestNode:
    """A driver with its store. Use as a context manager."""

    __test__ = False

    def __init__(
        self,
        name: str,
        transport: Transport,
        *,
        config: NodeConfig = CONFIG,
        keys: ClusterKeys = KEYS,
        seed: int = 0,
        shared: SharedMemory | None = None,
        life: NodeLife | None = None,
        layout: KVLayout | None = None,
    ) -> None:
        """`shared`: shares memory with others on this machine that do. `life`: who it is and was before. `layout`: sends
        and asks for blocks as int8."""
        rng = random.Random(f"{name}{seed}")

        def make(addresses: Addresses, now: float) -> Node:
            me = MemberRecord(
                node_id=NodeId(rng.randbytes(16)) if life is None else life.node_id,
                epoch=1 if life is None else life.epoch,
                name=name,
                model_id=MODEL,
                control=addresses.control,
                bulk=addresses.bulk,
                host=host_tag(keys.content) if shared else b"",
                capabilities=(Capability.SHARED_MEMORY if shared else 0) | (Capability.INT8 if layout else 0),
            )
            if life is None:
                return Node(config, me=me, rng=rng, now=now)
            return Node(config, me=me, rng=rng, now=now, **life.before)

        self.store = BlockStore(shared)
        self.driver = Driver(make, transport, self.store, keys, life=life, layout=layout)

    def __enter__(self) -> TestNode:
        self.driver.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.driver.stop()

    def join(self, address: str, timeout_s: float = 5.0) -> FinishJoin:
        return self.driver.run(self.driver.join([address], timeout_s)).result(timeout_s + 5)

    def hold(self, anchor: HeldAnchor) -> None:
        self.driver.run(self.driver.publish([anchor])).result(5)

    def ask(self, question: Callable[[Driver], T]) -> T:
        """Evaluate on the driver's loop."""

        async def answer() -> T:
            return question(self.driver)

        return self.driver.run(answer()).result(5)


def block_bytes(kv_bytes: int, anchor: int, index: int) -> bytes:
    """Reproducible contents of a block."""
    return np.random.default_rng([anchor, index]).integers(0, 256, kv_bytes, dtype=np.uint8).tobytes()


def make_anchor(store: BlockStore, number: int, *, blocks: int = 4, block_kv_bytes: int = 1 << 16) -> HeldAnchor:
    """An anchor of whole blocks whose bytes are in `store`. Equal numbers and sizes give equal anchors everywhere."""
    contents = [block_bytes(block_kv_bytes, number, index) for index in range(blocks)]
    composed = store.compose([block_kv_bytes] * blocks)
    for buffer, content in zip(composed.buffers, contents, strict=True):
        buffer[:] = content
    composed.finish()
    handles = composed.put()
    return replace(describe(number, blocks, block_kv_bytes, contents), handles=handles)


def describe(number: int, blocks: int, block_kv_bytes: int, contents: list[bytes] | None = None) -> HeldAnchor:
    """What `make_anchor` publishes, without bytes in a store."""
    contents = contents or [block_bytes(block_kv_bytes, number, index) for index in range(blocks)]
    tokens = blocks * BLOCK_TOKENS
    meta = AnchorMeta(
        anchor_id=AnchorId(number.to_bytes(16, "big")),
        model_id=MODEL,
        sequence_id=SequenceId(number.to_bytes(8, "big")),
        start=0,
        end=tokens,
        chain_end=ChainHash(b""),
        fingerprints=b"",
        hops=0,
        visibility=Visibility.PUBLIC,
        group=b"",
        kv_bytes=blocks * block_kv_bytes,
    )
    digests = tuple(hashlib.sha256(content).digest() for content in contents)
    return HeldAnchor(meta, np.arange(tokens, dtype=np.uint32), (), digests)


def wants_of(anchor: HeldAnchor) -> list[tuple[BlockKey, int, bytes]]:
    """What `Driver.fetch` takes, for the whole anchor."""
    kv_bytes = anchor.meta.kv_bytes // anchor.meta.blocks
    return [(BlockKey(anchor.meta.anchor_id, i), kv_bytes, digest) for i, digest in enumerate(anchor.digests)]


def wait_until(condition: Callable[[], bool], timeout_s: float = 5.0) -> bool:
    """Whether `condition` becomes true in time."""
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True
