"""Whom a busy holder names: peers that pulled the wanted blocks here lately and have them whole."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

from kvcomm_p2p.protocol.anchors import BlockKey
from kvcomm_p2p.protocol.ids import AnchorId, NodeId
from kvcomm_p2p.protocol.messages import REFERRALS_MAX

ANCHORS_MAX = 256
"""Anchors for which pullers are remembered: those pulled last."""


class Referrals:
    """Per anchor the last REFERRALS_MAX peers that pulled here, which blocks they got, and until when they may be named.
    `is_alive(peer)`: only those are named."""

    def __init__(self, keep_s: float, is_alive: Callable[[NodeId], bool]) -> None:
        self._keep_s = keep_s
        self._is_alive = is_alive
        self._anchors: OrderedDict[AnchorId, OrderedDict[NodeId, dict[int, float]]] = OrderedDict()

    def finished(self, peer: NodeId, keys: Iterable[BlockKey], now: float) -> None:
        """A peer credited these blocks."""
        for anchor_id, index in keys:
            peers = self._anchors.setdefault(anchor_id, OrderedDict())
            self._anchors.move_to_end(anchor_id)
            blocks = peers.setdefault(peer, {})
            blocks[index] = now + self._keep_s
            if len(peers) > REFERRALS_MAX:
                peers.popitem(last=False)
        while len(self._anchors) > ANCHORS_MAX:
            self._anchors.popitem(last=False)

    def named(self, asker: NodeId, keys: Iterable[BlockKey], now: float) -> tuple[NodeId, ...]:
        """Peers, at most REFERRALS_MAX, that have some of these blocks: those with the most of them first, of equals the
        one that was named longest ago."""
        found: dict[NodeId, int] = {}
        keys = tuple(keys)
        for key in keys:
            for peer, blocks in self._anchors.get(key.anchor_id, {}).items():
                if peer != asker and blocks.get(key.index, 0.0) > now and self._is_alive(peer):
                    found[peer] = found.get(peer, 0) + 1
        best = sorted(found, key=lambda peer: -found[peer])[:REFERRALS_MAX]
        for peer in best[:1]:
            for anchor_id in dict.fromkeys(key.anchor_id for key in keys):
                if peer in self._anchors.get(anchor_id, {}):
                    self._anchors[anchor_id].move_to_end(peer)
        return tuple(best)

    def forget(self, peer: NodeId) -> None:
        """This peer went."""
        for peers in self._anchors.values():
            peers.pop(peer, None)

    def forget_anchors(self, anchor_ids: Iterable[AnchorId]) -> None:
        """These anchors are not to be spread any more."""
        for anchor_id in anchor_ids:
            self._anchors.pop(anchor_id, None)
