"""The requester's side of token ids: one message there, one back, or a miss after `tokens_timeout_s`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from kvcomm_p2p.protocol.anchors import Miss, MissReason
from kvcomm_p2p.protocol.config import NodeConfig
from kvcomm_p2p.protocol.events import AnchorTokens, Effect, FinishTokens, TokensRequested
from kvcomm_p2p.protocol.ids import NodeId
from kvcomm_p2p.protocol.messages import GetTokens, NoTokens, Tokens
from kvcomm_p2p.protocol.penalties import PenaltyBox
from kvcomm_p2p.protocol.violations import NotAsked


@dataclass(slots=True)
class _Pending:
    event: TokensRequested
    asked_at: float
    gives_up_at: float


class TokenRequests:
    """Requests without an answer yet, by the id that went out (ours, never the caller's: late answers find nothing)."""

    def __init__(self, config: NodeConfig, penalties: PenaltyBox) -> None:
        self._config = config
        self._penalties = penalties
        self._pending: dict[int, _Pending] = {}
        self._next_id = 1

    def __len__(self) -> int:
        return len(self._pending)

    def next_deadline(self) -> float:
        return min((pending.gives_up_at for pending in self._pending.values()), default=math.inf)

    def ask(self, event: TokensRequested, now: float) -> GetTokens:
        """The message for the holder."""
        gives_up_at = min(event.deadline, now + self._config.tokens_timeout_s)
        request_id, self._next_id = self._next_id, self._next_id + 1
        self._pending[request_id] = _Pending(event, now, gives_up_at)
        return GetTokens(request_id, event.anchor.anchor_id, event.anchor.start, event.anchor.end)

    def answered(self, sender: NodeId, message: Tokens | NoTokens) -> list[Effect]:
        """An answer came. Raises NotAsked if it comes from somebody who was not asked."""
        pending = self._pending.get(message.request_id)
        if pending is None:
            return []
        event = pending.event
        if sender != event.holder:
            raise NotAsked("an answer to a question to", event.holder)
        del self._pending[message.request_id]
        if isinstance(message, NoTokens):
            return [finish(event, Miss(MissReason.NOT_FOUND, "the holder does not have it for us"))]
        token_ids = np.frombuffer(message.token_ids, "<u4").astype(np.uint32, copy=False)
        if len(token_ids) != event.anchor.tokens or len(message.digests) != event.anchor.blocks:
            miss = Miss(MissReason.TOKENS_MISMATCH, f"{len(token_ids)} token ids instead of {event.anchor.tokens}")
            return [finish(event, miss)]
        token_ids.flags.writeable = False
        return [finish(event, AnchorTokens(event.anchor, event.holder, token_ids, message.digests))]

    def peer_gone(self, peer: NodeId, now: float) -> list[Effect]:
        gone = [key for key, pending in self._pending.items() if pending.event.holder == peer]
        return self._give_up(gone, Miss(MissReason.UNREACHABLE), now)

    def shutdown(self, now: float) -> list[Effect]:
        return self._give_up(list(self._pending), Miss(MissReason.SHUTDOWN), now)

    def tick(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for key in [key for key, pending in self._pending.items() if pending.gives_up_at <= now]:
            pending = self._pending[key]
            if pending.gives_up_at < pending.event.deadline:
                self._penalties.punish(pending.event.holder, now)
                effects += self._give_up([key], Miss(MissReason.STALLED, "token ids did not come"), now)
            else:
                effects += self._give_up([key], Miss(MissReason.DEADLINE), now)
        return effects

    def _give_up(self, keys: list[int], miss: Miss, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for key in keys:
            pending = self._pending.pop(key)
            lost_s = 0.0 if miss.reason is MissReason.SHUTDOWN else now - pending.asked_at
            effects.append(FinishTokens(pending.event.request_id, miss, lost_s))
        return effects


def finish(event: TokensRequested, result: AnchorTokens | Miss) -> FinishTokens:
    """An answer without a wait that was lost."""
    return FinishTokens(event.request_id, result, 0.0)
