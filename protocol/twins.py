"""Another process that is this node, too: one state directory, and so one identity and name, on two machines.

Peers follow whichever of the two is in the higher epoch, and each of them would go on in a higher one for ever. So a node that
hears of a life of its own at another address asks there who it is. From a life that is over no answer comes. A twin answers with
its record; then the one in the higher epoch stays, the other does not contest that for as long as it hears of its twin, and both
say so to their users.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from kvcomm_p2p.protocol.events import Effect, ReportPeer, SendMessage
from kvcomm_p2p.protocol.membership import Membership
from kvcomm_p2p.protocol.messages import Hello, MemberRecord
from kvcomm_p2p.protocol.standing import LEAP_MAX

ANSWER_S = 1.0
"""Seconds within which a twin should have answered; until then this node does not begin a higher epoch."""

ASK_S = 10.0
"""Seconds between two questions, or two answers."""

GONE_S = 35.0
"""After so many seconds without a word the twin is taken to have ended."""


class Twins:
    """`is_followed`: peers talk to the twin, not to this node."""

    def __init__(self, members: Membership, hello: Callable[[], Hello]) -> None:
        self._members = members
        self._hello = hello
        self._suspect: MemberRecord | None = None
        self._twin: MemberRecord | None = None
        self._heard_at = -math.inf
        self._asked_at = -math.inf
        self._answered_at = -math.inf
        self._told: tuple[str, bool] = ("", False)

    @property
    def view(self) -> tuple[str, bool]:
        """Where the twin listens ("": there is none), and `is_followed`."""
        return ("" if self._twin is None else self._twin.control), self.is_followed

    @property
    def is_followed(self) -> bool:
        return self._twin is not None and self._outranks(self._twin)

    def may_renew(self, now: float) -> bool:
        """Whether this node may begin a higher epoch: neither is a twin followed, nor an answer awaited."""
        return not self.is_followed and now - self._asked_at >= ANSWER_S

    def heard_of(self, record: MemberRecord) -> None:
        """Somebody has a record of this node. One at another address is of an earlier life, or of a twin."""
        if record.control != self._members.me.control and (
            self._suspect is None or record.epoch >= self._suspect.epoch
        ):
            self._suspect = record

    def hello(self, message: Hello, now: float) -> list[Effect]:
        """Somebody at another address says that it is this node, over a connection that only this node's key can make."""
        record = message.member
        me = self._members.me
        if record.node_id != me.node_id or record.control == me.control or record.epoch - me.epoch > LEAP_MAX:
            return []
        self._twin = self._suspect = record
        self._heard_at = now
        answer: list[Effect] = []
        if now - self._answered_at >= ASK_S:
            self._answered_at = now
            answer.append(self._to(record))
        return answer + self._report()

    def settle(self, now: float) -> list[Effect]:
        """After everything else at `now`: ask who may be a twin, and whether the twin is still there."""
        members = self._members
        if self._twin is not None and now - self._heard_at >= GONE_S:
            if self.is_followed:
                members.epoch_wanted = max(members.epoch_wanted, self._twin.epoch + 1)
            self._twin = self._suspect = None
            self._told = ("", False)
        if self._suspect is None or now - self._asked_at < ASK_S:
            return []
        self._asked_at = now
        asked, self._suspect = self._suspect, self._twin
        if asked.epoch == members.me.epoch:
            # Peers may know the other life only, over or not: this one has to begin above it, unless it yields.
            members.epoch_wanted = max(members.epoch_wanted, members.me.epoch + 1)
        return [self._to(asked)]

    def _report(self) -> list[Effect]:
        told = self.view
        if told == self._told:
            return []
        self._told = told
        which = "peers follow that one, and not this" if told[1] else "peers follow this one"
        me = self._members.me
        detail = (
            f"another process, at {told[0]}, runs with the same identity and name; {which}. Two machines have copies of one "
            "state directory: make a new one on one of them, or choose another name"
        )
        return [ReportPeer(me.node_id, me.name, "twin", detail)]

    def _outranks(self, record: MemberRecord) -> bool:
        me = self._members.me
        return (record.epoch, record.control) > (me.epoch, me.control)

    def _to(self, record: MemberRecord) -> SendMessage:
        return SendMessage(record.node_id, record.control, self._hello())
