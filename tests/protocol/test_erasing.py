"""What is erased goes from every pool that holds it, and does not come back; nothing else goes, and memory stays bounded."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from protocol_harness import Network, digest16, held, joined, make_node, meta

from kvcomm_p2p.protocol import erasing, erasure_memory
from kvcomm_p2p.protocol import events as ev
from kvcomm_p2p.protocol.anchors import NO_CHAIN, MissReason, Visibility
from kvcomm_p2p.protocol.config import NodeConfig
from kvcomm_p2p.protocol.erasure_names import stretches
from kvcomm_p2p.protocol.ids import ChainHash, NodeId
from kvcomm_p2p.protocol.lifetimes import Lifetimes
from kvcomm_p2p.protocol.messages import ERASURE_S, Erasure, ErasuresKnown, Forget

KEY = bytes(16)
Ids = npt.NDArray[np.uint32]


def tokens_of(label: object, count: int) -> Ids:
    return np.random.default_rng(random.Random(repr(label)).getrandbits(32)).integers(0, 50_000, count, dtype=np.uint32)


def publish(network: Network, node_id: NodeId, label: object, token_ids: Ids, at: int = 0, **changes: Any) -> list[Any]:
    """The sequence from `at` on as anchors of 64 tokens, exactly as long as it is."""
    wholes = []
    for start in range(0, len(token_ids), 64):
        part = token_ids[start : start + 64]
        anchor = meta((label, at + start), start=at + start, tokens=len(part), fingerprints=b"")
        anchor = replace(anchor, sequence_id=meta(label).sequence_id, **changes)
        wholes.append(replace(held(anchor), token_ids=part))
    for whole in wholes:
        for handle in whole.handles:
            network.references[node_id][handle] = 1
            network.stores[node_id][handle] = bytearray(8)
    network.handle(node_id, ev.AnchorsPublished(tuple(wholes)))
    return [whole.meta for whole in wholes]


AUTHOR = NodeId(b"a" * 16)


def erasures(text: Ids) -> tuple[Erasure, ...]:
    tokens, hashes = stretches([text], KEY)
    return tuple(Erasure(digest16(piece), AUTHOR, 0.0, tokens, piece) for piece in hashes)


def held_by(network: Network, node_id: NodeId, metas: list[Any]) -> list[bool]:
    return [network.nodes[node_id].held(anchor.anchor_id) is not None for anchor in metas]


@given(st.integers(4, 300), st.integers(0, 60), st.integers(0, 60), st.integers(0, 2**20))
@settings(deadline=None, max_examples=60)
def test_a_copy_is_found_wherever_it_stands_and_its_likes_are_not(
    count: int, before: int, after: int, seed: int
) -> None:
    text = tokens_of(seed, count)
    network = Network()
    node = network.add(0)
    copy = np.concatenate([tokens_of("before", before), text, tokens_of("after", after)])
    metas = publish(network, node, "copy", copy)
    other = publish(network, node, "other", tokens_of("other", 200))
    network.handle(node, ev.EraseRequested(erasures(text), everywhere=False))
    holding = [anchor.end > before and anchor.start < before + count for anchor in metas]
    assert not any(kept for kept, holds in zip(held_by(network, node, metas), holding, strict=True) if holds)
    assert all(held_by(network, node, other))
    assert all(
        count == 0 for handle, count in network.references[node].items() if handle not in _handles(network, node)
    )


def _handles(network: Network, node_id: NodeId) -> set[Any]:
    pool = network.nodes[node_id]._pool
    return {handle for item in pool.metas() for handle in (pool.get(item.anchor_id) or held(item)).handles}


@given(st.integers(50, 200), st.integers(40, 120), st.integers(0, 2**20))
@settings(deadline=None, max_examples=40)
def test_parts_of_the_text_are_found_too(count: int, shared: int, seed: int) -> None:
    """A quarter more than a stretch in a row is enough."""
    text = tokens_of(seed, count)
    part = text[5 : 5 + shared]
    if len(part) < 43:
        return
    network = Network()
    node = network.add(0)
    metas = publish(network, node, "part", np.concatenate([tokens_of("before", 13), part]))
    network.handle(node, ev.EraseRequested(erasures(text), everywhere=False))
    assert held_by(network, node, metas)[-1] is False


def test_what_was_computed_behind_it_goes_and_what_stood_before_stays() -> None:
    network = Network()
    node = network.add(0)
    sequence = tokens_of("sequence", 320)
    metas = publish(network, node, "sequence", sequence)
    network.handle(node, ev.EraseRequested(erasures(sequence[130:160]), everywhere=False))
    assert held_by(network, node, metas) == [True, True, False, False, False]
    [report] = network.take(node, ev.ReportErased)
    assert sorted(report.anchor_ids) == sorted(anchor.anchor_id for anchor in metas[2:])
    later = publish(network, node, "sequence", np.concatenate([sequence[:64], tokens_of("more", 320)]))
    assert held_by(network, node, later)[2:] == [False] * 4  # the same sequence, from where the text stood


def test_what_goes_on_behind_an_exact_prefix_in_another_sequence_goes_too() -> None:
    """An answer, or the rest of a prompt whose beginning was pulled, has a sequence id of its own; chain hashes tie it."""
    network = Network()
    node = network.add(0)
    ends = [ChainHash(digest16(("end", number))) for number in range(4)]

    def exact(label: str, number: int, text: Ids) -> Any:
        behind = ends[number - 1] if number else NO_CHAIN
        return publish(network, node, label, text, at=64 * number, chain_start=behind, chain_end=ends[number])[0]

    secret = tokens_of("secret", 64)
    first, other = exact("prompt", 0, tokens_of("first", 64)), exact("other", 0, tokens_of("x", 64))
    second, third, fourth = exact("prompt", 1, secret), exact("answer", 2, tokens_of("a", 64)), exact("next", 3, secret)
    metas = [first, other, second, third, fourth]
    network.handle(node, ev.EraseRequested(erasures(secret[20:50]), everywhere=False))
    assert held_by(network, node, metas) == [True, True, False, False, False]

    again = [
        exact("new prompt", 1, secret),
        exact("new answer", 2, tokens_of("b", 64)),
        exact("more", 3, tokens_of("c", 64)),
    ]
    assert held_by(network, node, again) == [False] * 3
    assert held_by(network, node, [publish(network, node, "free", tokens_of("e", 64))[0]]) == [True]


def test_private_anchors_are_erased_like_others() -> None:
    network = Network()
    node = network.add(0)
    text = tokens_of("private", 64)
    metas = publish(network, node, "private", text, visibility=Visibility.PRIVATE)
    network.handle(node, ev.EraseRequested(erasures(text), everywhere=False))
    assert held_by(network, node, metas) == [False]


def test_too_short_a_text_is_refused() -> None:
    with pytest.raises(ValueError, match="too short"):
        stretches([np.arange(3, dtype=np.uint32)], KEY)
    assert stretches([np.arange(4, dtype=np.uint32)], KEY)[0] == 4


def test_names_depend_on_the_key_and_say_nothing_of_the_text() -> None:
    text = tokens_of("text", 100)
    one, other = stretches([text], KEY), stretches([text], b"k" * 16)
    assert not set(np.frombuffer(one[1][0], "<u8")) & set(np.frombuffer(other[1][0], "<u8"))
    assert text.astype("<u4").tobytes()[:16] not in one[1][0]


# --------------------------------------------------------------------------------------------------------- everywhere


def test_everywhere_reaches_everybody_and_it_does_not_come_back() -> None:
    network, ids = joined(4)
    text = tokens_of("text", 100)
    metas = [publish(network, node_id, "text", text) for node_id in ids].pop()
    network.run(2.0)
    network.handle(ids[0], ev.EraseRequested(erasures(text), everywhere=True))
    network.run(1.0)
    for node_id in ids:
        assert held_by(network, node_id, metas) == [False, False]
        assert held_by(network, node_id, publish(network, node_id, "text", text)) == [False, False]
        assert held_by(network, node_id, publish(network, node_id, "again", text)) == [False, False]
        assert not network.nodes[node_id].known_of(ids[1])


def test_only_here_leaves_others_alone_and_does_not_come_back_here() -> None:
    network, ids = joined(2)
    text = tokens_of("text", 64)
    [anchor] = [publish(network, node_id, "text", text) for node_id in ids].pop()
    network.handle(ids[0], ev.EraseRequested(erasures(text), everywhere=False))
    network.run(60.0)
    assert network.nodes[ids[0]].held(anchor.anchor_id) is None
    assert network.nodes[ids[1]].held(anchor.anchor_id) is not None


def test_erased_content_is_neither_taken_nor_pulled() -> None:
    """A holder that does not obey: its token ids are not believed, its blocks are not asked for."""
    network, ids = joined(2)
    text = tokens_of("text", 64)
    [anchor] = publish(network, ids[1], "text", text)
    network.handle(ids[0], ev.EraseRequested(erasures(text), everywhere=False))
    network.handle(ids[0], ev.TokensRequested(1, ids[1], anchor, network.now + 1))
    network.run(0.5)
    [answer] = network.take(ids[0], ev.FinishTokens)
    assert (answer.result.reason, answer.result.detail) == (MissReason.NOT_FOUND, "erased")
    named = Erasure(b"n" * 16, ids[0], 0.0, 4, b"", (anchor.anchor_id,))
    network.handle(ids[0], ev.EraseRequested((named,), everywhere=False))
    network.fetch(ids[0], 7, ids[1], anchor)
    [fetched] = network.take(ids[0], ev.FinishFetch)
    assert not fetched.found and {block.miss.detail for block in fetched.missed} == {"erased"}
    assert not any(network.references[ids[0]].values())


def test_an_anchor_is_erased_by_name_with_what_stands_behind_it() -> None:
    network, ids = joined(2)
    metas = [publish(network, node_id, "doc", tokens_of("doc", 192)) for node_id in ids].pop()
    named = Erasure(b"n" * 16, ids[0], 0.0, 4, b"", (metas[1].anchor_id,))
    network.handle(ids[0], ev.EraseRequested((named,), everywhere=True))
    network.run(1.0)
    for node_id in ids:
        assert held_by(network, node_id, metas) == [True, False, False]


def test_what_is_refused_because_it_was_erased_does_not_count_as_too_much_for_the_pool() -> None:
    network, (me,) = joined(1)
    text = tokens_of("text", 64)
    network.handle(me, ev.EraseRequested(erasures(text), everywhere=False))
    metas = publish(network, me, "text", text)
    assert held_by(network, me, metas) == [False]
    assert network.nodes[me].stats().rejected_anchors == 0


def test_who_comes_later_is_told() -> None:
    network, ids = joined(3)
    text = tokens_of("text", 64)
    network.handle(ids[0], ev.EraseRequested(erasures(text), everywhere=True))
    network.run(1.0)
    del network.nodes[ids[0]]  # even if whoever asked has gone
    late = network.add(9)
    metas = publish(network, late, "text", text)
    network.join(late, ids[1])
    network.run(40.0, until=lambda: not any(held_by(network, late, metas)))
    assert held_by(network, late, metas) == [False]


def test_lost_messages_are_made_good_by_comparing() -> None:
    network, ids = joined(5, seed=3)
    text = tokens_of("text", 64)
    for node_id in ids:
        publish(network, node_id, "text", text)
    network.fault = lambda source, target, message: [] if isinstance(message, Forget) else [0.001]
    network.handle(ids[0], ev.EraseRequested(erasures(text), everywhere=True))
    network.run(1.0)
    network.fault = lambda source, target, message: [] if network.rng.random() < 0.2 else [0.001]
    network.run(200.0, until=lambda: all(node.stats().pool_anchors == 0 for node in network.nodes.values()))
    assert all(node.stats().pool_anchors == 0 for node in network.nodes.values())


# ------------------------------------------------------------------------------------------------------------- bounds


def erasure(number: int, author: int = 0, age_s: float = 0.0) -> Erasure:
    return Erasure(digest16("e", number, author), NodeId(digest16("a", author)), age_s, 8, number.to_bytes(8, "little"))


def test_erasures_have_their_time() -> None:
    network = Network()
    node = network.add(0)
    text = tokens_of("text", 64)
    network.handle(node, ev.EraseRequested(erasures(text), everywhere=False))
    assert held_by(network, node, publish(network, node, "a", text)) == [False]
    network.now += ERASURE_S + 20
    network.handle(node, ev.TimerExpired())
    assert held_by(network, node, publish(network, node, "b", text)) == [True]


def test_memory_is_bounded_per_author_and_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(erasure_memory, "ERASURES_MAX", 100)
    monkeypatch.setattr(erasure_memory, "ERASURES_PER_AUTHOR_MAX", 60)
    node = make_node(0)
    known = node._custody.erasing
    node.handle(ev.EraseRequested(tuple(erasure(n, author=1) for n in range(10)), everywhere=False), 0.0)
    node.handle(ev.EraseRequested(tuple(erasure(n, author=2) for n in range(500)), everywhere=False), 0.0)
    assert len(known) == 70
    for author in range(3, 9):
        node.handle(ev.EraseRequested(tuple(erasure(n, author=author) for n in range(5)), everywhere=False), 0.0)
    assert len(known) == 100
    kept = [e.erasure_id for e in (erasure(n, author=1) for n in range(10)) if e.erasure_id in known]
    assert len(kept) == 10  # who asks for much makes room, not the others


def test_hashes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(erasure_memory, "HASHES_MAX", 1000)
    node = make_node(0)
    large = [replace_hashes(erasure(n), np.arange(n * 500, n * 500 + 500)) for n in range(9)]
    node.handle(ev.EraseRequested(tuple(large), everywhere=False), 0.0)
    assert len(node._custody.erasing) == 2


def replace_hashes(one: Erasure, hashes: npt.NDArray[np.int64]) -> Erasure:
    return Erasure(one.erasure_id, one.origin, 0.0, one.tokens, hashes.astype("<u8").tobytes())


def test_one_member_may_tell_only_so_much_and_strangers_nothing() -> None:
    network, ids = joined(2)
    for batch in range(6):
        news = tuple(erasure(batch * 64 + n, author=batch) for n in range(64))
        network.handle(ids[0], ev.MessageReceived(ids[1], Forget(news)))
    assert len(network.nodes[ids[0]]._custody.erasing) == erasing.NEWS_PER_SENDER_MAX
    assert network.nodes[ids[0]].stats().violations == 2
    stranger = make_node(1)
    stranger.handle(ev.MessageReceived(NodeId(b"s" * 16), Forget((erasure(1),))), 0.0)
    stranger.handle(ev.MessageReceived(NodeId(b"s" * 16), ErasuresKnown((b"i" * 8,))), 0.0)
    assert len(stranger._custody.erasing) == 0


def test_a_large_pool_is_searched_in_pieces_and_to_its_end_whatever_comes_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(erasing, "SCAN_TOKENS", 128)
    network, ids = joined(2)
    text = tokens_of("text", 64)
    metas = [publish(network, ids[0], number, tokens_of(number, 64))[0] for number in range(40)]
    metas += publish(network, ids[0], "text", text)
    network.handle(ids[0], ev.MessageReceived(ids[1], Forget(erasures(text))))
    assert network.nodes[ids[0]].next_deadline() <= network.now
    for number in range(30):
        network.run(0.06)
        network.handle(ids[0], ev.MessageReceived(ids[1], Forget((erasure(1000 + number),))))
    assert held_by(network, ids[0], metas) == [True] * 40 + [False]


def test_comparing_ends() -> None:
    """An answer is not answered with a question."""
    network, ids = joined(2)
    first, second = (network.nodes[node_id] for node_id in ids)
    first.handle(ev.EraseRequested((erasure(1),), everywhere=True), network.now)
    second.handle(ev.EraseRequested((erasure(2),), everywhere=True), network.now)
    sent: list[Any] = []
    network.fault = lambda source, target, message: [sent.append(message) or 0.001]  # type: ignore[func-returns-value]
    network.handle(ids[0], ev.MessageReceived(ids[1], ErasuresKnown((digest16("e", 2, 0)[:8],))))
    network.run(0.3)
    assert [type(m) for m in sent if isinstance(m, Forget | ErasuresKnown)] == [Forget, ErasuresKnown, Forget]
    assert len(first._custody.erasing) == len(second._custody.erasing) == 2


# ------------------------------------------------------------------------------------------------------- times to live


def test_anchors_have_their_time_and_publishing_again_renews_it() -> None:
    network = Network()
    node = network.add(0, NodeConfig(anchor_ttl_s=10.0))
    publish(network, node, "one", tokens_of("one", 64))
    network.run(6.0)
    publish(network, node, "one", tokens_of("one", 64))
    publish(network, node, "two", tokens_of("two", 64))
    network.run(9.0)
    assert network.nodes[node].stats().pool_anchors == 2
    network.run(1.5)
    assert network.nodes[node].stats().pool_anchors == 0


@given(st.lists(st.tuples(st.sampled_from("pre"), st.integers(0, 5), st.floats(0, 4)), max_size=40))
def test_lifetimes_agree_with_a_plain_table(steps: list[tuple[str, int, float]]) -> None:
    times, plain, now = Lifetimes(5.0), {}, 0.0
    for step, number, wait in steps:
        now += wait
        name = meta(number).anchor_id
        if step == "p":
            times.published([name], now)
            plain[name] = now
        elif step == "r":
            times.removed([name])
            plain.pop(name, None)
        else:
            over = times.expired(now)
            assert sorted(over) == sorted(key for key, at in plain.items() if at + 5.0 <= now)
            plain = {key: at for key, at in plain.items() if at + 5.0 > now}
    assert len(times) == len(plain)


def test_without_a_time_to_live_nothing_is_remembered() -> None:
    times = Lifetimes(0.0)
    times.published([meta(1).anchor_id], 0.0)
    assert len(times) == 0 and times.expired(1e9) == ()


def test_token_ids_that_do_not_hold_it_pass() -> None:
    network, ids = joined(2)
    [anchor] = publish(network, ids[1], "fine", tokens_of("fine", 64))
    network.handle(ids[0], ev.EraseRequested(erasures(tokens_of("text", 64)), everywhere=False))
    network.handle(ids[0], ev.TokensRequested(1, ids[1], anchor, network.now + 1))
    network.run(0.5)
    [answer] = network.take(ids[0], ev.FinishTokens)
    assert isinstance(answer.result, ev.AnchorTokens)
