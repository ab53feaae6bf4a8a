"""Failure detection: one peer is probed per interval, directly and then through others (SWIM with Lifeguard)."""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

from kvcomm_p2p.protocol.config import NodeConfig
from kvcomm_p2p.protocol.events import Effect, SendMessage
from kvcomm_p2p.protocol.health import LocalHealth
from kvcomm_p2p.protocol.ids import NodeId
from kvcomm_p2p.protocol.member_table import Peer
from kvcomm_p2p.protocol.membership import Membership, PeerChange
from kvcomm_p2p.protocol.messages import Message, NoPong, Ping, PingRequest, Pong, Rumour

HELPERS = 3
"""Peers that are asked to ping one that did not answer us."""

HELPER_WAIT = 0.8
"""Part of the probe timeout after which a helper says that it heard nothing either."""

RELAYS_MAX = 256
"""Pings on behalf of others that wait for an answer; the oldest are given up first."""


@dataclass(slots=True)
class _Probe:
    target: NodeId
    seq: int
    ask_at: float
    answered: bool = False
    helpers: int = 0
    refusals: int = 0


class _Relay(NamedTuple):
    asker: NodeId
    seq: int
    target: NodeId
    deadline: float


class Probes:
    """Pings peers in shuffled rounds, so that each is probed once per round, and answers for itself and others.

    Messages go through `to`, which adds what a peer must hear about itself. Membership is changed only by what comes
    back from `tick` and the `on_` methods: changes for the caller to carry out.
    """

    def __init__(
        self, config: NodeConfig, members: Membership, health: LocalHealth, rng: random.Random, now: float
    ) -> None:
        self._config = config
        self._members = members
        self._health = health
        self._rng = rng
        self._probe: _Probe | None = None
        self._next_at = now + rng.random() * config.probe_interval_s
        self._round: list[NodeId] = []
        self._relays: OrderedDict[int, _Relay] = OrderedDict()
        self._seq = 0
        self.failed = 0

    def next_deadline(self) -> float:
        deadline = self._next_at
        if self._probe is not None and not self._probe.answered and not self._probe.helpers:
            deadline = min(deadline, self._probe.ask_at)
        if self._relays:
            deadline = min(deadline, next(iter(self._relays.values())).deadline)
        return deadline

    def stalled(self, seconds: float) -> None:
        """We were not there for so long: what waits for others waits that much longer."""
        self._next_at += seconds
        if self._probe is not None:
            self._probe.ask_at += seconds
        for seq, relay in self._relays.items():
            self._relays[seq] = relay._replace(deadline=relay.deadline + seconds)

    def joined(self, node_id: NodeId) -> None:
        """A newcomer belongs to the round that is under way."""
        self._round.append(node_id)

    def heard(self, sender: NodeId) -> None:
        """Anything that a peer says while it is probed is an answer."""
        if self._probe is not None and self._probe.target == sender:
            self._answered(self._probe)

    def tick(self, now: float) -> tuple[list[PeerChange], list[Effect]]:
        effects: list[Effect] = []
        changes: list[PeerChange] = []
        while self._relays and next(iter(self._relays.values())).deadline <= now:
            _, relay = self._relays.popitem(last=False)
            effects += self.send(relay.asker, NoPong(relay.seq))
        probe = self._probe
        if probe is not None and not probe.answered and not probe.helpers and probe.ask_at <= now < self._next_at:
            effects += self._ask_helpers(probe)
        if self._next_at <= now:
            if probe is not None and not probe.answered:
                changes = self._fail(probe, now)
            self._next_at = now + self._config.probe_interval_s * self._health.patience
            effects += self._begin(now)
        return changes, effects

    def ping(self, peer: Peer) -> list[Effect]:
        """Ask outside the rounds, above all to tell a suspect that it is one."""
        return self.ask(peer.node_id)

    def ask(self, node_id: NodeId) -> list[Effect]:
        """Ask a peer whether it lives; whatever it says is heard. Nothing if it is not known."""
        return self.send(node_id, Ping(self._next_seq(), self.rumours_for(node_id)))

    def on_ping(self, sender: NodeId, message: Ping) -> list[Effect]:
        return self.send(sender, self._pong(message.seq, sender))

    def on_ping_request(self, sender: NodeId, message: PingRequest, now: float) -> list[Effect]:
        if message.target == self._members.me.node_id:
            return self.send(sender, self._pong(message.seq, sender))
        target = self._members.get(message.target)
        if target is None or self._members.get(sender) is None:
            return self.send(sender, NoPong(message.seq))
        seq = self._next_seq()
        self._relays[seq] = _Relay(
            sender, message.seq, message.target, now + HELPER_WAIT * self._config.probe_timeout_s
        )
        if len(self._relays) > RELAYS_MAX:
            self._relays.popitem(last=False)
        return self.send(message.target, Ping(seq, self.rumours_for(message.target)))

    def on_pong(self, sender: NodeId, message: Pong) -> list[Effect]:
        """The claim that comes with it is for the caller to tell the membership."""
        probe = self._probe
        if probe is not None and (message.seq, message.node_id) == (probe.seq, probe.target):
            self._answered(probe)
        relay = self._relays.get(message.seq)
        if relay is None or relay.target != sender or message.node_id != sender:
            return []
        del self._relays[message.seq]
        rumours = self.rumours_for(relay.asker)
        return self.send(relay.asker, Pong(relay.seq, sender, message.epoch, message.incarnation, rumours))

    def on_no_pong(self, message: NoPong) -> None:
        if self._probe is not None and message.seq == self._probe.seq:
            self._probe.refusals += 1

    def rumours_for(self, node_id: NodeId) -> tuple[Rumour, ...]:
        """What to tell a peer: first of all what it may want to contradict (Lifeguard's buddy system)."""
        return self._members.rumours.take(len(self._members.reachable()) + 1, self._members.doubt(node_id))

    def send(self, to: NodeId, message: Message) -> list[Effect]:
        """Nothing if it is not known where the peer is."""
        peer = self._members.get(to)
        return [] if peer is None else [SendMessage(to, peer.record.control, message)]

    def _pong(self, seq: int, to: NodeId) -> Pong:
        me = self._members.me
        return Pong(seq, me.node_id, me.epoch, self._members.incarnation, self.rumours_for(to))

    def _begin(self, now: float) -> list[Effect]:
        target = self._next_target()
        if target is None:
            self._probe = None
            return []
        timeout_s = self._config.probe_timeout_s * self._health.patience
        self._probe = _Probe(target.node_id, self._next_seq(), now + timeout_s)
        return self.send(target.node_id, Ping(self._probe.seq, self.rumours_for(target.node_id)))

    def _next_target(self) -> Peer | None:
        for refill in (True, False):
            while self._round:
                # A random one of those who are left: the same as shuffling them all first, without the wait for thousands.
                at = self._rng.randrange(len(self._round))
                self._round[at], self._round[-1] = self._round[-1], self._round[at]
                node_id = self._round.pop()
                if self._members.is_reachable(node_id):
                    return self._members.get(node_id)
            if refill:
                self._round = self._members.reachable().ids()
        return None

    def _ask_helpers(self, probe: _Probe) -> list[Effect]:
        others = [peer for peer in self._members.alive() if peer.node_id != probe.target]
        effects: list[Effect] = []
        for helper in self._rng.sample(others, min(HELPERS, len(others))):
            question = PingRequest(probe.seq, probe.target, self.rumours_for(helper.node_id))
            effects += self.send(helper.node_id, question)
        probe.helpers = len(effects)
        probe.ask_at = math.inf
        return effects

    def _answered(self, probe: _Probe) -> None:
        if not probe.answered:
            probe.answered = True
            self._health.better()

    def _fail(self, probe: _Probe, now: float) -> list[PeerChange]:
        """Helpers that did not even refuse make us doubt ourselves first."""
        self.failed += 1
        if probe.refusals < probe.helpers or not probe.helpers:
            self._health.worse()
        return self._members.accuse(probe.target, now, "did not answer a probe")

    def _next_seq(self) -> int:
        self._seq += 1
        return self._seq
