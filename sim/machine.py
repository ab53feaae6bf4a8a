"""One simulated machine and the node on it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from kvcomm_p2p.protocol import events as ev
from kvcomm_p2p.protocol.anchors import BlockHandle
from kvcomm_p2p.protocol.config import NodeConfig
from kvcomm_p2p.protocol.ids import NodeId
from kvcomm_p2p.protocol.node import Node


@dataclass(frozen=True, slots=True)
class Hardware:
    """What one simulated machine takes for what is no computation of the model, in seconds and bytes per second."""

    digest_bytes_per_s: float = 1.5e9
    frame_s: float = 0.0
    """Processor time per control frame received; frames of a node wait for each other."""


@dataclass(slots=True)
class SimNode:
    """One machine. `generation` counts restarts: what was sent to an earlier one is lost. `alone`: its node has no peers to
    talk to, so its timers are not kept."""

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
    waiting: list[Callable[[], ev.Event | None]] = field(default_factory=list)
    references: Counter[BlockHandle] = field(default_factory=Counter)
    spoiled: dict[BlockHandle, None] = field(default_factory=dict)
    contacts: dict[int, float] = field(default_factory=dict)
    fetches: dict[int, Callable[[ev.FinishFetch], None]] = field(default_factory=dict)
    tokens: dict[int, Callable[[ev.FinishTokens], None]] = field(default_factory=dict)
    lookups: dict[int, Callable[[ev.FinishLookup], None]] = field(default_factory=dict)
    saved: ev.SaveState | None = None
    next_id: int = 1

    @property
    def node_id(self) -> NodeId:
        return self.node.me.node_id
