"""Limits of uploads, what busy holders tell, and what a refusal must not tell."""

from __future__ import annotations

import pytest
from protocol_harness import Network, held, joined, meta, record
from test_pulls import BLOCK, DOC, OTHER, PEER, hello, holder, of, pull, sent

from kvcomm_p2p.protocol import events as ev
from kvcomm_p2p.protocol import messages as m
from kvcomm_p2p.protocol import wire
from kvcomm_p2p.protocol.anchors import Visibility
from kvcomm_p2p.protocol.config import NodeConfig
from kvcomm_p2p.protocol.ids import NodeId
from kvcomm_p2p.protocol.node import Node

TAG = b"g" * 8
LONG = meta("long", tokens=512)


def credit(pull_id: int, received: int, sender: NodeId = PEER.node_id) -> ev.MessageReceived:
    return ev.MessageReceived(sender, m.Credit(pull_id, received))


def finished(node: Node, peer: m.MemberRecord, pull_id: int, now: float) -> None:
    node.handle(pull(pull_id, sender=peer.node_id), now)
    node.handle(credit(pull_id, 2 * BLOCK, peer.node_id), now)


def test_bytes_under_way_to_one_peer_are_limited_whatever_credit_it_gives() -> None:
    node = holder(NodeConfig(upload_bytes_in_flight_max=3 * BLOCK), LONG)
    assert len(of(node.handle(pull(1, LONG, credit_bytes=10**9), 1.0), ev.SendBlock)) == 3
    assert not of(node.handle(pull(2, LONG, credit_bytes=10**9), 1.0), ev.SendBlock), "all its pulls together"
    assert len(of(node.handle(pull(1, LONG, 10**9, OTHER.node_id), 1.0), ev.SendBlock)) == 3, "another has its own"
    assert len(of(node.handle(credit(1, 2 * BLOCK), 1.1), ev.SendBlock)) == 2


def test_an_upload_cap_holds_and_is_shared_between_pullers() -> None:
    rate = 20 * BLOCK
    node = holder(NodeConfig(upload_bytes_per_s_max=rate), LONG)
    got: dict[bytes, int] = {PEER.node_id: 0, OTHER.node_id: 0}
    effects = node.handle(pull(1, LONG, 10**9), 1.0) + node.handle(pull(1, LONG, 10**9, OTHER.node_id), 1.0)
    now = 1.0
    while now < 2.0:
        for block in of(effects, ev.SendBlock):
            got[block.to] += 1
        now = node.next_deadline()
        effects = node.handle(ev.TimerExpired(), now)
    assert 18 <= sum(got.values()) <= 24 and abs(got[PEER.node_id] - got[OTHER.node_id]) <= 2


def test_requests_per_second_of_one_peer_are_limited_and_counted() -> None:
    node = holder(NodeConfig(requests_per_peer_s_max=3))
    question = ev.MessageReceived(PEER.node_id, m.GetTokens(1, DOC.anchor_id, 0, 64))
    assert [len(sent(node.handle(question, 1.0), m.Tokens)) for _ in range(4)] == [1, 1, 1, 0]
    (busy,) = sent(node.handle(pull(), 1.0), m.PullFailed)
    assert busy.reason is m.PullFailedReason.BUSY and node.stats().throttled == 2
    other = ev.MessageReceived(OTHER.node_id, m.GetTokens(1, DOC.anchor_id, 0, 64))
    assert sent(node.handle(other, 1.0), m.Tokens) and sent(node.handle(question, 2.0), m.Tokens)


def test_a_busy_holder_names_who_just_got_it() -> None:
    node = holder(NodeConfig(uploads_max=1))
    third = record(3)
    node.handle(hello(third), 0.0)
    finished(node, PEER, 1, 1.0)
    node.handle(pull(2, sender=third.node_id), 1.1)
    (busy,) = sent(node.handle(pull(1, sender=OTHER.node_id), 1.2), m.PullFailed)
    assert busy.referrals == (PEER.node_id,)
    (busy,) = sent(node.handle(pull(3, sender=PEER.node_id), 1.2), m.PullFailed)
    assert busy.referrals == (), "nobody is referred to itself"
    (busy,) = sent(node.handle(pull(4, meta("else"), sender=OTHER.node_id), 1.2), m.PullFailed)
    assert busy.referrals == (), "of other blocks nothing is known"
    node.handle(ev.PeerUnreachable(PEER.node_id), 1.3)
    (busy,) = sent(node.handle(pull(5, sender=OTHER.node_id), 1.3), m.PullFailed)
    assert busy.referrals == (), "the dead are not named"


def test_who_credited_some_of_a_pull_is_named_for_those_blocks_alone() -> None:
    node = holder(NodeConfig(uploads_max=1))
    node.handle(pull(1, sender=PEER.node_id), 1.0)
    one = tuple((m.PullBlock(DOC.anchor_id, index, BLOCK),) for index in range(2))
    asks = [ev.MessageReceived(OTHER.node_id, m.Pull(9, blocks, 10**6)) for blocks in one]
    node.handle(ev.MessageReceived(PEER.node_id, m.Credit(1, BLOCK - 1)), 1.1)
    assert [sent(node.handle(ask, 1.1), m.PullFailed)[0].referrals for ask in asks] == [(), ()]
    node.handle(ev.MessageReceived(PEER.node_id, m.Credit(1, BLOCK)), 1.2)
    assert [sent(node.handle(ask, 1.2), m.PullFailed)[0].referrals for ask in asks] == [(PEER.node_id,), ()]


def test_referrals_are_the_last_eight_and_expire() -> None:
    config = NodeConfig(uploads_max=1)
    node = holder(config)
    peers = [record(index) for index in range(3, 14)]
    for peer in peers:
        node.handle(hello(peer), 0.0)
        finished(node, peer, 1, 1.0)
    node.handle(pull(2, sender=PEER.node_id), 1.0)
    (busy,) = sent(node.handle(pull(2, sender=OTHER.node_id), 1.0), m.PullFailed)
    assert sorted(busy.referrals) == sorted(peer.node_id for peer in peers[-8:])
    (again,) = sent(node.handle(pull(3, sender=OTHER.node_id), 1.0), m.PullFailed)
    assert again.referrals[0] != busy.referrals[0], "they take turns"
    node.handle(pull(4, sender=PEER.node_id), 1.0 + config.passing_on_s)
    (late,) = sent(node.handle(pull(5, sender=OTHER.node_id), 1.0 + config.passing_on_s), m.PullFailed)
    assert late.referrals == ()


def test_nothing_is_passed_on_and_nobody_is_named_where_that_is_off() -> None:
    network, ids = joined(3, config=NodeConfig(uploads_max=1, passing_on_s=0.0))
    network.publish(ids[0], DOC)
    network.fetch(ids[1], 1, ids[0], DOC, anchors=(DOC,))
    network.run(0.1)
    assert len(network.take(ids[1], ev.FinishFetch)[0].found) == DOC.blocks
    assert len(network.nodes[ids[1]]._onward) == 0
    network.fetch(ids[2], 1, ids[1], DOC)
    network.run(0.1)
    assert not network.take(ids[2], ev.FinishFetch)[0].found
    node = holder(NodeConfig(uploads_max=1, passing_on_s=0.0))
    finished(node, PEER, 1, 1.0)
    node.handle(pull(2, sender=PEER.node_id), 1.0)
    (busy,) = sent(node.handle(pull(1, sender=OTHER.node_id), 1.0), m.PullFailed)
    assert busy.reason is m.PullFailedReason.BUSY and busy.referrals == ()


def test_pullers_of_what_the_asker_may_not_see_are_not_named() -> None:
    secret = meta("secret", visibility=Visibility.GROUP, group=TAG)
    node = holder(NodeConfig(uploads_max=1), secret)
    members = [record(index, groups=(TAG,)) for index in (7, 8)]
    for member in members:
        node.handle(hello(member), 0.0)
    node.handle(pull(1, secret, sender=members[0].node_id), 1.0)
    node.handle(credit(1, 2 * BLOCK, members[0].node_id), 1.0)
    node.handle(pull(2, secret, sender=members[0].node_id), 1.0)
    (told,) = sent(node.handle(pull(1, secret, sender=members[1].node_id), 1.1), m.PullFailed)
    (refused,) = sent(node.handle(pull(1, secret, sender=PEER.node_id), 1.1), m.PullFailed)
    assert told.referrals == (members[0].node_id,) and refused.referrals == ()


def test_what_is_not_there_not_for_you_or_of_another_size_is_answered_byte_for_byte_the_same() -> None:
    secret = meta("secret", visibility=Visibility.GROUP, group=TAG)
    private = meta("private", visibility=Visibility.PRIVATE)
    asks = {
        "unknown": pull(9, meta("nowhere")),
        "group": pull(9, secret),
        "private": pull(9, private),
        "size": pull(9, DOC, size=BLOCK - 8),
    }
    for busy in (False, True):
        for capped in (0, BLOCK):
            answers = {}
            for name, ask in asks.items():
                node = holder(NodeConfig(uploads_max=1, upload_bytes_per_s_max=capped), secret, private, DOC)
                if busy:
                    node.handle(pull(1, sender=OTHER.node_id), 0.9)
                effects = node.handle(ask, 1.0)
                frames = [wire.encode(node.me.node_id, effect.message) for effect in of(effects, ev.SendMessage)]
                answers[name] = (frames, len(effects), node.next_deadline(), node.stats().uploads)
            assert len({repr(answer) for answer in answers.values()}) == 1 and answers["unknown"][0]
    tokens = []
    for anchor in (meta("nowhere"), secret, private):
        node = holder(None, secret, private, DOC)
        effects = node.handle(ev.MessageReceived(PEER.node_id, m.GetTokens(1, anchor.anchor_id, 0, 64)), 1.0)
        tokens.append([wire.encode(node.me.node_id, effect.message) for effect in of(effects, ev.SendMessage)])
    assert tokens[0] == tokens[1] == tokens[2]


def test_strangers_cannot_keep_what_they_may_not_see_from_being_evicted() -> None:
    private = meta("private", visibility=Visibility.PRIVATE)
    node = holder(NodeConfig(pool_anchors_max=2), private, DOC)
    blocks = (*(m.PullBlock(DOC.anchor_id, i, BLOCK) for i in range(2)), m.PullBlock(private.anchor_id, 0, BLOCK))
    node.handle(ev.MessageReceived(PEER.node_id, m.Pull(1, blocks, 10**6)), 1.0)
    node.handle(ev.AnchorsPublished((held(meta("new")),)), 1.1)
    assert node.held(private.anchor_id) is None and node.held(DOC.anchor_id) is not None


@pytest.mark.parametrize("visibility", [Visibility.PUBLIC, Visibility.GROUP])
def test_blocks_just_pulled_are_passed_on_to_whom_may_see_them(visibility: Visibility) -> None:
    group = TAG if visibility is Visibility.GROUP else b""
    anchor = meta("passed", visibility=visibility, group=group)
    network = Network()
    ids = [network.add(index, groups=(TAG,) if index in (1, 2) else ()) for index in range(4)]
    for node_id in ids[1:]:
        network.join(node_id, ids[0])
    network.run(5.0)
    network.publish(ids[0], anchor)
    network.fetch(ids[1], 1, ids[0], anchor, anchors=(anchor,))
    network.run(0.1)
    assert len(network.take(ids[1], ev.FinishFetch)[0].found) == 2
    network.fetch(ids[2], 1, ids[1], anchor)
    network.fetch(ids[3], 1, ids[1], anchor)
    network.run(0.1)
    assert len(network.take(ids[2], ev.FinishFetch)[0].found) == 2
    outsider = network.take(ids[3], ev.FinishFetch)[0]
    assert len(outsider.found) == (2 if visibility is Visibility.PUBLIC else 0)
    network.run(NodeConfig().passing_on_s + 0.1)
    assert sum(network.references[ids[1]].values()) == 2, "only the caller's references are left"
    network.fetch(ids[2], 2, ids[1], anchor)
    network.run(0.1)
    assert not network.take(ids[2], ev.FinishFetch)[0].found


def test_what_is_passed_on_stays_within_its_bytes_and_ends_with_forgetting() -> None:
    network, ids = joined(2, config=NodeConfig(passing_on_bytes_max=3 * BLOCK))
    anchors = [meta(("kept", index)) for index in range(3)]
    network.publish(ids[0], *anchors)
    for index, anchor in enumerate(anchors):
        network.fetch(ids[1], index, ids[0], anchor, anchors=(anchor,))
    network.run(0.2)
    node = network.nodes[ids[1]]
    assert len(network.take(ids[1], ev.FinishFetch)) == 3
    assert node._onward.bytes == 3 * BLOCK and sum(network.references[ids[1]].values()) == 6 + 3
    network.handle(ids[1], ev.AnchorsForgotten(tuple(anchor.anchor_id for anchor in anchors)))
    assert node._onward.bytes == 0 and sum(network.references[ids[1]].values()) == 6


def test_evicted_during_a_pull_is_a_partial_hit() -> None:
    network, ids = joined(2, config=NodeConfig(credit_bytes=BLOCK))
    network.publish(ids[0], LONG)
    network.fetch(ids[1], 1, ids[0], LONG)
    network.run(0.01)
    network.handle(ids[0], ev.AnchorsForgotten((LONG.anchor_id,)))
    network.run(1.0)
    (finish,) = network.take(ids[1], ev.FinishFetch)
    assert finish.found and finish.missed
    assert {missed.miss.reason.value for missed in finish.missed} == {"evicted"}
    assert finish.wait_lost_s == 0.0
