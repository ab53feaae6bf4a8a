"""One simulated machine and the node on it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from kvcomm_p2p.protocol import events as ev
from kvcomm_p2p.protocol.anchors import BlockHandle
from kvcomm_p2p.protocol.config import NodeConfig
from kvcomm_p2p.protocol.ids import ModelId, NodeId
from kvcomm_p2p.protocol.messages import SharedBlock
from kvcomm_p2p.protocol.node import Node

HASH_THREADS = 2
"""As the driver's: so many blocks are checked at a time."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """What one simulated machine takes for what is no computation of the model, in seconds and bytes per second."""

    digest_bytes_per_s: float = 1.5e9
    int8_encode_bytes_per_s: float = 1.7e9
    """KV that one thread encodes for a slow link."""
    frame_s: float = 0.0
    """Processor time per control frame received; frames of a node wait for each other."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What is on a node's disk, as it asked for it: the same that real ones keep (`kvcomm_p2p.net.durable`), apart from who it
    is, which the caller of `World.restart` says."""

    state: ev.SaveState | None = None
    erasures: bytes = b""

    @property
    def before(self) -> dict[str, Any]:
        """What `protocol.node.Node` is given of its earlier lives."""
        incarnation, addresses = (0, ()) if self.state is None else (self.state.incarnation, self.state.addresses)
        return {"incarnation": incarnation, "addresses": addresses, "erasures": self.erasures}


@dataclass(slots=True)
class SimNode:
    """One machine. `generation` counts restarts: what was sent to an earlier one is lost. `alone`: its node has no peers to
    talk to, so its timers are not kept. `offers`: blocks in shared memory that wait to be told of (peer, pull, where); `filled`:
    bytes that came for a reserved handle; `hashed_at`: when each hashing thread will be idle. `computed_by`: whose model's
    values stand behind a handle, wherever they came from. `waiting`: what came while it was frozen, and the moment in which it
    was sent. `kept`: what is on its disk; `found`: what was there when its node began."""

    number: int
    name: str
    node: Node
    config: NodeConfig
    generation: int = 0
    up: bool = True
    frozen: bool = False
    alone: bool = False
    spoils: bool = False
    wake_at: float = math.inf
    free_at: float = 0.0
    thawed_at: float = 0.0
    waiting: list[tuple[Callable[[], ev.Event | None], int]] = field(default_factory=list)
    references: Counter[BlockHandle] = field(default_factory=Counter)
    offers: list[tuple[NodeId, int, SharedBlock]] = field(default_factory=list)
    filled: dict[BlockHandle, int] = field(default_factory=dict)
    hashed_at: list[float] = field(default_factory=lambda: [0.0] * HASH_THREADS)
    spoiled: dict[BlockHandle, None] = field(default_factory=dict)
    computed_by: dict[BlockHandle, ModelId] = field(default_factory=dict)
    contacts: dict[int, float] = field(default_factory=dict)
    fetches: dict[int, Callable[[ev.FinishFetch], None]] = field(default_factory=dict)
    tokens: dict[int, Callable[[ev.FinishTokens], None]] = field(default_factory=dict)
    lookups: dict[int, Callable[[ev.FinishLookup], None]] = field(default_factory=dict)
    kept: Kept = field(default_factory=Kept)
    found: Kept = field(default_factory=Kept)
    next_id: int = 1

    @property
    def node_id(self) -> NodeId:
        return self.node.me.node_id

    def save(self, effect: ev.SaveState | ev.SaveErasures) -> None:
        """Keep this for the next start."""
        if isinstance(effect, ev.SaveState):
            self.kept = replace(self.kept, state=effect)
        else:
            self.kept = replace(self.kept, erasures=effect.packed)

    def let_go(self, handle: BlockHandle) -> bool:
        """One reference to a block less; with the last one everything known of it is gone. False if there was none."""
        if handle not in self.references:
            return False
        self.references[handle] -= 1
        if not self.references[handle]:
            for known in (self.references, self.spoiled, self.filled, self.computed_by):
                known.pop(handle, None)
        return True
