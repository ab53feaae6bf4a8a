"""Which nodes are called what."""

from __future__ import annotations

from kvcomm_p2p.protocol.ids import NodeId


class Names:
    """Node ids by name, so that nobody has to be looked through to find a namesake. One entry per node."""

    def __init__(self) -> None:
        self._bearers: dict[str, dict[NodeId, None]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._bearers.values()))

    def add(self, name: str, node_id: NodeId) -> None:
        self._bearers.setdefault(name, {})[node_id] = None

    def drop(self, name: str, node_id: NodeId) -> None:
        """Raises KeyError if it is not called that."""
        bearers = self._bearers[name]
        del bearers[node_id]
        if not bearers:
            del self._bearers[name]

    def bearers(self, name: str) -> list[NodeId]:
        """Ascending."""
        return sorted(self._bearers.get(name, ()))
