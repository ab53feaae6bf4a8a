"""The lattice of claims, and that no order, loss or repetition of them brings anybody back."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from protocol_harness import record

from kvcomm_p2p.protocol.config import NodeConfig
from kvcomm_p2p.protocol.health import HEALTH_MAX, LocalHealth
from kvcomm_p2p.protocol.ids import NodeId
from kvcomm_p2p.protocol.membership import Membership
from kvcomm_p2p.protocol.messages import Rumour, Status
from kvcomm_p2p.protocol.names import Names
from kvcomm_p2p.protocol.rumours import RUMOURS_HELD_MAX, RUMOURS_PER_MESSAGE, Rumours
from kvcomm_p2p.protocol.standing import GONE_REMEMBERED_MAX, Standing, merge
from kvcomm_p2p.protocol.suspicion import Suspicion, shortest_s

standings = st.builds(Standing, st.integers(0, 3), st.integers(0, 3), st.sampled_from(Status))
PEER = record(1)


@given(standings, standings, standings)
def test_claims_merge_alike_in_any_order(a: Standing, b: Standing, c: Standing) -> None:
    assert merge(a, b) == merge(b, a)
    assert merge(merge(a, b), c) == merge(a, merge(b, c))
    assert merge(a, a) == a


@given(standings, standings)
def test_merging_never_goes_back(a: Standing, b: Standing) -> None:
    both = merge(a, b)
    assert (both.epoch, both.incarnation) >= max(a[:2], b[:2])
    if a.is_gone and not both.is_gone:
        assert (both.epoch > a.epoch) or (a.status is Status.DEAD and both.incarnation > a.incarnation)


def membership(config: NodeConfig | None = None) -> Membership:
    return Membership(config or NodeConfig(), record(0))


def tell(members: Membership, claim: Standing, now: float) -> None:
    """As it comes in: what lives with its record, everything as a rumour."""
    if claim.status is Status.ALIVE:
        members.learn(record(1, epoch=claim.epoch), claim.incarnation, now)
    else:
        members.hear(Rumour(PEER.node_id, *claim), now)


@given(st.lists(standings, max_size=8), st.randoms(), st.booleans())
@settings(max_examples=400)
def test_no_order_loss_or_repetition_of_evidence_resurrects(
    claims: list[Standing], rng: random.Random, forget: bool
) -> None:
    """Once it was said to be gone, only a higher epoch, or after a death a higher incarnation, brings it back: also when
    it was forgotten in between. A life that was heard a moment ago is in doubt when a later one is said to be over."""
    members = membership(NodeConfig(forget_after_s=10.0))
    told = claims * 2
    rng.shuffle(told)
    ends: list[Standing] = []
    now = 100.0
    for claim in told:
        tell(members, claim, now)
        now += 11.0 if forget else 0.01
        members.tick(now)
        ends += [claim] if claim.is_gone else []
        peer = members.get(PEER.node_id)
        for end in ends if peer is not None and not peer.is_gone else []:
            assert peer is not None
            if end.status is Status.LEFT:
                in_doubt = peer.state is Status.SUSPECT and any(peer.record.epoch < each.epoch for each in ends)
                assert peer.record.epoch > end.epoch or in_doubt
            elif peer.state is Status.ALIVE:
                assert (peer.record.epoch, peer.incarnation) > end[:2]


@given(st.lists(standings, max_size=10))
def test_stored_epoch_and_incarnation_never_fall(claims: list[Standing]) -> None:
    members = membership()
    last = (-1, -1)
    for step, claim in enumerate(claims):
        tell(members, claim, 100.0 + step / 100)
        standing = members.standing(PEER.node_id)
        if standing is not None:
            assert standing[:2] >= last
            last = standing[:2]


@given(st.lists(standings, min_size=1, max_size=6))
def test_the_view_hash_follows_what_is_believed(claims: list[Standing]) -> None:
    """Equal beliefs hash alike however they came about, and it is kept as it would be made anew."""
    members = membership()
    for step, claim in enumerate(claims):
        tell(members, claim, 100.0 + step / 100)
    peer = members.get(PEER.node_id)
    anew = membership()
    if peer is not None and not peer.is_gone:
        anew.learn(peer.record, peer.incarnation, 0.0)
        if peer.state is Status.SUSPECT:
            anew.hear(Rumour(PEER.node_id, *peer.standing), 0.0)
    assert members.view_hash() == anew.view_hash()
    if peer is not None and not peer.is_gone:
        assert members.view_hash() != membership().view_hash()


def test_a_suspects_term_shrinks_with_each_who_suspects_it_alone() -> None:
    """By the formula of Lifeguard, section 3.2, with k = 2."""
    suspicion = Suspicion(0.0, 16, 1.0, record(1).node_id)
    shortest = shortest_s(16, 1.0)
    assert abs(shortest - 4.816) < 0.001
    assert abs(suspicion.ends_at - 6 * shortest) < 1e-9
    assert not suspicion.confirm(record(1).node_id), "the same one does not count twice"
    assert suspicion.confirm(record(2).node_id)
    assert abs(suspicion.ends_at - 13.71) < 0.01
    assert suspicion.confirm(record(3).node_id)
    assert abs(suspicion.ends_at - shortest) < 1e-9
    assert not suspicion.confirm(record(4).node_id)
    suspicion.extend(2.0)
    assert abs(suspicion.ends_at - shortest - 2.0) < 1e-9


def test_where_nobody_could_confirm_the_term_is_the_shortest() -> None:
    assert Suspicion(0.0, 3, 1.0, None).ends_at == 4.0
    assert Suspicion(0.0, 4, 1.0, None).ends_at == 24.0


def test_rumours_are_told_so_often_and_the_least_told_first() -> None:
    rumours = Rumours()
    first, second = (Rumour(record(index).node_id, 1, 0, Status.DEAD) for index in (1, 2))
    rumours.add(first)
    assert rumours.take(16) == (first,)
    rumours.add(second)
    rumours.add(first)  # again: no news
    assert rumours.take(16) == (second, first)
    told = [rumour for _ in range(20) for rumour in rumours.take(16)]
    assert told.count(first) == 8 - 2 and told.count(second) == 8 - 1
    assert len(rumours) == 0


def test_later_rumours_replace_earlier_ones_but_accusers_add_up() -> None:
    rumours = Rumours()
    node = record(1).node_id
    accusations = [Rumour(node, 1, 0, Status.SUSPECT, record(index).node_id) for index in (2, 3, 4)]
    for accusation in accusations:
        rumours.add(accusation)
    assert set(rumours.take(16)) == set(accusations)
    rumours.add(Rumour(node, 1, 1, Status.ALIVE))
    assert rumours.take(16) == (Rumour(node, 1, 1, Status.ALIVE),)


def test_what_is_remembered_and_told_is_bounded() -> None:
    members = membership(NodeConfig(peers_max=10))
    rumours = members.rumours
    for index in range(3 * GONE_REMEMBERED_MAX // 2):
        members.hear(Rumour(NodeId(index.to_bytes(16, "big")), 1, 0, Status.DEAD), 0.0)
    assert len(members._departed) == GONE_REMEMBERED_MAX
    for index in range(2 * RUMOURS_HELD_MAX):
        rumours.add(Rumour(NodeId(index.to_bytes(16, "big")), 1, 0, Status.DEAD))
    assert len(rumours) == RUMOURS_HELD_MAX
    assert len(rumours.take(16)) == RUMOURS_PER_MESSAGE


def test_health_is_bounded_both_ways() -> None:
    health = LocalHealth()
    health.better()
    assert health.patience == 1
    for _ in range(20):
        health.worse()
    assert health.trouble == HEALTH_MAX and health.patience == 8


def test_names_follow_records() -> None:
    names = Names()
    for name, node in (("a", b"2"), ("a", b"1"), ("b", b"3"), ("a", b"1")):
        names.add(name, NodeId(node))
    assert names.bearers("a") == [b"1", b"2"] and names.bearers("c") == [] and len(names) == 3
    names.drop("b", NodeId(b"3"))
    names.drop("a", NodeId(b"2"))
    assert names.bearers("a") == [b"1"] and names.bearers("b") == [] and len(names) == 1
