"""Nodes that show everything to a recorder, and nodes that live through what was recorded."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from kvcomm_p2p.protocol.config import NodeConfig
from kvcomm_p2p.protocol.erasure_names import Places, finder
from kvcomm_p2p.protocol.events import Effect, Event
from kvcomm_p2p.protocol.kgrams import U64, TokenIds
from kvcomm_p2p.protocol.messages import MemberRecord
from kvcomm_p2p.protocol.node import Node


class Tape(Protocol):
    """What a recorded node needs of `recorder.Recorder`."""

    def begin(
        self, config: NodeConfig, me: MemberRecord, rng: random.Random, now: float, more: Mapping[str, Any]
    ) -> None: ...

    def add(
        self, event: Event, now: float, effects: Sequence[Effect] | None, found: Sequence[Sequence[int]] = ()
    ) -> None: ...


class RecordedNode(Node):
    """A node that shows its recorder every event with its effects."""

    def __init__(
        self, config: NodeConfig, *, me: MemberRecord, rng: random.Random, now: float, recorder: Tape, **more: Any
    ) -> None:
        """`more`: other arguments of `Node`."""
        recorder.begin(config, me, rng, now, more)
        self._recorder = recorder
        self._find = finder(config.erasing_key)
        self._found: list[list[int]] = []
        super().__init__(config, me=me, rng=rng, now=now, find_stretches=self._look, **more)

    def handle(self, event: Event, now: float) -> list[Effect]:
        """See `Node.handle`."""
        self._found = []
        try:
            effects = super().handle(event, now)
        except Exception:
            self._recorder.add(event, now, None, self._found)
            raise
        self._recorder.add(event, now, effects, self._found)
        return effects

    def _look(self, token_ids: TokenIds, tokens: int, table: U64) -> Places:
        places = self._find(token_ids, tokens, table)
        self._found.append(places.tolist())
        return places


class ReplayedNode(Node):
    """A node that finds erased content where the recorded one did: it has neither the key nor, perhaps, the token ids."""

    def __init__(self, config: NodeConfig, *, me: MemberRecord, rng: random.Random, now: float, **more: Any) -> None:
        self._to_find: deque[tuple[int, ...]] = deque()
        super().__init__(config, me=me, rng=rng, now=now, find_stretches=self._look, **more)

    def replay(self, event: Event, now: float, found: Iterable[tuple[int, ...]]) -> list[Effect]:
        """Handle an event with which looks for erased content `found` this. Raises what the node raises."""
        self._to_find = deque(found)
        return self.handle(event, now)

    def _look(self, token_ids: TokenIds, tokens: int, table: U64) -> Places:
        return np.array(self._to_find.popleft() if self._to_find else (), dtype=np.intp)
