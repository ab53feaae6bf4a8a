"""Messages to bytes and back.

A frame is `MAGIC` (2 bytes), the version (1 byte), the sender's node id (16 bytes), and one MessagePack array: the
message's tag and fields. Numbers, lengths and counts are limited while parsing and checked again against the types in
`messages`. Authentication is not here: the driver seals frames before they leave and opens them before they come in.
"""

from __future__ import annotations

import math
from typing import Any

from kvcomm_p2p.protocol.ids import NODE_ID_BYTES, NodeId
from kvcomm_p2p.protocol.messages import PROTOCOL_VERSION, Message
from kvcomm_p2p.protocol.messages.packing import pack, unpack

MAGIC = b"kV"
HEADER_BYTES = len(MAGIC) + 1 + NODE_ID_BYTES

CONTROL_FRAME_BYTES_MAX = 256 * 1024
"""Longest frame (header included) that `encode` makes and `decode` accepts."""


class WireError(ValueError):
    """The bytes are not a frame that we understand. `str()` says why; nothing else is raised for bad input."""


def encode(sender: NodeId, message: Message) -> bytes:
    """The frame of `message`. Raises WireError if it would be longer than CONTROL_FRAME_BYTES_MAX (our own mistake)."""
    if len(sender) != NODE_ID_BYTES:
        raise WireError(f"sender has {len(sender)} bytes instead of {NODE_ID_BYTES}")
    frame = b"".join((MAGIC, bytes((PROTOCOL_VERSION,)), sender, pack(message)))
    if len(frame) > CONTROL_FRAME_BYTES_MAX:
        raise WireError(f"frame of {len(frame)} bytes is longer than {CONTROL_FRAME_BYTES_MAX}")
    return frame


def decode(frame: bytes | memoryview) -> tuple[NodeId, Message]:
    """Who sent it and what. Raises WireError for anything that is not a valid frame; nothing else."""
    if len(frame) > CONTROL_FRAME_BYTES_MAX:
        raise WireError(f"frame of {len(frame)} bytes is longer than {CONTROL_FRAME_BYTES_MAX}")
    raw = bytes(frame)
    if len(raw) < HEADER_BYTES or raw[: len(MAGIC)] != MAGIC:
        raise WireError("not a frame of this protocol")
    version = raw[len(MAGIC)]
    if version != PROTOCOL_VERSION:
        raise WireError(f"frame of protocol version {version}; this node speaks version {PROTOCOL_VERSION}")
    sender = NodeId(raw[len(MAGIC) + 1 : HEADER_BYTES])
    return sender, _message(raw[HEADER_BYTES:])


def sender_of(frame: bytes) -> NodeId:
    """Who a frame of at least HEADER_BYTES bytes says that it comes from; cheaper than `decode`, and nothing is checked."""
    return NodeId(frame[len(MAGIC) + 1 : HEADER_BYTES])


def _message(body: bytes) -> Message:
    kind: Any = Message  # a union, which `type` does not describe
    try:
        message: Message = unpack(body, kind)
    except ValueError as error:
        raise WireError(f"not a valid message: {error!s:.200}") from None
    retry_after_s = getattr(message, "retry_after_s", 0.0)
    if not math.isfinite(retry_after_s):
        raise WireError("retry_after_s is not a number")
    return message
