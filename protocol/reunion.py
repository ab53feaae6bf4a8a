"""Finding the cluster again: which addresses are asked whether anybody is there, and which are kept for the next start."""

from __future__ import annotations

import random
from collections.abc import Callable

from kvcomm_p2p.protocol.config import NodeConfig
from kvcomm_p2p.protocol.events import Effect, SaveState, SendMessage
from kvcomm_p2p.protocol.ids import NodeId
from kvcomm_p2p.protocol.joining import Joining
from kvcomm_p2p.protocol.membership import Membership
from kvcomm_p2p.protocol.messages import Hello

RECONTACT_S_MIN = 1.0
"""Mean seconds between attempts to reach a seed or a dead peer while nobody is alive, and at least otherwise."""

FIRST_S = 0.1
"""Mean seconds until the first attempt, of a node that knows where its peers were."""

ADDRESSES_SAVED_MAX = 64
ADDRESSES_SAVED_S = 5.0
"""Seconds between savings of where peers are, at least."""


class Reunion:
    """`addresses`: where peers were when this node ran last; `hello()` makes the message to send."""

    def __init__(
        self,
        config: NodeConfig,
        members: Membership,
        joining: Joining,
        rng: random.Random,
        hello: Callable[[], Hello],
        now: float,
        addresses: tuple[str, ...],
    ) -> None:
        self._config = config
        self._members = members
        self._joining = joining
        self._rng = rng
        self._hello = hello
        self._addresses = addresses
        self._saved = (members.incarnation, addresses)
        self._holders: tuple[NodeId, ...] = ()
        self._save_at = now
        self._look_at = now
        self._recontact_at = now + self._jittered(FIRST_S if addresses else config.recontact_s)

    def recontact(self, now: float) -> list[Effect]:
        """Partitions merge because somebody asks a seed or a dead peer every now and then: each about once in
        `recontact_s`, one at a time. Cut off from everybody, there is no reason to be patient."""
        members = self._members
        if now < self._look_at and members.reachable():
            return []
        self._look_at = now + RECONTACT_S_MIN / 2
        dead = {peer.record.control: peer.node_id for peer in members.dead()}
        seeds = [address for address in (*self._joining.seeds, *self._addresses) if address != members.me.control]
        lost = sorted(address for address in {*seeds, *dead} if not members.at_address(address))
        if not lost:
            return []
        anybody = len(members.reachable()) > 0
        mean_s = max(RECONTACT_S_MIN, self._config.recontact_s / len(lost)) if anybody else RECONTACT_S_MIN
        self._recontact_at = min(self._recontact_at, now + 1.5 * mean_s)
        if self._recontact_at > now:
            return []
        self._recontact_at = now + self._jittered(mean_s)
        address = self._rng.choice(lost)
        return [SendMessage(dead.get(address), address, self._hello())]

    def save_addresses(self, now: float) -> list[Effect]:
        """Keep where peers are, if that is due and has changed."""
        if now < self._save_at:
            return []
        self._save_at = now + ADDRESSES_SAVED_S
        places = sorted((peer.record.control, peer.node_id) for peer in self._members.alive()[:ADDRESSES_SAVED_MAX])
        addresses = tuple(address for address, _ in places)
        if not addresses or addresses == self._saved[1]:
            return []
        self._holders = tuple(node_id for _, node_id in places)
        self._saved = (self._saved[0], addresses)
        return [self.save()]

    def save_incarnation(self) -> list[Effect]:
        """Keep our own number, if it has changed."""
        return [self.save()] if self._members.incarnation != self._saved[0] else []

    def save(self) -> SaveState:
        """Keep who we are now."""
        members = self._members
        self._saved = (members.incarnation, self._saved[1])
        return SaveState(members.me.epoch, members.incarnation, self._saved[1], self._holders)

    def _jittered(self, mean_s: float) -> float:
        return mean_s * (0.5 + self._rng.random())
