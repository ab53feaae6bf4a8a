"""From bytes of anybody to messages of members: seal, limits, encoding, owner of the connection, signatures of records."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TypeVar

from kvcomm_p2p.net.counters import WireCounters
from kvcomm_p2p.net.gate import Gate, verify_all
from kvcomm_p2p.net.limits import PeerLimits
from kvcomm_p2p.net.seal import Sealer
from kvcomm_p2p.net.signatures import Claim, head_is_genuine, sign_head
from kvcomm_p2p.protocol.events import HeadSigned, HeadVerified, SignHead, VerifyHead
from kvcomm_p2p.protocol.ids import NodeId
from kvcomm_p2p.protocol.messages import Message
from kvcomm_p2p.protocol.wire import HEADER_BYTES, WireError, decode, sender_of

WAITING_MAX = 256
"""Messages of all senders that may wait for signatures to be verified; more are dropped."""

WAITING_EACH_MAX = WAITING_MAX // 2
"""Of one key, or of one sender where connections have none."""

log = logging.getLogger("kvcomm_p2p.net")

T = TypeVar("T")
Deliver = Callable[[NodeId, Message], None]
Report = Callable[[HeadSigned | HeadVerified], None]


class Admission:
    """Lives on the driver's loop; signatures are made and verified by one thread beside it, so that neither frames nor blocks
    wait for them. Messages of one sender keep their order."""

    def __init__(self, gate: Gate, sealer: Sealer, counters: WireCounters, limits: PeerLimits | None = None) -> None:
        self.gate = gate
        self._sealer = sealer
        self._counters = counters
        self._limits = PeerLimits() if limits is None else limits
        self._signers = ThreadPoolExecutor(1, thread_name_prefix="kvcomm-sign")
        self._waiting: dict[NodeId, deque[tuple[Message, bytes, Deliver]]] = {}
        self._waiting_count = 0
        self._waiting_of: Counter[bytes] = Counter()

    def start(self) -> None:
        """On the running loop."""
        self._loop = asyncio.get_running_loop()

    def stop(self) -> None:
        """Nothing is delivered or reported afterwards."""
        self._waiting.clear()
        self._signers.shutdown(wait=False, cancel_futures=True)

    def open(self, sealed: bytes, key: bytes = b"") -> tuple[NodeId, Message] | None:
        """Who says to have sent what, on a connection of `key`. What is not to be used is counted and gives None; nothing is
        raised."""
        frame = self._sealer.open(sealed)
        if frame is None:
            self._drop("bad_seal")
            if key:
                self.gate.troubles.other_secret.add(key)
            return None
        if len(frame) < HEADER_BYTES:
            self._drop("undecodable")
            return None
        if not self._within_limits(sender_of(frame), key, len(frame)):
            self._drop("over_limit")
            return None
        began = time.thread_time()
        try:
            sender, message = decode(frame)
        except WireError as error:
            log.debug("a sealed frame could not be decoded: %s", error)
            self._drop("undecodable")
            return None
        finally:
            self.charge(key or sender_of(frame), time.thread_time() - began)
        self._counters.received[type(message).__name__] += 1
        return sender, message

    def charge(self, payer: bytes, work_s: float) -> None:
        """What came on connections of this key (without keys: from this sender) took so much processor time."""
        self._limits.charge(payer, work_s, self._loop.time())

    def _within_limits(self, sender: NodeId, key: bytes, frame_bytes: int) -> bool:
        """Frames are counted for a node on connections of its key alone, so that nobody uses up what is another's, and for the
        key where it is not known to be that node's, so that new names bring no new room."""
        now = self._loop.time()
        counted = sender if not key or self.gate.is_of(sender, key) else key
        return self._limits.has_work_left(key or sender, now) and self._limits.take(counted, frame_bytes, now)

    def belongs(self, sender: NodeId, message: Message, key: bytes) -> bool:
        """Whether the message may have come on a connection of `key`; counted if not."""
        if self.gate.belongs(sender, message, key):
            return True
        self._drop("wrong_key")
        return False

    def admit(self, sender: NodeId, message: Message, key: bytes, deliver: Deliver) -> None:
        """Deliver a message that came on a connection of `key`, if that is the sender's, without the records in it that are
        not believed: at once, or when their signatures have been verified and what the sender sent before was delivered."""
        waiting = self._waiting.get(sender)
        if waiting is None:
            if not self.belongs(sender, message, key):
                return
            if not self.gate.unchecked(message):
                self._deliver(sender, message, deliver)
                return
        payer = key or sender
        if self._waiting_count >= WAITING_MAX or self._waiting_of[payer] >= WAITING_EACH_MAX:
            self._drop("unverified")
            return
        self._waiting_count += 1
        self._waiting_of[payer] += 1
        if waiting is not None:
            waiting.append((message, key, deliver))
            return
        self._waiting[sender] = deque([(message, key, deliver)])
        self._next(sender)

    def sign(self, effect: SignHead, report: Report) -> None:
        """Without an identity: never answered."""
        identity = self.gate.identity
        if identity is not None:
            self._later(
                partial(sign_head, identity, effect.head_bytes),
                lambda signature: report(HeadSigned(effect.head_bytes, signature)),
            )

    def verify(self, effect: VerifyHead, report: Report) -> None:
        """Heads of origins without a genuine record are not genuine."""
        key = self.gate.key_of(effect.origin)
        if not key:
            self._loop.call_soon(report, HeadVerified(effect.origin, effect.head_bytes, False))
            return
        self._later(
            partial(head_is_genuine, key, effect.head_bytes, effect.signature),
            lambda ok: report(HeadVerified(effect.origin, effect.head_bytes, ok)),
        )

    # ---------------------------------------------------------------------------------------------------------- inside

    def _next(self, sender: NodeId) -> None:
        """Deliver what waits of a sender, up to the next message with something to verify."""
        waiting = self._waiting[sender]
        while waiting:
            message, key, deliver = waiting[0]
            if self.belongs(sender, message, key):
                unchecked = self.gate.unchecked(message)
                if unchecked:
                    self._later(partial(verify_all, unchecked), partial(self._verified, sender, len(unchecked)))
                    return
                self._deliver(sender, message, deliver)
            self._taken(sender, waiting)
        self._waiting.pop(sender, None)

    def _taken(self, sender: NodeId, waiting: deque[tuple[Message, bytes, Deliver]]) -> Message:
        message, key, _ = waiting.popleft()
        payer = key or sender
        self._waiting_count -= 1
        self._waiting_of[payer] -= 1
        if not self._waiting_of[payer]:
            del self._waiting_of[payer]
        return message

    def _verified(self, sender: NodeId, asked: int, genuine: list[Claim]) -> None:
        self.gate.learn(genuine)
        if asked > len(genuine):
            self._counters.dropped["bad_signature"] += asked - len(genuine)
        waiting = self._waiting.get(sender)
        if waiting is None:  # stopped
            return
        deliver = waiting[0][2]
        self._deliver(sender, self._taken(sender, waiting), deliver)
        if sender in self._waiting:
            self._next(sender)

    def _deliver(self, sender: NodeId, message: Message, deliver: Deliver) -> None:
        kept = self.gate.filtered(message)
        if kept is None:
            self._drop("not_believed")
        else:
            deliver(sender, kept)

    def _drop(self, reason: str) -> None:
        self._counters.dropped[reason] += 1

    def _later(self, work: Callable[[], T], then: Callable[[T], object]) -> None:
        with suppress(RuntimeError):  # stopped
            self._signers.submit(work).add_done_callback(partial(self._done, then))

    def _done(self, then: Callable[[T], object], future: Future[T]) -> None:
        if not future.cancelled():
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(then, future.result())
