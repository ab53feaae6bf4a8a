"""When blocks that travel as int8 are ready to be sent. As `net.encoded_uploads`.

A machine encodes them in its hashing threads, sends them in the order in which they were asked for, and keeps the latest few.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from kvcomm_p2p.protocol.anchors import BlockHandle, KVLayout
from kvcomm_p2p.protocol.events import SendBlock
from kvcomm_p2p.sim.machine import SimNode

CACHE_BYTES_MAX = 32 << 20


@dataclass(frozen=True, slots=True)
class Int8:
    """How agents take in KV as int8: what it looks like, bytes of it that are decoded per second, and whether it is asked for
    wherever it may be (`Int8From.always`)."""

    layout: KVLayout
    decode_bytes_per_s: float
    always: bool = False


def in_hashing_thread(machine: SimNode, seconds: float, now: float) -> float:
    """Whichever is idle first works for so long; when it will be done."""
    thread = min(range(len(machine.hashed_at)), key=machine.hashed_at.__getitem__)
    done_at = max(now, machine.hashed_at[thread]) + seconds
    machine.hashed_at[thread] = done_at
    return done_at


@dataclass(slots=True)
class _Machine:
    """`cached`: when each block was or will be encoded, and its bytes then; `sent_at`: when the last one leaves its threads."""

    generation: int
    cached: OrderedDict[BlockHandle, tuple[float, int]] = field(default_factory=OrderedDict)
    cached_bytes: int = 0
    sent_at: float = 0.0


class Encoders:
    """Of all machines of a world. `bytes_per_s`: KV that one thread encodes per second."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._machines: dict[int, _Machine] = {}

    def ready_at(self, machine: SimNode, effect: SendBlock, now: float) -> float:
        """When this block can be sent, asked for now."""
        state = self._machines.get(machine.number)
        if state is None or state.generation != machine.generation:
            state = self._machines[machine.number] = _Machine(machine.generation)
        if effect.handle in state.cached:
            done_at, _ = state.cached[effect.handle]
            state.cached.move_to_end(effect.handle)
        else:
            done_at = in_hashing_thread(machine, effect.kv_bytes / self._bytes_per_s, now)
            state.cached[effect.handle] = done_at, effect.encoded_bytes
            state.cached_bytes += effect.encoded_bytes
            while state.cached_bytes > CACHE_BYTES_MAX:
                _, (_, size) = state.cached.popitem(last=False)
                state.cached_bytes -= size
        state.sent_at = max(now, done_at, state.sent_at)
        return state.sent_at
