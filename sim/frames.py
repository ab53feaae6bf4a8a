"""Encoded messages on their way."""

from __future__ import annotations

from kvcomm_p2p.protocol import events as ev
from kvcomm_p2p.protocol import wire
from kvcomm_p2p.protocol.messages import Message
from kvcomm_p2p.sim.machine import SimNode


class Frame:
    """An encoded message on its way. Whoever receives it reads the same values, made of the bytes once."""

    __slots__ = ("_event", "bytes")

    def __init__(self, frame: bytes) -> None:
        self.bytes = frame
        self._event: ev.MessageReceived | None = None

    def event(self) -> ev.MessageReceived:
        """What it says, decoded."""
        if self._event is None:
            self._event = ev.MessageReceived(*wire.decode(self.bytes))
        return self._event


class Encoder:
    """What goes to several peers is encoded once, as a driver may do."""

    def __init__(self) -> None:
        self._last: tuple[int, Message | None, Frame | None] = (-1, None, None)

    def frame(self, machine: SimNode, message: Message) -> Frame:
        """The message as this machine's node sends it."""
        sender, last, frame = self._last
        if frame is None or last is not message or sender != machine.number:
            frame = Frame(wire.encode(machine.node_id, message))
            self._last = machine.number, message, frame
        return frame
