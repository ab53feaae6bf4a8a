"""Nodes with a bug planted in them, one each: what the invariants must find."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kvcomm_p2p.protocol import events as ev
from kvcomm_p2p.protocol.messages import Ack, Status
from kvcomm_p2p.protocol.node import Node
from kvcomm_p2p.protocol.origin_log import OriginLog
from kvcomm_p2p.sim.simulation import MODEL


class Counting(Node):
    """Counts its events."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.events = 0

    def handle(self, event: ev.Event, now: float) -> list[ev.Effect]:
        self.events += 1
        return super().handle(event, now)


class Resurrecting(Counting):
    """Takes the dead for alive at the next message of anybody."""

    def handle(self, event: ev.Event, now: float) -> list[ev.Effect]:
        effects = super().handle(event, now)
        if isinstance(event, ev.MessageReceived):
            for peer in self._members:
                if peer.state is Status.DEAD:
                    peer._table.status[peer._row] = Status.ALIVE
        return effects


class FinishingTwice(Counting):
    """Says the end of every fetch that missed nothing once more."""

    def handle(self, event: ev.Event, now: float) -> list[ev.Effect]:
        effects = super().handle(event, now)
        return effects + [each for each in effects if isinstance(each, ev.FinishFetch) and not each.missed]


class NeverFinishing(Counting):
    """Keeps the end of every third fetch to itself."""

    def handle(self, event: ev.Event, now: float) -> list[ev.Effect]:
        effects = super().handle(event, now)
        return [each for each in effects if not (isinstance(each, ev.FinishFetch) and each.fetch_id % 3 == 0)]


class Hoarding(Counting):
    """Has twice the room in its pool that it was given."""

    def __init__(self, config: Any, **given: Any) -> None:
        super().__init__(replace(config, pool_bytes_max=2 * config.pool_bytes_max), **given)


class Forgetful(Counting):
    """Goes back to the beginning of everybody's log at its 400th event."""

    def handle(self, event: ev.Event, now: float) -> list[ev.Effect]:
        effects = super().handle(event, now)
        if self.events == 400:
            for peer in self._members:
                self._community.replicas.forget(peer.node_id)
        return effects


class Undeleting(Counting):
    """Does not believe in deletions."""

    def handle(self, event: ev.Event, now: float) -> list[ev.Effect]:
        before = {peer.node_id: self._puts(peer.node_id) for peer in self._members}
        effects = super().handle(event, now)
        for node_id, puts in before.items():
            log = self.log_of(node_id)
            for anchor_id, entry in puts.items() if log is not None else ():
                if not log.lists(anchor_id) and anchor_id in log._entries:
                    log._entries[anchor_id] = entry
        return effects

    def _puts(self, node_id: Any) -> dict[Any, Any]:
        log = self.log_of(node_id)
        return {} if log is None else {entry.anchor_id: entry for entry in log.after(0) if entry.meta is not None}


class Dropping(Counting):
    """Loses one anchor of each piece of news."""

    def handle(self, event: ev.Event, now: float) -> list[ev.Effect]:
        effects = super().handle(event, now)
        if isinstance(event, ev.MessageReceived) and isinstance(event.message, Ack):
            for peer in self._members:
                log: OriginLog | None = self.log_of(peer.node_id)
                if log is not None and log.anchor_ids():
                    log._entries.pop(log.anchor_ids()[-1], None)
        return effects


class Mixing(Counting):
    """Looks for anchors of the first model, whatever its own is."""

    def handle(self, event: ev.Event, now: float) -> list[ev.Effect]:
        if isinstance(event, ev.LookupRequested):
            event = replace(event, lookup=replace(event.lookup, model_id=MODEL))
        return super().handle(event, now)


class Leaking(Counting):
    """Keeps every block that it found for ever."""

    def handle(self, event: ev.Event, now: float) -> list[ev.Effect]:
        effects = super().handle(event, now)
        found = [block for each in effects if isinstance(each, ev.FinishFetch) for block in each.found]
        return [ev.RetainBlock(block.handle) for block in found[:1]] + effects


class Raising(Counting):
    """Cannot bear to be refused."""

    def handle(self, event: ev.Event, now: float) -> list[ev.Effect]:
        if isinstance(event, ev.PeerUnreachable):
            raise KeyError(event.peer)
        return super().handle(event, now)


class Deaf(Counting):
    """Takes in no news from its 600th event on."""

    def handle(self, event: ev.Event, now: float) -> list[ev.Effect]:
        if self.events > 600 and isinstance(event, ev.MessageReceived) and isinstance(event.message, Ack):
            return []
        return super().handle(event, now)


Planted = Callable[..., Node]
