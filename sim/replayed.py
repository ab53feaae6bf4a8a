"""What agents asked of real nodes, asked again of simulated ones: recordings of nodes as a workload without prompts.

A recording of a node (docs/recording.md) holds what its agent asked of it, and when: joins, publications, lookups, token ids,
fetches. It does not hold prompts, plans or computing, so what is simulated is the protocol alone: the same questions at the
same times, among nodes with the same records and settings. What peers and the driver answered is made anew by the World.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from kvcomm_p2p.errors import ConfigError
from kvcomm_p2p.protocol import events as ev
from kvcomm_p2p.protocol.config import NodeConfig
from kvcomm_p2p.protocol.messages import MemberRecord
from kvcomm_p2p.sim.links import LOOPBACK, LinkProfile, Links
from kvcomm_p2p.sim.machine import SimNode
from kvcomm_p2p.sim.process import Promise
from kvcomm_p2p.sim.world import World

AFTER_S = 1.0
"""Time goes on for so long behind the last event."""


@dataclass(frozen=True, slots=True)
class NodeHistory:
    """One node: when it was made, what it was asked (time, event), by a clock that all histories share, and how many frames
    of each type reached it."""

    record: MemberRecord
    config: NodeConfig
    began_s: float
    asked: tuple[tuple[float, ev.Event], ...]
    ended_s: float
    received: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class Replayed:
    """What the simulated nodes made of it. Frames by message type; blocks by how their fetch ended."""

    duration_s: float
    received: Counter[str] = field(default_factory=Counter)
    frame_bytes: Counter[str] = field(default_factory=Counter)
    fetches: int = 0
    found: int = 0
    missed: Counter[str] = field(default_factory=Counter)
    fetch_s: list[float] = field(default_factory=list)


def replay(histories: Sequence[NodeHistory], *, link: LinkProfile = LOOPBACK, seed: int = 0) -> Replayed:
    """Ask again. Raises ConfigError for no histories, or two of one node."""
    if not histories or len({each.record.node_id for each in histories}) < len(histories):
        raise ConfigError("give one recording per node, at least one")
    origin_s = min(each.began_s for each in histories)
    world = World(seed, Links(random.Random(seed), link, link))
    replayer = _Replayer(world, Replayed(max(each.ended_s for each in histories) - origin_s))
    world.observers.append(replayer.observe)
    for history in sorted(histories, key=lambda each: each.record.node_id):
        world.at(history.began_s - origin_s, lambda history=history: replayer.begin(history, origin_s))  # type: ignore[misc]
    world.run(replayer.outcome.duration_s + AFTER_S)
    replayer.outcome.frame_bytes = world.frame_bytes.copy()
    return replayer.outcome


class _Replayer:
    def __init__(self, world: World, outcome: Replayed) -> None:
        self._world = world
        self.outcome = outcome

    def begin(self, history: NodeHistory, origin_s: float) -> None:
        """The node is made, and will be asked what it was asked."""
        machine = self._world.add(history.record, history.config)
        for at_s, event in history.asked:
            self._world.at(
                at_s - origin_s,
                lambda event=event, at_s=at_s: self._ask(machine, event, self._world.now - at_s),  # type: ignore[misc]
            )

    def observe(self, number: int, event: ev.Event, now: float, effects: list[ev.Effect]) -> None:
        """Of every event: counts what arrives."""
        if isinstance(event, ev.MessageReceived):
            self.outcome.received[type(event.message).__name__] += 1

    def _ask(self, machine: SimNode, event: ev.Event, shift_s: float) -> None:
        """`shift_s`: from the recorded clock to this one."""
        world = self._world
        if isinstance(event, ev.AnchorsPublished):
            anchors = [
                replace(anchor, handles=tuple(world.new_handle(machine) for _ in anchor.handles))
                for anchor in event.anchors
            ]
            world.publish(machine, tuple(anchors))
        elif isinstance(event, ev.FetchRequested):
            self._fetch(machine, event, event.deadline + shift_s - world.now)
        elif isinstance(event, ev.TokensRequested):
            world.ask_tokens(machine, event.holder, event.anchor, event.deadline + shift_s - world.now)
        elif isinstance(event, ev.LookupRequested):
            world.look_up(machine, event.lookup, event.deadline + shift_s - world.now)
        elif isinstance(event, ev.JoinRequested):
            world.handle(machine, replace(event, deadline=event.deadline + shift_s))
        elif isinstance(event, ev.LeaveRequested):
            world.stop(machine)
        else:
            world.handle(machine, event)

    def _fetch(self, machine: SimNode, event: ev.FetchRequested, deadline_s: float) -> Promise[None]:
        world, outcome, began_s = self._world, self.outcome, self._world.now
        done: Promise[None] = Promise()
        wants = tuple(replace(want, handle=world.new_handle(machine)) for want in event.wants)

        def finish(answer: ev.FinishFetch) -> None:
            outcome.found += len(answer.found)
            outcome.missed.update(missed.miss.reason.value for missed in answer.missed)
            outcome.fetch_s.append(world.now - began_s)
            for block in answer.found:
                world.release(machine, block.handle)
            done.resolve(None)

        outcome.fetches += 1
        world.fetch(
            machine,
            event.holders,
            wants,
            finish,
            anchors=event.anchors,
            deadline_s=deadline_s,
            stall_s=event.stall_s,
            busy_s=event.busy_s,
        )
        return done


ASKED = (
    ev.JoinRequested,
    ev.LeaveRequested,
    ev.AnchorsPublished,
    ev.AnchorsForgotten,
    ev.AnchorsUsed,
    ev.LookupRequested,
    ev.TokensRequested,
    ev.FetchRequested,
    ev.EraseRequested,
)
"""Events by which an agent asks something of its node; all others are answers of the network, the clock or the driver."""
