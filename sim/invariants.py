"""What must always hold, checked while a world runs.

Cheap checks after every event of the node that it concerns; those that look at all peers of a node every `every` of its
events, when it reports something of a peer, and at the end. `RULES` names them all.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from kvcomm_p2p.protocol import events as ev
from kvcomm_p2p.protocol.anchors import BlockKey
from kvcomm_p2p.protocol.ids import AnchorId, NodeId
from kvcomm_p2p.protocol.views import PeerView
from kvcomm_p2p.sim.broken import InvariantBroken
from kvcomm_p2p.sim.log_truth import LogTruth
from kvcomm_p2p.sim.machine import SimNode
from kvcomm_p2p.sim.world import World

__all__ = ["RULES", "InvariantBroken", "Invariants"]

EVERY = 50

WATCHED_MAX = 64
"""Of more nodes than that, each has what it knows of so many others checked: those that follow it; logs are not compared."""

LATE_S = 1e-6
OVERDUE_S = 1.0
"""What is not answered so long after its deadline never will be."""

RULES = {
    "raises": "a node never raises, whatever it is told",
    "answers once": "every fetch, request for token ids, lookup and join is answered exactly once",
    "answers in time": "and no later than its deadline",
    "answers all": "a fetch tells of each block that was wanted, once, in its order, found or missed",
    "references": "nobody drops, keeps or is given a block that is not there",
    "other model": "no KV of one model reaches a node of another, and no lookup finds any",
    "budgets": "pool, uploads, peers and the index stay within their limits",
    "violations": "nobody honest is taken for a violator",
    "own numbers": "a node's epoch, incarnation and log never go back",
    "knowledge": "what a node knows of another's epoch, incarnation and log never goes back within a life of its own",
    "resurrection": "who is known to be dead or gone is only alive again in a later incarnation or epoch",
    "logs": "a copy of a log lists what its writer listed at that length: nothing invented, nothing deleted, nothing lost",
    "agreement": "once nothing is wrong any more, all soon know each other and what each has",
    "leftovers": "once nothing is asked any more, the only blocks held are those of the pool",
}
"""Name: what holds."""

_ORDER = {"alive": 0, "suspect": 1, "dead": 2, "left": 3}


@dataclass(slots=True)
class Invariants:
    """Watches a world from now on. Raises InvariantBroken, with a name in RULES, out of `World.run`."""

    world: World
    every: int = EVERY
    checks: int = 0
    _truth: LogTruth = field(default_factory=LogTruth)
    _known: dict[tuple[int, int, NodeId], tuple[int, int, str, int]] = field(default_factory=dict)
    _saved: dict[tuple[int, NodeId], tuple[int, int]] = field(default_factory=dict)
    _open: dict[tuple[int, int, str, int], tuple[float, ev.Event]] = field(default_factory=dict)
    _published: dict[tuple[int, int], dict[AnchorId, None]] = field(default_factory=dict)
    _events: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.world.observers.append(self._observe)

    def _observe(self, number: int, event: ev.Event, now: float, effects: list[ev.Effect]) -> None:
        machine = self.world.nodes[number]
        self._note_question(machine, event)
        for effect in effects:
            self._check_effect(machine, effect, now)
        if len(self.world.nodes) <= WATCHED_MAX:
            self._check_own_log(machine)
        if isinstance(event, ev.AnchorsPublished):
            ids = self._published.setdefault((number, machine.generation), {})
            ids.update(dict.fromkeys(anchor.meta.anchor_id for anchor in event.anchors))
        count = self._events[number] = self._events.get(number, 0) + 1
        if count % self.every == 0:
            self.check(machine)

    def _note_question(self, machine: SimNode, event: ev.Event) -> None:
        if isinstance(event, ev.FetchRequested):
            kind, asked_id = "fetch", event.fetch_id
        elif isinstance(event, ev.TokensRequested):
            kind, asked_id = "token ids", event.request_id
        elif isinstance(event, ev.LookupRequested):
            kind, asked_id = "lookup", event.request_id
        else:
            return
        self._open[machine.number, machine.generation, kind, asked_id] = (event.deadline, event)

    def _check_effect(self, machine: SimNode, effect: ev.Effect, now: float) -> None:
        if isinstance(effect, ev.FinishFetch):
            asked = self._answered(machine, "fetch", effect.fetch_id, now)
            assert isinstance(asked, ev.FetchRequested)
            self._check_fetch(machine, asked, effect)
        elif isinstance(effect, ev.FinishTokens):
            self._answered(machine, "token ids", effect.request_id, now)
        elif isinstance(effect, ev.FinishLookup):
            self._answered(machine, "lookup", effect.request_id, now)
            mine = machine.node.me.model_id
            for hit in effect.result.hits:
                if hit.meta.model_id != mine:
                    what = f"found an anchor of another model at {self._name(hit.holder)}"
                    raise self.world.broken("other model", machine, what, (hit.holder, hit.meta.anchor_id))
        elif isinstance(effect, ev.SaveState):
            self._check_saved(machine, effect)
        elif isinstance(effect, ev.ReportPeer):
            if effect.change == "violation":
                what = f"took {effect.name} for a violator: {effect.detail}"
                raise self.world.broken("violations", machine, what, (effect.peer,))
            for view in machine.node.peers([effect.peer]):
                self._check_peer(machine, view)

    def _answered(self, machine: SimNode, kind: str, asked_id: int, now: float) -> ev.Event:
        asked = self._open.pop((machine.number, machine.generation, kind, asked_id), None)
        if asked is None:
            what = f"answered {kind} {asked_id} twice, or without being asked"
            raise self.world.broken("answers once", machine, what)
        deadline, event = asked
        late_s = now - max(deadline, machine.thawed_at)  # who is frozen cannot answer
        if late_s > LATE_S:
            what = f"answered {kind} {asked_id} {late_s:.6f} s after its deadline"
            raise self.world.broken("answers in time", machine, what)
        return event

    def _check_fetch(self, machine: SimNode, asked: ev.FetchRequested, finish: ev.FinishFetch) -> None:
        told = f"finished fetch {finish.fetch_id}"
        about = tuple(dict.fromkeys(want.key.anchor_id for want in asked.wants)) + asked.holders[:1]
        order: dict[BlockKey, list[int]] = {}
        for place, want in enumerate(asked.wants):
            order.setdefault(want.key, []).append(place)
        answers = sorted([*(b.key for b in finish.found), *(b.key for b in finish.missed)])
        if answers != sorted(want.key for want in asked.wants):
            raise self.world.broken("answers all", machine, f"{told} with other blocks than were wanted", about)
        for group in (finish.found, finish.missed):
            places = [order[block.key][0] for block in group]
            if places != sorted(places):
                raise self.world.broken("answers all", machine, f"{told} in another order than was wanted", about)
        mine = machine.node.me.model_id
        for block in finish.found:
            if block.handle not in machine.references:
                what = f"{told} with block {block.handle.slot}, which it does not have"
                raise self.world.broken("references", machine, what, about)
            if machine.computed_by.get(block.handle, mine) != mine:
                raise self.world.broken("other model", machine, f"{told} with KV of another model", about)

    def _check_saved(self, machine: SimNode, effect: ev.SaveState) -> None:
        key, saved = (machine.number, machine.node_id), (effect.epoch, effect.incarnation)
        before = self._saved.get(key, saved)
        if saved < before and (machine.node_id, effect.epoch) not in self.world.rolled_back:
            what = f"took back its own epoch and incarnation: {before} became {saved}"
            raise self.world.broken("own numbers", machine, what, (machine.node_id,))
        self._saved[key] = saved

    def _check_own_log(self, machine: SimNode) -> None:
        log = machine.node.log_of(machine.node_id)
        one = log is not None and (machine.node_id, log.epoch) not in self.world.rolled_back
        wrong = self._truth.wrote(machine.node_id, log) if log is not None and one else ""
        if wrong:
            raise self.world.broken("own numbers", machine, wrong, (machine.node_id,))

    def check(self, machine: SimNode) -> None:
        """Everything that holds of one node now."""
        self.checks += 1
        self._check_budgets(machine)
        self._check_open(machine)
        for peer in machine.node.peers(self._watched(machine)):
            self._check_peer(machine, peer)
            if len(self.world.nodes) <= WATCHED_MAX:
                self._check_log(machine, peer)

    def _check_open(self, machine: SimNode) -> None:
        overdue_s = self.world.now - OVERDUE_S
        for (number, generation, kind, asked_id), (deadline, _) in self._open.items():
            mine = number == machine.number and generation == machine.generation
            if mine and not machine.frozen and max(deadline, machine.thawed_at) < overdue_s:
                raise self.world.broken("answers once", machine, f"never answered {kind} {asked_id}")

    def _check_budgets(self, machine: SimNode) -> None:
        stats, config = machine.node.stats(), machine.config
        limits = (
            ("bytes in its pool", stats.pool_bytes, config.pool_bytes_max),
            ("anchors in its pool", stats.pool_anchors, config.pool_anchors_max),
            ("uploads", stats.uploads, config.uploads_max),
            ("peers", stats.peers_known, config.peers_max),
            ("anchors of peers", stats.peer_anchors, 2 * config.directory_anchors_max),
        )
        for what, value, limit in limits:
            if value > limit:
                raise self.world.broken("budgets", machine, f"has {value} {what}, more than {limit}")

    def _check_peer(self, machine: SimNode, peer: PeerView) -> None:
        """Against what was known of it before in this life of ours; that outlives what the node remembers."""
        key = (machine.number, machine.generation, peer.node_id)
        epoch, incarnation, state, log_seq = self._known.get(key, (0, 0, "alive", 0))
        now = (peer.epoch, peer.incarnation, peer.state, peer.log_seq)
        same = peer.epoch == epoch
        shorter = same and peer.log_seq < log_seq and not self._may_forget(machine, peer, state)
        stale = same and (state == "left" or peer.incarnation == incarnation) and _ORDER[peer.state] < _ORDER[state]
        if shorter or stale or peer.epoch < epoch or (same and peer.incarnation < incarnation):
            told = f"epoch, incarnation, state and log {(epoch, incarnation, state, log_seq)} became {now}"
            what = f"believes a stale word of {peer.name}" if stale else f"took back what it knew of {peer.name}"
            raise self.world.broken(
                "resurrection" if stale else "knowledge", machine, f"{what}: {told}", (peer.node_id,)
            )
        self._known[key] = now

    def _may_forget(self, machine: SimNode, peer: PeerView, state: str) -> bool:
        """Logs of who left, and of the dead after a while, are forgotten, and those of an epoch with two logs thrown away; a node
        that asks owners of shards keeps none."""
        gone = state in ("dead", "left") or peer.state in ("dead", "left")
        return gone or (peer.node_id, peer.epoch) in self.world.rolled_back or machine.node.stats().sharded

    def _check_log(self, machine: SimNode, peer: PeerView) -> None:
        log = machine.node.log_of(peer.node_id)
        if log is not None and (peer.node_id, log.epoch) in self.world.rolled_back:
            return
        wrong, anchor_id = ("", None) if log is None else self._truth.compare(machine.node_id, peer.node_id, log)
        if wrong:
            about = (peer.node_id,) if anchor_id is None else (peer.node_id, anchor_id)
            raise self.world.broken("logs", machine, f"{wrong} of {peer.name}", about)

    def _watched(self, machine: SimNode) -> list[NodeId] | None:
        nodes = self.world.nodes
        if len(nodes) <= WATCHED_MAX:
            return None
        return [nodes[(machine.number + step) % len(nodes)].node_id for step in range(1, WATCHED_MAX)]

    def check_all(self) -> None:
        """Every node that is up, and nothing that is overdue."""
        for machine in self.world.nodes:
            if machine.up and not machine.frozen:
                self.check(machine)

    def leftovers(self, machine: SimNode) -> list[str]:
        """References of this machine that are not exactly those of its pool, in words: once nothing is asked and nothing is
        passed on any more, there must be none."""
        published = self._published.get((machine.number, machine.generation), ())
        held = filter(None, (machine.node.held(anchor_id) for anchor_id in published))
        pool = Counter(handle for anchor in held for handle in anchor.handles)
        return [
            f"has {machine.references[handle]} references to block {handle.slot}, its pool has {pool[handle]}"
            for handle in sorted({*pool, *machine.references})
            if machine.references[handle] != pool[handle]
        ]

    def _name(self, node_id: NodeId) -> str:
        return self.world.node_of(node_id).name
