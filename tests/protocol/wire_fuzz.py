"""Hostile frames without end: mutations of every message, and a node that has to survive them.

python tests/protocol/wire_fuzz.py --minutes 10 --seed 1
"""

from __future__ import annotations

import argparse
import hashlib
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import msgpack

sys.path.insert(0, str(Path(__file__).parent))  # for the command line; pytest does the same

from protocol_harness import held, make_node, meta, new_handle
from test_wire import ANCHOR, MEMBER, SAMPLES, SENDER

from kvcomm_p2p.protocol import events as ev
from kvcomm_p2p.protocol import messages as m
from kvcomm_p2p.protocol import wire
from kvcomm_p2p.protocol.anchors import BlockKey
from kvcomm_p2p.protocol.config import NodeConfig
from kvcomm_p2p.protocol.node import Node

INTERESTING: tuple[Any, ...] = (
    0, 1, 2, 5, 6, 7, 31, 32, 33, 255, 512, 2**16, 2**24, 2**28, 2**31, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1,
    -1, -(2**63), 0.0, -0.0, 1e-300, 1e300, float("nan"), float("inf"), None, True, False, b"", b"a" * 16, bytes(16),
    b"\xff" * 32, bytes(8), bytes(4096), "", "h:1", "127.0.0.1:65536", "\u0000", "²" * 64, "x" * 5000, (), ((),) * 3,
)  # fmt: skip

BOMBS = (
    b"\x91" * 5000,  # nesting
    b"\x91" * 200_000,
    b"\xdd\xff\xff\xff\xff",  # an array of 4 billion
    b"\xdf\xff\xff\xff\xff",  # a map of 4 billion
    b"\xc6\xff\xff\xff\xff",  # 4 GB of bytes
    b"\xdb\xff\xff\xff\xff",  # 4 GB of text
    b"\xc9\xff\xff\xff\xff\x01",  # 4 GB of an extension
    b"\xdc\x0f\xff" * 2000,
    b"\x92\x05\xdc\xff\xff" + b"\xc0" * 65535,
    b"\x92\x05\xdd\x00\x01\x00\x00" + b"\x90" * 65536,
    b"\x81" * 1000 + b"\xc0" * 1000,
    b"\xd6\xff\x00\x00\x00\x00",  # a timestamp
    b"\xc1",
)


class Mutator:
    """Frames made of `originals`. Equal seeds give equal frames."""

    def __init__(self, originals: list[bytes], rng: random.Random) -> None:
        self._originals = originals
        self._values = [msgpack.unpackb(frame[wire.HEADER_BYTES :], use_list=True) for frame in originals]
        self._rng = rng
        self._kinds = (
            (0.30, self._bytes),
            (0.06, self._cut),
            (0.06, self._extended),
            (0.12, self._spliced),
            (0.40, self._valued),
            (0.04, self._retagged),
            (0.02, self._bomb),
        )

    def frame(self) -> bytes:
        """The next one."""
        (make,) = self._rng.choices([make for _, make in self._kinds], [weight for weight, _ in self._kinds])
        return make()

    def _bytes(self) -> bytes:
        rng = self._rng
        frame = bytearray(rng.choice(self._originals))
        for _ in range(rng.randint(1, 4)):
            at = min(rng.randrange(wire.HEADER_BYTES if rng.random() < 0.95 else 0, 300), len(frame) - 1)
            kind = rng.random()
            if kind < 0.6:
                frame[at] = rng.randrange(256)
            elif kind < 0.75:
                frame[at] ^= 1 << rng.randrange(8)
            elif kind < 0.9:
                frame.insert(at, rng.randrange(256))
            else:
                del frame[at]
        return bytes(frame)

    def _cut(self) -> bytes:
        frame = self._rng.choice(self._originals)
        return frame[: self._rng.randrange(len(frame))]

    def _extended(self) -> bytes:
        frame = self._rng.choice(self._originals)
        tail = self._rng.choice((self._rng.randbytes(self._rng.randint(1, 50)), b"\xc0" * 9, self._rng.choice(BOMBS)))
        return frame + tail

    def _spliced(self) -> bytes:
        head, tail = self._rng.choice(self._originals), self._rng.choice(self._originals)
        return head[: self._rng.randrange(len(head))] + tail[self._rng.randrange(len(tail)) :]

    def _valued(self) -> bytes:
        """MessagePack that is whole, with fields that are not what they should be."""
        index = self._rng.randrange(len(self._originals))
        value = self._copied(self._values[index], self._rng.randint(1, 3))
        return self._originals[index][: wire.HEADER_BYTES] + _pack(value)

    def _copied(self, value: Any, changes: int) -> Any:
        value = _deep(value)
        for _ in range(changes):
            here = value
            while isinstance(here, list) and here:
                at = self._rng.randrange(len(here))
                if isinstance(here[at], list) and here[at] and self._rng.random() < 0.8:
                    here = here[at]
                    continue
                self._change(here, at)
                break
        return value

    def _change(self, fields: list[Any], at: int) -> None:
        rng, old = self._rng, fields[at]
        kind = rng.random()
        if kind < 0.1:
            del fields[at]
        elif kind < 0.2:
            fields.insert(at, _deep(rng.choice(fields)))
        elif kind < 0.25:
            fields[at] = [_deep(old)] * rng.choice((2, 50, 2000))
        elif kind < 0.55 and isinstance(old, int) and not isinstance(old, bool):
            fields[at] = old + rng.choice((-1, 1, 2, 32, 1000))
        elif kind < 0.55 and isinstance(old, bytes) and old:
            fields[at] = rng.choice((old[:-1], old + b"\0", rng.randbytes(len(old)), bytes(len(old))))
        else:
            fields[at] = rng.choice(INTERESTING)

    def _retagged(self) -> bytes:
        index = self._rng.randrange(len(self._originals))
        value = _deep(self._values[index])
        value[0] = self._rng.choice((*range(40), -1, 2**63, "1", None, 1.0))
        return self._originals[index][: wire.HEADER_BYTES] + _pack(value)

    def _bomb(self) -> bytes:
        return self._rng.choice(self._originals)[: wire.HEADER_BYTES] + self._rng.choice(BOMBS)


def _deep(value: Any) -> Any:
    return [_deep(each) for each in value] if isinstance(value, list) else value


def _pack(value: Any) -> bytes:
    try:
        packed: bytes = msgpack.packb(value, use_bin_type=True)
    except (OverflowError, ValueError):
        return b"\xc1"
    return packed


SMALL = NodeConfig(
    peers_max=64,
    anchors_per_peer_max=50,
    pool_anchors_max=50,
    directory_anchors_max=500,
    tombstone_s=5.0,
    forget_after_s=30.0,
    pool_bytes_max=1 << 20,
)


class Victim:
    """A node in the middle of everything: it has peers, anchors, uploads, pulls, questions and a join under way."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = random.Random(seed)
        self.node: Node = make_node(0, config=SMALL)
        self.now = 0.0
        self.decoded: Counter[str] = Counter()
        self.refused = 0
        self._ids = 0
        self.wake()

    def take(self, frame: bytes) -> None:
        """As an interpreter would. Raises whatever escapes, which nothing may but WireError (it does not)."""
        self.now += 0.0005
        try:
            _, message = wire.decode(frame)
        except wire.WireError:
            self.refused += 1
            return
        self.decoded[type(message).__name__] += 1
        sender = self.rng.choice((SENDER, MEMBER.node_id, MEMBER.node_id, self.node.me.node_id))
        if isinstance(message, m.Chunk):
            self._handle(ev.ChunkReceived(sender, message.pull_id, message.ordinal, message.offset, message.length))
        self._handle(ev.MessageReceived(sender, message))
        if sum(self.decoded.values()) % 40 == 0:
            self._handle(ev.TimerExpired())
            self.wake()

    def wake(self) -> None:
        """Whatever may have ended begins again."""
        self._ids += 1
        self._handle(ev.MessageReceived(MEMBER.node_id, SAMPLES["hello"]))
        anchor = meta("golden", anchor_id=ANCHOR)
        if self.node.held(ANCHOR) is None:
            self._handle(ev.AnchorsPublished((held(anchor),)))
        digest = hashlib.sha256(b"").digest()
        wants = tuple(ev.Want(BlockKey(ANCHOR, index), 256, digest, new_handle()) for index in range(2))
        self._handle(ev.FetchRequested(self._ids, (MEMBER.node_id,), wants, self.now + 0.5))
        self._handle(ev.TokensRequested(self._ids, MEMBER.node_id, anchor, self.now + 0.5))
        self._handle(ev.JoinRequested((MEMBER.control,), self.now + 1.0))

    def _handle(self, event: ev.Event) -> None:
        for effect in self.node.handle(event, self.now):
            if isinstance(effect, ev.SendMessage):
                wire.encode(self.node.me.node_id, effect.message)
            elif isinstance(effect, ev.VerifyBlock):
                self._handle(ev.BlockVerified(effect.handle, self.rng.random() < 0.5))


def originals() -> list[bytes]:
    """One frame of every message, as the golden ones."""
    return [wire.encode(SENDER, message) for message in SAMPLES.values()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Mutated frames against a node, until the time is up or something escapes."
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args()
    mutator = Mutator(originals(), random.Random(options.seed))
    victim = Victim(options.seed)
    end = time.monotonic() + options.minutes * 60
    frames = 0
    frame = b""
    try:
        while time.monotonic() < end:
            for _ in range(1000):
                frame = mutator.frame()
                victim.take(frame)
                frames += 1
    except Exception:
        print(f"seed {options.seed}, frame {frames}: {frame.hex()}", file=sys.stderr)
        raise
    print(f"{frames} frames, seed {options.seed}: {sum(victim.decoded.values())} decoded {dict(victim.decoded)}")


if __name__ == "__main__":
    main()
