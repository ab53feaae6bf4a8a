"""Any message that a node may send, for hypothesis."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from kvcomm_p2p.protocol import messages as m
from kvcomm_p2p.protocol.anchors import ANCHOR_TOKENS_MAX, BLOCK_TOKENS, CONTENT_TOKENS_MIN, Visibility
from kvcomm_p2p.protocol.ids import SAME_MODEL, AnchorId, ChainHash, NodeId

counter = st.integers(0, m.COUNTER_MAX)
id16 = st.binary(min_size=16, max_size=16)
hash8 = st.binary(min_size=8, max_size=8)
name = st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=m.NAME_CHARS_MAX)
address = st.builds(
    lambda host, port: f"{host}:{port}", st.sampled_from(["127.0.0.1", "::1", "node-a.lan"]), st.integers(0, 65535)
)
group_tags = st.sets(st.binary(min_size=8, max_size=8), max_size=4).map(lambda tags: tuple(sorted(tags)))
members = st.builds(m.MemberRecord, id16, counter, name, id16, address, address, st.integers(1, 65535), group_tags)


@st.composite
def puts(draw: Any, seq: int = 1, *, in_log: bool = False) -> m.Put:
    """`in_log`: its model may be the writer's, not named."""
    start = draw(st.integers(0, 1000)) * BLOCK_TOKENS
    tokens = draw(st.integers(1, ANCHOR_TOKENS_MAX))
    exact = draw(st.booleans()) and tokens % BLOCK_TOKENS == 0
    group = draw(st.booleans())
    return m.Put(
        seq=seq,
        anchor_id=draw(id16),
        model_id=draw(st.sampled_from([SAME_MODEL, draw(id16)])) if in_log else draw(id16),
        sequence_id=draw(st.binary(min_size=8, max_size=8)),
        start=start,
        end=start + tokens,
        chain_end=ChainHash(draw(id16) if exact else b""),
        fingerprints=draw(st.binary(max_size=4 * min(tokens, 16)).map(lambda raw: raw[: len(raw) // 4 * 4])),
        hops=0 if exact else draw(st.integers(0, 255)),
        visibility=Visibility.GROUP if group else Visibility.PUBLIC,
        group=draw(st.binary(min_size=8, max_size=8)) if group else b"",
        kv_bytes=tokens * draw(st.integers(1, 10**6)),
        chain_start=ChainHash(draw(id16) if start and draw(st.booleans()) else b""),
        simhashes=draw(simhashes(start, tokens)),
    )


@st.composite
def simhashes(draw: Any, start: int, tokens: int) -> bytes:
    """Of content and context, as far as an anchor at `start` of `tokens` tokens may have them."""
    allowed = (tokens >= CONTENT_TOKENS_MIN, start > 0, start > 0)
    parts = [draw(st.binary(min_size=8, max_size=8)) if may else bytes(8) for may in allowed]
    return b"".join(parts if start or draw(st.booleans()) else parts[:1])


@st.composite
def origin_deltas(draw: Any) -> m.OriginDelta:
    first = draw(st.integers(0, 1000))
    seqs = sorted(draw(st.sets(st.integers(first + 1, first + 50), max_size=5)))
    entries = tuple(m.pack_entry(draw(puts(seq, in_log=True) | st.builds(m.Del, st.just(seq), id16))) for seq in seqs)
    to_seq = (seqs[-1] if seqs else first) + draw(st.integers(0, 5))
    member = draw(members)
    reset = first == 0 and draw(st.booleans())
    return m.OriginDelta(
        member.node_id,
        member.epoch,
        reset,
        first,
        to_seq,
        draw(counter),
        entries,
        draw(counter),
        draw(counter),
        draw(hash8),
        draw(st.sampled_from([b"", b"s" * 64])),
        draw(st.sampled_from([member, None])),
        draw(counter),
    )


@st.composite
def token_answers(draw: Any) -> m.Tokens:
    tokens = draw(st.integers(1, 80))
    digests = tuple(bytes([index]) * 32 for index in range(-(-tokens // BLOCK_TOKENS)))
    return m.Tokens(draw(counter), draw(st.binary(min_size=4 * tokens, max_size=4 * tokens)), digests)


digests = st.lists(
    st.builds(m.DigestEntry, id16, counter, counter, counter, counter, st.sampled_from(m.Status)), max_size=4
).map(tuple)
deltas = st.lists(origin_deltas(), max_size=3).map(tuple)
ordinal = st.integers(0, m.PULL_BLOCKS_MAX - 1)
block_size = st.integers(1, m.BLOCK_BYTES_MAX)
detail = st.text(st.characters(categories=["L", "N", "P"]), max_size=m.DETAIL_CHARS_MAX).filter(str.isprintable)
pull_blocks = st.builds(m.PullBlock, id16, st.integers(0, m.BLOCKS_PER_ANCHOR_MAX - 1), block_size)
encoded_blocks = st.builds(
    lambda anchor_id, index, a, b, offset: m.PullBlock(anchor_id, index, max(a, b) + 1, offset % min(a, b), min(a, b)),
    id16,
    st.integers(0, m.BLOCKS_PER_ANCHOR_MAX - 1),
    st.integers(1, m.BLOCK_BYTES_MAX - 1),
    st.integers(1, m.BLOCK_BYTES_MAX - 1),
    st.integers(0, m.BLOCK_BYTES_MAX),
)

rumours = st.lists(
    st.builds(m.Rumour, id16, counter, counter, st.sampled_from(m.Status), st.just(b"") | id16), max_size=4
).map(tuple)
seq = st.integers(1, m.COUNTER_MAX)

shared_blocks = st.builds(
    m.SharedBlock,
    ordinal,
    st.integers(0, 2**31 - 1),
    counter,
    st.integers(0, m.SHARED_BYTES_MAX - m.BLOCK_BYTES_MAX),
    block_size,
)

few_puts = st.lists(puts(), max_size=3).map(tuple)
few_ids = st.lists(id16, max_size=3).map(tuple)
eight_bytes = st.binary(min_size=8, max_size=8)
age = st.integers(0, m.AGE_S_MAX)


@st.composite
def erasures(draw: st.DrawFn) -> m.Erasure:
    """Signed or not, by hashes, by name or both."""
    hashes = draw(st.binary(max_size=40).map(lambda raw: raw[: len(raw) // 8 * 8]))
    anchor_ids = tuple(map(AnchorId, draw(st.lists(id16, min_size=0 if hashes else 1, max_size=4))))
    key = draw(st.sampled_from((b"", b"k" * 32)))
    age_s = draw(st.floats(0, m.ERASURE_S))
    tokens = draw(st.sampled_from(m.STRETCH_TOKENS))
    origin = NodeId(draw(id16))
    return m.Erasure(draw(id16), origin, age_s, tokens, hashes, anchor_ids, key, b"s" * 64 if key else b"")


rows = st.builds(m.ShardRow, id16, counter, puts())

messages: st.SearchStrategy[m.Message] = st.one_of(
    st.builds(
        lambda a, b, *rest: m.Hello(min(a, b), max(a, b), *rest),
        st.integers(1, 9),
        st.integers(1, 9),
        id16,
        members,
        counter,
    ),
    st.builds(m.Welcome, members, st.lists(members, max_size=3).map(tuple), counter, rumours),
    st.builds(m.Ping, seq, rumours),
    st.builds(m.PingRequest, seq, id16, rumours),
    st.builds(m.Pong, seq, id16, counter, counter, rumours),
    st.builds(m.NoPong, seq),
    st.builds(m.Refused, st.sampled_from(m.RefusedReason), detail),
    st.builds(m.Bye, counter),
    st.builds(m.Syn, hash8, hash8),
    st.builds(m.SynAck, digests, st.booleans(), hash8),
    st.builds(m.Ack, deltas, st.booleans(), st.booleans(), st.booleans()),
    st.builds(m.Want, digests.filter(bool)),
    st.builds(m.Buckets, st.binary(min_size=256, max_size=256), st.binary(min_size=256, max_size=256)),
    st.builds(m.Dense, hash8, hash8, st.binary(max_size=600).map(lambda raw: raw[: len(raw) // 6 * 6]), st.booleans()),
    st.builds(
        lambda r, a, s, n: m.GetTokens(r, a, s * 32, s * 32 + n), counter, id16, st.integers(0, 99), st.integers(1, 512)
    ),
    token_answers(),
    st.builds(m.NoTokens, counter),
    st.builds(
        m.ShardRegister,
        counter,
        st.booleans(),
        st.booleans(),
        few_puts,
        few_ids,
        counter,
        eight_bytes,
        counter,
        counter,
        age,
    ),
    st.builds(m.ShardResend, counter, age),
    st.builds(
        lambda ask_id, model, chains, words, own, s: m.ShardAsk(
            ask_id,
            model,
            tuple(map(ChainHash, chains)),
            words,
            words * 2 if len(words) == 4 else words,
            9,
            8,
            words[:2],
            own,
            s,
        ),
        counter,
        id16,
        few_ids,
        st.binary(max_size=8).map(lambda raw: raw[: len(raw) // 4 * 4]),
        st.booleans(),
        age,
    ),
    st.builds(m.ShardAnswer, counter, st.booleans(), st.booleans(), st.lists(rows, max_size=3).map(tuple)),
    st.builds(
        m.Pull,
        counter,
        st.lists(pull_blocks, min_size=1, max_size=5).map(tuple),
        st.integers(1, m.COUNTER_MAX),
        st.just(m.Encoding.RAW),
        st.booleans(),
        st.integers(m.CHUNK_BYTES_MIN, m.CHUNK_BYTES_MAX),
    ),
    st.builds(
        m.Pull,
        counter,
        st.lists(encoded_blocks, min_size=1, max_size=5).map(tuple),
        st.integers(1, m.COUNTER_MAX),
        st.just(m.Encoding.INT8),
    ),
    st.builds(m.EncodedBlock, counter, ordinal, st.binary(min_size=32, max_size=32)),
    st.builds(m.Credit, counter, st.integers(1, m.COUNTER_MAX)),
    st.builds(m.CancelPull, counter),
    st.builds(m.Chunk, counter, ordinal, st.integers(0, 2**27), st.integers(1, 2**27)),
    st.builds(
        m.PullFailed,
        counter,
        ordinal | st.none(),
        st.sampled_from(m.PullFailedReason),
        st.floats(0, m.RETRY_AFTER_S_MAX),
    ),
    st.builds(m.Forget, st.lists(erasures(), max_size=4).map(tuple)),
    st.builds(
        m.ErasuresKnown, st.lists(st.binary(max_size=3).map(lambda raw: raw * 8), max_size=3).map(tuple), st.booleans()
    ),
    st.builds(
        m.SharedBlocks,
        counter,
        st.integers(1, 2**31 - 1),
        st.lists(shared_blocks, min_size=1, max_size=4).map(tuple),
    ),
)
