"""Costs: the formulas, and a tracker that follows what is measured."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from planning_cases import COSTS, ME, PEER

from kvcomm_p2p.planning.costs import CostTracker, align_s, first_costs, pull_s, recompute_s
from kvcomm_p2p.planning.types import Costs
from kvcomm_p2p.protocol.anchors import BLOCK_TOKENS, Miss, MissReason
from kvcomm_p2p.protocol.ids import NodeId


def truth_s(tokens: int, cached: int, forward: float = 0.02, token: float = 0.001, pair: float = 4e-7) -> float:
    return forward + tokens * token + (tokens * cached + tokens**2 / 2) * pair


def test_formulas() -> None:
    assert recompute_s(COSTS, 0, 1000) == 0
    assert recompute_s(COSTS, 100, 1000) == pytest.approx(0.01 + 0.2 + (100_000 + 5_000) * 2e-7)
    split = recompute_s(COSTS, 300, 0) + recompute_s(COSTS, 700, 300)
    assert split == pytest.approx(recompute_s(COSTS, 1000, 0) + COSTS.forward_s)
    assert pull_s(COSTS, 0) == 0
    assert pull_s(COSTS, 10**9) == pytest.approx(1.003)
    assert align_s(COSTS, 3 * 10**9) == pytest.approx(1.0)


def observed(tracker: CostTracker, n: int, seed: int, slower: float = 1.0) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(n):
        tokens, cached = int(rng.integers(32, 4000)), int(rng.integers(0, 4000))
        tracker.saw_prefill(tokens, cached, slower * truth_s(tokens, cached) * rng.uniform(0.95, 1.05))


def worst(costs: Costs, slower: float = 1.0) -> float:
    cases = [(64, 0), (100, 1000), (1000, 0), (4000, 0), (500, 3000)]
    return max(abs(recompute_s(costs, r, c) / (slower * truth_s(r, c)) - 1) for r, c in cases)


def test_prefill_is_learnt_in_a_few_observations() -> None:
    tracker = CostTracker(COSTS)
    assert tracker.costs.forward_s == pytest.approx(COSTS.forward_s)
    assert worst(tracker.costs) > 0.3
    observed(tracker, 8, seed=1)
    assert worst(tracker.costs) < 0.15
    observed(tracker, 24, seed=2)
    assert worst(tracker.costs) < 0.08


def test_outliers_move_little_either_way() -> None:
    tracker = CostTracker(COSTS)
    observed(tracker, 20, seed=1)
    for seconds in (60.0, 1e-6, 60.0, 1e-6):
        tracker.saw_prefill(500, 500, seconds)
    assert worst(tracker.costs) < 0.15


def test_a_lasting_change_is_followed() -> None:
    tracker = CostTracker(COSTS)
    observed(tracker, 40, seed=1)
    observed(tracker, 24, seed=2, slower=4)
    assert worst(tracker.costs, slower=4) < 0.15


def test_the_same_observation_again_and_again_leaves_the_rest_alone() -> None:
    tracker = CostTracker(COSTS)
    for _ in range(50):
        tracker.saw_prefill(1000, 0, truth_s(1000, 0))
    costs = tracker.costs
    assert recompute_s(costs, 1000, 0) == pytest.approx(truth_s(1000, 0), rel=0.05)
    assert min(costs.forward_s, costs.token_s, costs.attention_s) > 0
    assert recompute_s(costs, 2000, 0) > recompute_s(costs, 1000, 0) * 1.5


def test_pulls_are_told_apart_by_peer() -> None:
    tracker = CostTracker(COSTS)
    for size in (1e6, 2e7, 5e6, 4e7, 1e6, 3e7):
        tracker.saw_pull(PEER, int(size), 0.001 + size / 2e9)
        tracker.saw_pull(ME, int(size), 0.05 + size / 5e7)
    near, far = tracker.pulls[PEER], tracker.pulls[ME]
    assert near.bytes_per_s == pytest.approx(2e9, rel=0.25)
    assert far.bytes_per_s == pytest.approx(5e7, rel=0.25)
    assert near.latency_s < far.latency_s


def test_only_so_many_peers_are_remembered() -> None:
    tracker = CostTracker(COSTS)
    peers = [NodeId(number.to_bytes(16, "big")) for number in range(tracker.PEERS_MAX + 2)]
    for peer in peers:
        tracker.saw_pull(peer, 10**6, 0.01)
    assert set(tracker.pulls) == set(peers[2:])


def test_align_is_learnt() -> None:
    tracker = CostTracker(COSTS)
    for _ in range(5):
        tracker.saw_align(10**8, 0.1)
    assert tracker.costs.align_bytes_per_s == pytest.approx(1e9, rel=0.05)
    assert tracker.costs.token_bytes == COSTS.token_bytes


def test_samples_at_load_are_the_start() -> None:
    samples = [(r, c, truth_s(r, c)) for r, c in ((16, 0), (128, 0), (512, 0), (128, 1024))]
    tracker = CostTracker.measured(COSTS, samples, [(10**7, 0.01)])
    assert worst(tracker.costs) < 0.2
    assert tracker.costs.align_bytes_per_s == pytest.approx(1e9, rel=0.1)


def test_what_was_timed_while_others_loaded_is_put_right_by_the_first_forward_of_any_length() -> None:
    """Recorded on two cores: tokens and seconds of forwards at load, with three other processes at the same, and alone."""
    beside = [(1, 0, 0.1924), (64, 0, 0.7377), (1, 0, 0.1746), (64, 0, 0.7668)]
    alone = [(1, 0, 0.0703), (64, 0, 0.2614), (1, 0, 0.0568), (64, 0, 0.268)]
    start = first_costs(0.02, 0.001, COSTS.token_bytes)
    truth = recompute_s(CostTracker.measured(start, alone).costs, 1500, 0)
    for tokens, seconds in ((1, 0.0604), (64, 0.2626)):
        tracker = CostTracker.measured(start, beside)
        assert recompute_s(tracker.costs, 1500, 0) > 2.5 * truth
        tracker.saw_prefill(tokens, 0, seconds)
        assert recompute_s(tracker.costs, 1500, 0) == pytest.approx(truth, rel=0.1)


def test_impossible_measurements_are_left_out_and_impossible_costs_refused() -> None:
    tracker = CostTracker(COSTS)
    before = tracker.costs
    for seconds in (0.0, -1.0, float("nan"), float("inf")):
        tracker.saw_prefill(100, 0, seconds)
        tracker.saw_pull(PEER, 100, seconds)
        tracker.saw_align(100, seconds)
    tracker.saw_prefill(0, 10, 1.0)
    tracker.saw_pull(PEER, 0, 1.0)
    tracker.saw_align(0, 1.0)
    assert tracker.costs == before
    with pytest.raises(ValueError, match="positive"):
        CostTracker(replace(COSTS, token_s=0.0))


def test_a_link_that_runs_out_of_time_is_believed_to_be_slow_from_then_on() -> None:
    tracker = CostTracker(COSTS)
    tracker.saw_pull(PEER, 10**7, pull_s(COSTS, 10**7))
    block = BLOCK_TOKENS * COSTS.token_bytes
    late = [Miss(MissReason.DEADLINE)]
    for _ in range(3):
        tracker.saw_cut(PEER, 3 * block, 4.0, late)
    believed = tracker.pulls[PEER]
    assert believed.latency_s + 4 * block / believed.bytes_per_s == pytest.approx(4.0, rel=0.5)


def test_not_a_block_in_time_is_learned_too() -> None:
    tracker = CostTracker(COSTS)
    tracker.saw_cut(PEER, 0, 4.0, [Miss(MissReason.DEADLINE)])
    block = BLOCK_TOKENS * COSTS.token_bytes
    assert tracker.pulls[PEER].latency_s + block / tracker.pulls[PEER].bytes_per_s == pytest.approx(4.0, rel=0.1)


@pytest.mark.parametrize(
    ("kv_bytes", "seconds", "reason"),
    [
        (0, 0.2, MissReason.STALLED),
        (10**6, 4.0, MissReason.EVICTED),
        (10**6, 4.0, MissReason.BUSY),
        (10**9, 1e-3, MissReason.DEADLINE),
        (10**9, 1e-3, MissReason.STALLED),
    ],
    ids=["frozen", "evicted", "busy", "fast so far", "fast, then silent"],
)
def test_what_failed_for_other_reasons_says_nothing_of_the_link(
    kv_bytes: int, seconds: float, reason: MissReason
) -> None:
    tracker = CostTracker(COSTS)
    tracker.saw_cut(PEER, kv_bytes, seconds, [Miss(reason)])
    assert PEER not in tracker.pulls
