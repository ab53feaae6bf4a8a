"""Delays, losses, cuts, and fair sharing of an interface."""

from __future__ import annotations

import random

import pytest

from kvcomm_p2p.errors import ConfigError
from kvcomm_p2p.sim.links import LAN, WAN, Cut, LinkProfile, Links


def links(**changes: float) -> Links:
    made = Links(random.Random(1), LinkProfile(**changes), WAN)
    for _ in range(3):
        made.add()
    return made


def test_a_frame_takes_latency_and_its_bytes() -> None:
    made = links(latency_s=0.01, jitter_s=0.0, bytes_per_s=1000.0)
    (delay,) = made.delays_s(0, 1, 934)
    assert delay == pytest.approx(0.01 + 1.0)


def test_sites_decide_which_profile_holds() -> None:
    made = Links(random.Random(1), LAN, WAN)
    made.add(0)
    made.add(0)
    made.add(1)
    assert made.profile(0, 1) is LAN and made.profile(0, 2) is WAN
    made.set_profile(0, 1, WAN)
    assert made.profile(0, 1) is WAN and made.profile(1, 0) is LAN


def test_loss_and_duplication_have_their_shares() -> None:
    made = links(loss=0.25, duplication=0.1)
    counts = [len(made.delays_s(0, 1, 100)) for _ in range(4000)]
    assert counts.count(0) / 4000 == pytest.approx(0.25, abs=0.03)
    assert counts.count(2) / 4000 == pytest.approx(0.075, abs=0.02)


def test_reordering_lets_later_frames_overtake() -> None:
    made = links(latency_s=0.01, jitter_s=0.0, reordering=0.5)
    arrivals = [at * 0.001 + made.delays_s(0, 1, 10)[0] for at in range(200)]
    assert arrivals != sorted(arrivals)


def test_a_cut_is_one_way() -> None:
    made = links()
    made.cuts.append(Cut(frozenset({0}), frozenset({1, 2})))
    assert not made.delays_s(0, 1, 10) and made.delays_s(1, 0, 10)


def send_all(made: Links) -> list[tuple[float, str]]:
    """When each chunk arrives, until nothing waits."""
    arrived: list[tuple[float, str]] = []
    assert made.begin(0)
    now = 0.0
    while (sent := made.send_next(0, now)) is not None:
        now, arrives_at, arrive = sent
        if arrives_at is not None:
            arrived.append((arrives_at, str(arrive())))
    return arrived


def test_flows_share_an_interface_chunk_by_chunk() -> None:
    made = links(latency_s=0.0, jitter_s=0.0, bytes_per_s=1000.0)
    for chunk in range(3):
        made.enqueue(0, (1, 1), 934, lambda chunk=chunk: f"a{chunk}")  # type: ignore[misc]
        made.enqueue(0, (2, 1), 934, lambda chunk=chunk: f"b{chunk}")  # type: ignore[misc]
    arrived = send_all(made)
    assert [name for _, name in arrived] == ["a0", "b0", "a1", "b1", "a2", "b2"]
    assert [at for at, _ in arrived] == pytest.approx([1, 2, 3, 4, 5, 6])
    assert not made.begin(0)


def test_a_receiver_takes_in_no_faster_than_its_interface() -> None:
    made = links(latency_s=0.0, jitter_s=0.0, bytes_per_s=1000.0)
    for source in (0, 1):
        for _ in range(2):
            made.enqueue(source, (2, source), 934, lambda: "")
    at = []
    for source in (0, 1):
        assert made.begin(source)
        now = 0.0
        while (sent := made.send_next(source, now)) is not None:
            now, arrives_at, _ = sent
            at.append(arrives_at)
    assert max(each for each in at if each is not None) == pytest.approx(4.0)


def test_a_slow_node_is_slow_both_ways() -> None:
    made = links(latency_s=0.0, jitter_s=0.0, bytes_per_s=1000.0)
    made.slow_down(1, 4.0)
    assert made.delays_s(0, 1, 934) == pytest.approx([4.0])
    assert made.delays_s(1, 0, 934) == pytest.approx([4.0])
    made.slow_down(1, 1.0)
    assert made.delays_s(0, 1, 934) == pytest.approx([1.0])


def test_losses_cost_a_stream_its_speed_not_its_bytes() -> None:
    lossy = LinkProfile(latency_s=0.02, jitter_s=0.0, bytes_per_s=1e8, loss=0.01)
    assert lossy.bulk_bytes_per_s == pytest.approx(1448 / 0.04 * (1.5 / 0.01) ** 0.5)
    assert LinkProfile(bytes_per_s=1e8).bulk_bytes_per_s == 1e8


@pytest.mark.parametrize("bad", [{"latency_s": -1.0}, {"bytes_per_s": 0.0}, {"loss": 1.5}, {"jitter_s": float("nan")}])
def test_links_that_cannot_be_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        LinkProfile(**bad)
