"""Whether a node still answers: probes, direct and through others."""

from __future__ import annotations

from msgspec import Struct

from kvcomm_p2p.protocol.messages.fields import CounterField, NodeIdField, SeqField
from kvcomm_p2p.protocol.messages.members import RumoursField


class Ping(Struct, frozen=True, array_like=True, tag=16):
    """Do you live? Answered by Pong with the same `seq`, which counts up for each question of the sender."""

    seq: SeqField
    rumours: RumoursField = ()


class PingRequest(Struct, frozen=True, array_like=True, tag=17):
    """I do not hear `target`: do you? Answered by its Pong with this `seq`, or by NoPong."""

    seq: SeqField
    target: NodeIdField
    rumours: RumoursField = ()


class Pong(Struct, frozen=True, array_like=True, tag=18):
    """`node_id` lives, in this epoch and incarnation: the sender itself, or whom it was asked to ping."""

    seq: SeqField
    node_id: NodeIdField
    epoch: CounterField
    incarnation: CounterField
    rumours: RumoursField = ()


class NoPong(Struct, frozen=True, array_like=True, tag=19):
    """Answer to PingRequest: I got your question in time, but did not hear the target either."""

    seq: SeqField
