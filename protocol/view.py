"""What a node believes of all who are there, as hashes that are equal where the beliefs are."""

from __future__ import annotations

from kvcomm_p2p.protocol.ids import NodeId
from kvcomm_p2p.protocol.member_table import KnownMembers
from kvcomm_p2p.protocol.messages import BUCKETS
from kvcomm_p2p.protocol.messages.exchanges import bucket_of
from kvcomm_p2p.protocol.standing import Standing, token


class View:
    """Exclusive or of one hash for each peer, by bucket of node ids: a change of one costs the same, however many there
    are. The node itself is added when it is asked."""

    __slots__ = ("_buckets", "_total")

    def __init__(self) -> None:
        self._buckets = [0] * BUCKETS
        self._total = 0

    @classmethod
    def of(cls, known: KnownMembers, but: NodeId) -> View:
        """Of all of `known`, alive, except for one node."""
        view = cls()
        view._buckets = known.hashes[:]
        for hashed in known.hashes:
            view._total ^= hashed
        standing = known.standing(but)
        if standing is not None:
            view.change(but, standing)
        return view

    def change(self, node_id: NodeId, standing: Standing) -> None:
        """A peer enters this standing, or leaves it."""
        hashed = token(node_id, standing)
        self._buckets[bucket_of(node_id)] ^= hashed
        self._total ^= hashed

    def total(self, node_id: NodeId, own: Standing) -> int:
        """64 bits for all, and this node's own standing."""
        return self._total ^ token(node_id, own)

    def buckets(self, node_id: NodeId, own: Standing) -> list[int]:
        """64 bits for each bucket, this node's own standing included."""
        hashes = self._buckets[:]
        hashes[bucket_of(node_id)] ^= token(node_id, own)
        return hashes
