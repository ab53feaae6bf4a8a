"""The sharded directory: origins register anchors with the owners of their shards; whoever looks something up asks."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from kvcomm_p2p.protocol.messages.fields import (
    FINGERPRINT_BYTES,
    AnchorIdField,
    ChainField,
    CounterField,
    ModelIdField,
    NodeIdField,
    require,
)
from kvcomm_p2p.protocol.messages.logs import Put

REGISTER_ROWS_MAX = 1024
"""Anchors, and deletions, in one ShardRegister."""

ASK_CHAINS_MAX = 512
ASK_FINGERPRINTS_MAX = 1024
ASK_SKETCHES_MAX = 32
ASK_SHARDS_MAX = 1024
ANSWER_ROWS_MAX = 512
ASK_ANCHORS_MAX = 256
SHARD_DIGEST_BYTES = 8
AGE_S_MAX = 2**31

SHARD_BYTES = 2
SKETCH_BYTES = 8

AgeField = Annotated[int, Meta(ge=0, le=AGE_S_MAX)]


class ShardRegister(Struct, frozen=True, array_like=True, tag=20):
    """I hold these anchors, and no longer those; you own shards that they belong to. Speaks for the sender alone.

    `epoch` is the sender's. `reset`: forget what I registered before. `last`: nothing more follows at once, you should hold
    `count` anchors of mine, whose `registry.row_digest`s xor to `digest`; if not, say ShardResend. Without rows it is a
    refresh.
    `anchors` and `bytes_per_s`: how many anchors the sender shares in all, and what its log grows by, to guess what an index
    of everybody's would take. `sharded_age_s`: seconds since the sender was sure that somebody has no full index.
    """

    epoch: CounterField
    reset: bool
    last: bool
    puts: Annotated[tuple[Put, ...], Meta(max_length=REGISTER_ROWS_MAX)]
    deleted: Annotated[tuple[AnchorIdField, ...], Meta(max_length=REGISTER_ROWS_MAX)]
    count: CounterField
    digest: Annotated[bytes, Meta(min_length=SHARD_DIGEST_BYTES, max_length=SHARD_DIGEST_BYTES)]
    anchors: CounterField
    bytes_per_s: CounterField
    sharded_age_s: AgeField

    def __post_init__(self) -> None:
        require(all(put.model_id for put in self.puts), "an anchor of no model")


class ShardResend(Struct, frozen=True, array_like=True, tag=21):
    """What I hold of you is not what you say: register everything again that is mine. `epoch` is the one you told me."""

    epoch: CounterField
    sharded_age_s: AgeField


class ShardAsk(Struct, frozen=True, array_like=True, tag=22):
    """Which anchors do you know that share something with a prompt? The fields are those of `Lookup`; fingerprints are
    little-endian u32, sketches u64, both ascending, `shards` (u16, ascending) are those for which the receiver is asked.
    `own`: only what you hold yourself.
    """

    ask_id: CounterField
    model_id: ModelIdField
    chains: Annotated[tuple[ChainField, ...], Meta(max_length=ASK_CHAINS_MAX)]
    fingerprints: Annotated[bytes, Meta(max_length=FINGERPRINT_BYTES * ASK_FINGERPRINTS_MAX)]
    sketches: Annotated[bytes, Meta(max_length=SKETCH_BYTES * ASK_SKETCHES_MAX)]
    sketch_bits_max: Annotated[int, Meta(ge=0, le=64)]
    anchors_max: Annotated[int, Meta(ge=1, le=ASK_ANCHORS_MAX)]
    shards: Annotated[bytes, Meta(max_length=SHARD_BYTES * ASK_SHARDS_MAX)]
    own: bool
    sharded_age_s: AgeField

    def __post_init__(self) -> None:
        require(len(self.fingerprints) % FINGERPRINT_BYTES == 0, "fingerprints are not whole")
        require(len(self.sketches) % SKETCH_BYTES == 0, "sketches are not whole")
        require(len(self.shards) % SHARD_BYTES == 0, "shards are not whole")


class ShardRow(Struct, frozen=True, array_like=True):
    """An anchor and who holds it, in which epoch. Second-hand unless the holder itself says so."""

    holder: NodeIdField
    epoch: CounterField
    put: Put

    def __post_init__(self) -> None:
        require(bool(self.put.model_id), "an anchor of no model")


class ShardAnswer(Struct, frozen=True, array_like=True, tag=23):
    """Answer to ShardAsk. `settled`: the sender has owned all the shards it was asked for long enough to know what is in
    them; if not, another owner may know more. `foreign`: anchors of other models would have been named.
    """

    ask_id: CounterField
    settled: bool
    foreign: bool
    rows: Annotated[tuple[ShardRow, ...], Meta(max_length=ANSWER_ROWS_MAX)]
