"""Frames: round trips, golden bytes, limits, and what a hostile peer may send."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from protocol_harness import log_news, make_node, meta, record
from strategies import members, messages, puts

from kvcomm_p2p.protocol import messages as m
from kvcomm_p2p.protocol import wire
from kvcomm_p2p.protocol.anchors import Visibility
from kvcomm_p2p.protocol.events import MessageReceived
from kvcomm_p2p.protocol.ids import AnchorId, ChainHash, ModelId, NodeId
from kvcomm_p2p.protocol.log_bytes import DELTA_BYTES_MIN, entry_bytes_max, member_bytes_max

GOLDEN = Path(__file__).parent / "golden_frames.txt"
SENDER = NodeId(b"S" * 16)
ANCHOR = AnchorId(b"a" * 16)
MEMBER = record(1, groups=(b"g" * 8, b"h" * 8))
PUT = m.Put.of(7, meta("golden"))
OWN_PUT = m.Put.of(8, meta("golden"), MEMBER.model_id)
BEHIND = {"chain_start": ChainHash(b"C" * 16), "content": 2**64 - 1, "context_first": 2**63, "context_last": 1}
LATER_PUT = m.Put.of(8, meta("golden", start=512, **BEHIND))

RUMOUR = m.Rumour(SENDER, 2, 3, m.Status.SUSPECT, MEMBER.node_id)
HEAD: dict[str, Any] = {"head_seq": 9, "head_digest": b"listed..", "head_signature": b"s" * 64}

SAMPLES: dict[str, m.Message] = {
    "hello": m.Hello(m.PROTOCOL_VERSION, m.PROTOCOL_VERSION, b"c" * 16, MEMBER),
    "welcome": m.Welcome(MEMBER, (record(2),)),
    "refused": m.Refused(m.RefusedReason.NAME_TAKEN, "taken"),
    "bye": m.Bye(3),
    "forget": m.Forget(
        (m.Erasure(b"e" * 16, MEMBER.node_id, 1.5, 8, bytes(range(16)), (ANCHOR,), b"k" * 32, b"s" * 64),)
    ),
    "erasures_known": m.ErasuresKnown((b"e" * 8,), True),
    "syn": m.Syn(b"viewhash", b"logsnow."),
    "syn_ack": m.SynAck((m.DigestEntry(NodeId(b"n" * 16), 1, 2, 3, 2, m.Status.SUSPECT, b"listed.."),), True),
    "ack": m.Ack((log_news(MEMBER, 9, (PUT, LATER_PUT), reset=True, gc_floor=2, **HEAD),), True, True),
    "news": m.Ack((log_news(MEMBER, 9, (PUT, OWN_PUT, m.Del(9, ANCHOR)), from_seq=6, member=None),), fresh=True),
    "want": m.Want(
        (m.DigestEntry(NodeId(b"n" * 16), 1, 2, 3, 2), m.DigestEntry(SENDER, 1, 2, 3, 2, m.Status.ALIVE, b"listed.."))
    ),
    "buckets": m.Buckets(bytes(reversed(range(256))), bytes(range(256))),
    "dense": m.Dense(b"roster..", b"\xff" * 8, bytes(range(12)), True),
    "get_tokens": m.GetTokens(5, ANCHOR, 64, 128),
    "tokens": m.Tokens(5, bytes(range(12)), (b"d" * 32,)),
    "no_tokens": m.NoTokens(5),
    "pull": m.Pull(6, (m.PullBlock(ANCHOR, 0, 4096), m.PullBlock(ANCHOR, 1, 4096)), 2**24),
    "credit": m.Credit(6, 4096),
    "pull_small_chunks": m.Pull(7, (m.PullBlock(ANCHOR, 0, 4096),), 2**24, chunk_bytes=m.CHUNK_BYTES_MIN),
    "cancel_pull": m.CancelPull(6),
    "chunk": m.Chunk(6, 1, 0, 4096),
    "shard_register": m.ShardRegister(1, True, True, (PUT,), (ANCHOR,), 1, b"x" * 8, 1, 300, 0),
    "shard_resend": m.ShardResend(1, 5),
    "shard_ask": m.ShardAsk(
        7, record(1).model_id, (ChainHash(b"C" * 16),), b"abcd", b"s" * 8, 9, 64, b"\x01\x00", False, 5
    ),
    "shard_answer": m.ShardAnswer(7, True, False, (m.ShardRow(NodeId(b"n" * 16), 1, PUT),)),
    "pull_failed": m.PullFailed(6, None, m.PullFailedReason.BUSY, 0.5),
    "ping": m.Ping(7, (RUMOUR,)),
    "ping_request": m.PingRequest(7, SENDER),
    "pong": m.Pong(7, SENDER, 2, 3),
    "no_pong": m.NoPong(7),
    "pull_int8": m.Pull(6, (m.PullBlock(ANCHOR, 3, 1_474_560, 64, 378_000),), 2**20, m.Encoding.INT8),
    "encoded_block": m.EncodedBlock(6, 0, b"d" * 32),
    "shared_blocks": m.SharedBlocks(6, 4711, (m.SharedBlock(1, 17, 2**31 + 5, 4096, 1_474_560),)),
}


def frame_of(fields: Any) -> bytes:
    """A frame around any MessagePack value."""
    body: bytes = msgpack.packb(fields, use_bin_type=True)
    return wire.MAGIC + bytes([m.PROTOCOL_VERSION]) + SENDER + body


@given(messages)
@settings(max_examples=300, deadline=None)
def test_round_trip(message: m.Message) -> None:
    assert wire.decode(wire.encode(SENDER, message)) == (SENDER, message)


def test_golden_frames_have_not_changed() -> None:
    golden = dict(line.split() for line in GOLDEN.read_text().splitlines())
    assert {name: wire.encode(SENDER, message).hex() for name, message in SAMPLES.items()} == golden
    assert {type(message) for message in SAMPLES.values()} == set(m.Message.__args__)  # type: ignore[attr-defined]


def test_fields_that_a_newer_version_appends_are_ignored() -> None:
    fields = msgpack.unpackb(wire.encode(SENDER, SAMPLES["credit"])[wire.HEADER_BYTES :])
    assert wire.decode(frame_of([*fields, "new", 7])) == (SENDER, SAMPLES["credit"])


def test_unknown_version_says_so() -> None:
    frame = bytearray(wire.encode(SENDER, m.Bye(1)))
    frame[2] = 9
    with pytest.raises(wire.WireError, match="version 9"):
        wire.decode(bytes(frame))


def test_memoryview_is_accepted() -> None:
    assert wire.decode(memoryview(wire.encode(SENDER, m.Bye(1)))) == (SENDER, m.Bye(1))


def test_too_long_frames_are_neither_made_nor_read() -> None:
    many = m.SynAck(
        tuple(m.DigestEntry(NodeId(bytes(16)), 2**60, 2**60, 2**60, 2**60) for _ in range(m.DIGEST_ENTRIES_MAX + 2000))
    )
    with pytest.raises(wire.WireError, match="longer than"):
        wire.encode(SENDER, many)
    with pytest.raises(wire.WireError, match="longer than"):
        wire.decode(bytes(wire.CONTROL_FRAME_BYTES_MAX + 1))


PUT_FIELDS = [1, 7, b"a" * 16, b"m" * 16, b"s" * 8, 32, 96, b"", b"abcd", 0, 0, b"", 640, b"c" * 16, b"\xff" * 24]


def put_with(**changes: Any) -> Any:
    names = ["tag", "seq", "anchor_id", "model_id", "sequence_id", "start", "end", "chain_end", "fingerprints", "hops"]
    names += ["visibility", "group", "kv_bytes", "chain_start", "simhashes"]
    fields = dict(zip(names, PUT_FIELDS, strict=True)) | changes
    return ack_of(list(fields.values()))


def ack_of(entry: Any) -> Any:
    """News that consist of one entry, whatever it is."""
    raw = msgpack.packb(entry, use_bin_type=True)
    return [7, [[b"n" * 16, 1, False, 6, 7, 0, [raw]]]]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"start": 0, "kv_bytes": 960, "chain_start": b"", "simhashes": b"\xff" * 8 + bytes(16)},
        {"end": 63, "kv_bytes": 310, "simhashes": bytes(8) + b"\xff" * 16},
    ],
)
def test_the_puts_that_the_next_test_breaks_are_valid(changes: dict[str, Any]) -> None:
    assert isinstance(wire.decode(frame_of(put_with(**changes)))[1], m.Ack)


def test_puts_from_before_anchors_told_their_context_are_read() -> None:
    _, message = wire.decode(frame_of(ack_of(PUT_FIELDS[:13])))
    assert isinstance(message, m.Ack)
    read = m.read_entry(message.deltas[0].entries[0], MEMBER.model_id).meta
    assert read is not None
    assert (read.chain_start, read.content, read.context_first, read.context_last) == (b"", 0, 0, 0)


def test_puts_carry_all_of_an_anchor() -> None:
    for anchor in (meta("a"), meta("a", content=2**63), meta("a", start=512, **BEHIND)):
        assert m.Put.of(3, anchor).meta() == anchor
        assert m.Put.of(3, anchor, MEMBER.model_id).meta(MEMBER.model_id) == anchor
    later = meta("a", start=512, **BEHIND)
    sizes = {len(wire.pack(m.Put.of(3, replace(later, content=number)))) for number in (0, 1, 2**64 - 1)}
    assert len(sizes) == 1
    for number in (-1, 2**64):
        with pytest.raises(ValueError, match="SimHash"):
            m.Put.of(3, meta("a", content=number))


def test_a_log_does_not_name_its_writers_model_in_every_entry() -> None:
    own, other = meta("a"), meta("a", model_id=ModelId(b"o" * 16))
    raw, named = (m.pack_entry(m.Put.of(3, anchor, MEMBER.model_id)) for anchor in (own, other))
    assert len(named) == len(raw) + 16
    assert m.read_entry(raw, MEMBER.model_id).meta == own
    assert m.read_entry(named, MEMBER.model_id).meta == other
    elsewhere = m.read_entry(raw, other.model_id)
    assert elsewhere.meta == other
    assert elsewhere.digest != m.read_entry(raw, own.model_id).digest, "who believes another model lists something else"
    assert m.read_entry(named, own.model_id).digest == m.read_entry(named, other.model_id).digest
    unnamed = m.Put.of(3, own, own.model_id)
    with pytest.raises(ValueError, match="no model"):
        unnamed.meta()
    with pytest.raises(ValueError, match="no model"):
        m.ShardRow(SENDER, 1, unnamed)
    with pytest.raises(ValueError, match="no model"):
        m.ShardRegister(1, True, True, (PUT, unnamed), (), 2, b"x" * 8, 2, 300, 0)


@pytest.mark.parametrize(
    "fields",
    [
        put_with(start=31),
        put_with(end=32),
        put_with(end=32 + 513, kv_bytes=513),
        put_with(fingerprints=b"abc"),
        put_with(fingerprints=bytes(4 * 65)),
        put_with(chain_end=b"short"),
        put_with(chain_end=b"c" * 16, hops=1),
        put_with(chain_end=b"c" * 16, end=95, kv_bytes=630),
        put_with(visibility=2),
        put_with(visibility=1),
        put_with(group=b"g" * 8),
        put_with(kv_bytes=0),
        put_with(kv_bytes=641),
        put_with(kv_bytes=64 * 2**24),
        put_with(chain_start=b"short"),
        put_with(start=0, kv_bytes=960, simhashes=bytes(24)),
        put_with(start=0, kv_bytes=960, chain_start=b""),
        put_with(start=0, kv_bytes=960, chain_start=b"", simhashes=bytes(8) + b"\xff" * 8 + bytes(8)),
        put_with(start=0, kv_bytes=960, chain_start=b"", simhashes=bytes(16) + b"\xff" * 8),
        put_with(end=63, kv_bytes=310),
        put_with(model_id=b"m" * 15),
        put_with(model_id=b"m" * 17),
        put_with(simhashes=b"\xff" * 7),
        put_with(simhashes=b"\xff" * 16),
        put_with(simhashes=b"\xff" * 23),
        [27, [[b"n" * 16, 1, 2, 3, 2, 0, b"listed."]]],
        put_with(simhashes=b"\xff" * 25),
        put_with(simhashes=7),
        put_with(seq=6),
        put_with(seq=8),
        put_with(anchor_id=b"a" * 15),
        put_with(anchor_id="a" * 16),
        put_with(start=-32),
        put_with(hops=256),
        [99],
        [],
        7,
        None,
        {"tag": 4},
        [4],
        [4, -1],
        [4, 2**63],
        [4, 1.0],
        [4, True],
        [12, 1, 0],
        [11, 1, [], 5],
        [11, 1, [[b"a" * 16, 16, 5]], 5],
        [11, 1, [[b"a" * 16, 0, 0]], 5],
        [11, 1, [[b"a" * 16, 0, 2**28 + 1]], 5],
        [11, 1, [[b"a" * 16, 0, 5]] * 1025, 5],
        [11, 1, [[b"a" * 16, 0, 5, 0, 5]], 5, 1],
        [11, 1, [[b"a" * 16, 0, 5, 4, 4]], 5, 1],
        [11, 1, [[b"a" * 16, 0, 5, 0, 4]], 5, 0],
        [11, 1, [[b"a" * 16, 0, 5, 0, 4], [b"a" * 16, 1, 5]], 5, 1],
        [11, 1, [[b"a" * 16, 0, 5, 0, 4]], 5, 1, True],
        [11, 1, [[b"a" * 16, 0, 5]], 5, 2],
        [26, 1, 0, b"d" * 31],
        [26, 1, 1024, b"d" * 32],
        [14, 1, 0, 2**28 - 1, 2],
        [15, 1, None, 2, float("nan")],
        [15, 1, None, 2, float("inf")],
        [15, 1, None, 9, 0.0],
        [3, 1, "x\nanother line of the log"],
        [8, 1, b"a" * 16, 32, 32],
        [8, 1, b"a" * 16, 33, 64],
        [9, 1, b"abc", [b"d" * 32]],
        [9, 1, b"abcd", []],
        [9, 1, b"abcd", [b"d" * 31]],
        [1, 2, 1, b"c" * 16, [b"n" * 16, 1, "x", b"m" * 16, "h:1", "h:2", 1, []]],
        [1, 1, 1, b"c" * 16, [b"n" * 16, 1, "", b"m" * 16, "h:1", "h:2", 1, []]],
        [1, 1, 1, b"c" * 16, [b"n" * 16, 1, "x\n", b"m" * 16, "h:1", "h:2", 1, []]],
        [1, 1, 1, b"c" * 16, [b"n" * 16, 1, "x", b"m" * 16, "h", "h:2", 1, []]],
        [1, 1, 1, b"c" * 16, [b"n" * 16, 1, "x", b"m" * 16, "h:1", "h:65536", 1, []]],
        [1, 1, 1, b"c" * 16, [b"n" * 16, 1, "x", b"m" * 16, "h:1", "h:" + "²", 1, []]],
        [1, 1, 1, b"c" * 16, [b"n" * 16, 1, "x", b"m" * 16, "h:1", "h:2", 1, [b"g" * 8, b"g" * 8]]],
    ],
)
def test_illegal_fields_are_refused(fields: Any) -> None:
    with pytest.raises(wire.WireError):
        wire.decode(frame_of(fields))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"\xdd\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x91" * 5000,
        b"\xdc\x0f\xff" * 2000,
        b"\xd6\xff\x00\x00\x00\x00",
        b"\x92\x04\x01\x00",
        b"\x92\x03\xa1\xff",
    ],
)
def test_malformed_bodies_are_refused(body: bytes) -> None:
    with pytest.raises(wire.WireError):
        wire.decode(wire.MAGIC + bytes([m.PROTOCOL_VERSION]) + SENDER + body)


@given(messages)
@settings(max_examples=200, deadline=None)
def test_any_valid_message_is_survived_by_a_node(message: m.Message) -> None:
    node = make_node(0)
    node.handle(MessageReceived(MEMBER.node_id, SAMPLES["hello"]), 0.0)
    for effect in node.handle(MessageReceived(MEMBER.node_id, message), 1.0):
        if hasattr(effect, "message"):
            wire.encode(node.me.node_id, effect.message)
    assert node.stats().messages[type(message).__name__] >= 1


@given(puts(m.COUNTER_MAX))
@settings(deadline=None)
def test_entry_bound_is_a_bound(put: m.Put) -> None:
    assert len(wire.pack(put)) <= entry_bytes_max(put)
    gone = m.Del(m.COUNTER_MAX, put.anchor_id)
    assert len(wire.pack(gone)) <= entry_bytes_max(gone)


@given(members)
@settings(deadline=None)
def test_member_bound_is_a_bound(member: m.MemberRecord) -> None:
    assert len(wire.pack(member)) <= member_bytes_max(member)
    top = m.COUNTER_MAX
    head = {"head_seq": top, "head_digest": b"\xff" * 8, "head_signature": b"s" * 64, "log_seq": top}
    delta = log_news(member, top, reset=True, gc_floor=top, incarnation=top, **{**head, "member": None})
    assert len(wire.pack(delta)) <= DELTA_BYTES_MIN


def test_private_anchors_cannot_be_put_on_the_wire() -> None:
    with pytest.raises(ValueError, match="private"):
        m.Put.of(1, meta("secret", visibility=Visibility.PRIVATE))
