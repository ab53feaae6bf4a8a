"""Which nodes are called what."""

from __future__ import annotations

from kvcomm_p2p.protocol.ids import NodeId


class Names:
    """Node ids by name (or address), so that nobody has to be looked through to find a namesake. One entry per node."""

    __slots__ = ("_bearers",)

    def __init__(self) -> None:
        self._bearers: dict[str, NodeId | tuple[NodeId, ...]] = {}
        """Most names have one bearer, which takes less memory than a tuple of one."""

    def __len__(self) -> int:
        return sum(len(self.bearers(name)) for name in self._bearers)

    def copy(self) -> Names:
        """One that changes independently."""
        names = Names()
        names._bearers = self._bearers.copy()
        return names

    def add(self, name: str, node_id: NodeId) -> None:
        bearers = self.bearers(name)
        if node_id not in bearers:
            self._bearers[name] = (*bearers, node_id) if bearers else node_id

    def drop(self, name: str, node_id: NodeId) -> None:
        """Raises KeyError if it is not called that."""
        bearers = self.bearers(name)
        if node_id not in bearers:
            raise KeyError(name)
        bearers.remove(node_id)
        if bearers:
            self._bearers[name] = tuple(bearers) if len(bearers) > 1 else bearers[0]
        else:
            del self._bearers[name]

    def bearers(self, name: str) -> list[NodeId]:
        """Ascending."""
        known = self._bearers.get(name)
        return [] if known is None else sorted(known) if isinstance(known, tuple) else [known]
