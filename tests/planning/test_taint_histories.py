"""Taint and secrets never leak, whatever nodes do with each other's KV."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from planning_cases import Tokens, joined, words
from taint_rows import NODES, Leak
from taint_world import GROUPS, Fill, Part, World, worn

from kvcomm_p2p.planning import prefix, segments
from kvcomm_p2p.planning.candidates import Candidate
from kvcomm_p2p.planning.segments import Segment
from kvcomm_p2p.planning.spans import encoded_blocks, hops_at, span_hops
from kvcomm_p2p.planning.types import Donor, Mode, Plan, SpanKind
from kvcomm_p2p.protocol.anchors import BLOCK_TOKENS, Visibility

DOCUMENTS = tuple(words(seed, 100 + 24 * seed) for seed in range(5))
TOKENS_MAX = 600
FILLS = 12
SECRECY = (12, 2, 1)
"""How often parts of prompts are public, of a group, private."""


def random_fill(chances: random.Random, sequences: Sequence[tuple[int, Tokens]]) -> Fill:
    """A prompt of documents, quotations and own words, or a further turn of an earlier one, at any node in any mode."""
    recent = sequences[-6:]
    node = chances.randrange(NODES)
    parts: list[Part] = []
    if recent and chances.random() < 0.4:
        earlier, token_ids = chances.choice(recent)
        parts.append(Part(token_ids))
        node = chances.choice([node, earlier, earlier])
    sources = [*DOCUMENTS, *(token_ids for _, token_ids in recent)]
    for _ in range(chances.randint(1, 3)):
        token_ids = words_of(chances, 70) if chances.random() < 0.3 else quotation(chances, sources)
        if sum(len(part.token_ids) for part in parts) + len(token_ids) <= TOKENS_MAX:
            level = chances.choices(tuple(Visibility), SECRECY)[0]
            parts.append(Part(token_ids, level, chances.choice(GROUPS[node]) if level is Visibility.GROUP else ""))
    parts.append(Part(words_of(chances, 40)))
    return Fill(
        node=node,
        mode=chances.choice([Mode.BALANCED, Mode.FAST, Mode.FAST, Mode.EXACT]),
        parts=tuple(parts),
        broken=chances.choice([0, 0, 0, 2, 5]),
        strange=chances.random() < 0.2,
        widen=chances.random() < 0.3,
        fall_back=chances.random() < 0.1,
        answer=chances.choice([0, 0, 5, 40]),
        seed=chances.randrange(1000),
        int8=chances.random() < 0.4,
    )


def words_of(chances: random.Random, tokens_max: int) -> Tokens:
    return words(chances.randrange(1000, 2000), chances.randint(1, tokens_max))


def quotation(chances: random.Random, sources: Sequence[Tokens]) -> Tokens:
    """Part of one of these, perhaps with something else in its middle."""
    source = chances.choice(sources)
    first = chances.choice([0, 0, 32, chances.randrange(64)]) % len(source)
    quoted = source[first : first + chances.choice([30, 100, 200, 300])]
    if chances.random() < 0.5 or len(quoted) < 60:
        return quoted
    at = chances.randrange(20, len(quoted) - 20)
    return joined(quoted[:at], words_of(chances, chances.choice([1, 3, 12])), quoted[at + chances.choice([0, 2, 9]) :])


@pytest.fixture(autouse=True)
def _same_every_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nonces are counted, what a longer anchor replaces is forgotten at once, and decoding is played."""
    monkeypatch.setattr("kvcomm_p2p.reuse.pulling.decode", worn)
    nonces = iter(range(1, 1 << 60))
    numbered = SimpleNamespace(urandom=lambda size: next(nonces).to_bytes(size, "big"))
    monkeypatch.setattr("kvcomm_p2p.reuse.publish.os", numbered)
    monkeypatch.setattr("kvcomm_p2p.planning.superseding.SUPERSEDED_KEPT_S", 0.0)
    yield


def play(history: Sequence[Fill] | random.Random) -> World:
    """Carry out a history, or make up one. Raises Leak."""
    world = World()
    try:
        if isinstance(history, random.Random):
            for _ in range(FILLS):
                world.do(random_fill(history, world.sequences))
        else:
            for each in history:
                world.do(each)
    finally:
        world.close()
    return world


@settings(deadline=None, derandomize=True, max_examples=25, phases=[Phase.generate])
@given(st.randoms(use_true_random=False))
def test_nothing_leaks(chances: random.Random) -> None:
    assert play(chances).nodes


def test_histories_hold_everything_that_can_happen() -> None:
    kinds = {"exact", "continued", "reuse", "recompute", "interpolated", "shifted", "corrected", "replicas", "int8"}
    wanted = kinds | {"hops 0", "hops 1", "hops 2"}
    for seed in range(20):
        wanted -= play(random.Random(seed)).seen.keys()
        if not wanted:
            return
    raise AssertionError(f"never: {wanted}")


def fill(node: int, mode: Mode, *parts: Tokens | Part, **more: Any) -> Fill:
    return Fill(node, mode, tuple(part if isinstance(part, Part) else Part(part) for part in parts), **more)


DOCUMENT, OWN, END = words(90, 300), words(91, 128), words(92, 10)
ODD = words(93, 1)
TWICE = (words(97, 60), OWN, DOCUMENT[:200])
HALF_EXACT = (fill(0, Mode.EXACT, DOCUMENT), fill(1, Mode.BALANCED, OWN, DOCUMENT[:200], END))
"""Node 1 then holds 128 exact tokens, and repaired ones behind them."""

SHIFTED = (*HALF_EXACT, fill(2, Mode.BALANCED, words(94, 40), OWN[:100], ODD, OWN[101:], DOCUMENT[:170], END))
INTERPOLATED = (*HALF_EXACT, fill(2, Mode.FAST, words(94, 32), OWN[:127], ODD, DOCUMENT[:170], END))
SECRET = (
    fill(0, Mode.EXACT, DOCUMENT),
    fill(1, Mode.BALANCED, OWN, DOCUMENT[:100], Part(words(95, 5), Visibility.PRIVATE), DOCUMENT[105:], END),
)
REPLICA = (
    fill(0, Mode.EXACT, OWN, DOCUMENT),
    fill(1, Mode.BALANCED, DOCUMENT[:200], END),
    fill(2, Mode.BALANCED, DOCUMENT[:100], END),
    fill(2, Mode.BALANCED, DOCUMENT[:128], words(96, 20)),
)
INT8 = (
    fill(0, Mode.EXACT, OWN, DOCUMENT),
    fill(1, Mode.BALANCED, words(89, 45), DOCUMENT[:200], END, int8=True),
    fill(1, Mode.FAST, words(89, 45), DOCUMENT[:200], END, ODD, int8=True),
    fill(2, Mode.FAST, words(88, 30), DOCUMENT[:200], END, broken=3, int8=True),
    fill(2, Mode.BALANCED, OWN, DOCUMENT[:100], words(87, 20), DOCUMENT[100:250], END, int8=True),
    fill(2, Mode.EXACT, OWN, DOCUMENT[:200], int8=True),
)
"""What travels as int8 is moved, gone on with at home, and in part missing; the same blocks are wanted exact as well."""

CHAIN = (
    *HALF_EXACT,
    fill(2, Mode.FAST, *TWICE),
    fill(0, Mode.FAST, *TWICE, END),
    fill(2, Mode.FAST, *TWICE, END),
    fill(2, Mode.FAST, words(98, 20), *TWICE, END),
)


def test_a_run_that_is_shifted_is_as_repaired_as_its_worst_part() -> None:
    seen = play(SHIFTED).seen
    assert seen["shifted"] and seen["hops 2"] == 1


def test_an_interpolated_hole_is_as_repaired_as_both_of_its_sides() -> None:
    seen = play(INTERPOLATED).seen
    assert seen["interpolated"] and seen["hops 2"] == 1


def test_a_run_that_is_shifted_is_as_secret_as_what_stands_in_it() -> None:
    assert play(SECRET).seen["shifted"]


def test_a_replica_is_not_continued() -> None:
    seen = play(REPLICA).seen
    assert seen["replicas"] == 2 and seen["continued"] == 1


def test_what_travelled_as_int8_is_repaired_once_more_and_no_replica() -> None:
    world = play(INT8)
    assert world.seen["int8"] and world.seen["continued"]
    hops = [max((hops for _, hops in hops_at(plan)), default=0) for plan in world.plans]
    assert hops == [0, 2, 2, 2, 2, 0]
    for node in world.nodes[1:]:
        replicas = [meta for meta in node.pool.metas() if meta.hops == 1]
        assert not replicas, "once repaired: as int8 it would be, kept as it came"


def test_a_chain_of_repairs_ends_at_home() -> None:
    world = play(CHAIN)
    hops = [max(map(span_hops, plan.spans)) for plan in world.plans]
    # Moved once; once more; the same again elsewhere, from what was moved once; gone on with at home; moved again at home.
    assert hops == [0, 0, 1, 1, 2, 1]
    kinds = [{span.kind for span in plan.spans} - {SpanKind.RECOMPUTE, SpanKind.EXACT} for plan in world.plans]
    assert kinds == [set(), *[{SpanKind.REUSE}] * 3, {SpanKind.CONTINUED}, {SpanKind.REUSE}]
    assert world.seen["hops 2"] == 4


# ---------------------------------------------------------------------------------------- what would be noticed if it broke


def _begins_late(plan: Plan) -> list[tuple[int, int]]:
    ends = {span.start: span.end for span in plan.spans}
    return [(ends[at] if hops else at, hops) for at, hops in hops_at(plan)]


def _continued_is_exact(plan: Plan) -> Any:
    return hops_at(replace(plan, spans=tuple(span for span in plan.spans if span.kind is not SpanKind.CONTINUED)))


def _exact_wherever_equal(prompt: Tokens, donor: Donor) -> int:
    if donor.start and donor.same_prefix_until < donor.start:
        return donor.start
    return donor.start + prefix._equal_length(prompt[donor.start :], donor.token_ids)


def _all_chained(cutter: Any, region: Any, piece: Any, name: Any, told: Any) -> Segment:
    segment = _SEGMENT(cutter, region, piece, name, told)
    on_grid = piece.end % BLOCK_TOKENS == 0
    return segment._replace(meta=replace(segment.meta, chain_end=piece.digest)) if on_grid else segment


_SEGMENT = segments._Cutter._segment

MUTATIONS: dict[str, dict[str, Any]] = {
    "a repair counts for nothing": {
        "reuse.publish.hops_at": lambda plan: [(at, max(0, hops - 1)) for at, hops in hops_at(plan)]
    },
    "two repairs count like one": {
        "reuse.publish.hops_at": lambda plan: [(at, min(1, hops)) for at, hops in hops_at(plan)]
    },
    "taint begins behind what is reused": {"reuse.publish.hops_at": _begins_late},
    "taint begins with the next block": {
        "planning.segments._on_grid": lambda hops, _: [
            (at + -at % BLOCK_TOKENS, count) for at, count in [(0, 0), *hops]
        ]
    },
    "what is continued is exact": {"reuse.publish.hops_at": _continued_is_exact},
    "what is equal is exact": {"planning.prefix._exact_end": _exact_wherever_equal},
    "everything has a chain hash": {"planning.segments._Cutter._segment": _all_chained},
    "what was repaired twice is shown": {
        "planning.segments.HOPS_PUBLISHED_MAX": 2,
        "protocol.pool.HOPS_PUBLISHED_MAX": 2,
    },
    "what was repaired twice is moved": {
        "planning.candidates.HOPS_PUBLISHED_MAX": 2,
        "planning.plan.HOPS_PUBLISHED_MAX": 2,
    },
    "parts of a run are repaired each by itself": {"planning.spans.entangled": lambda plan: {}},
    "parts of a run are secret each by itself": {"reuse.publish.entangled": lambda plan: {}},
    "donors have no secrets": {"reuse.publish.filled_marks": lambda plan, marks: marks},
    "replicas are our own": {"planning.lineage.Lineage.known": lambda lineage, anchor_id: True},
    "what travelled as int8 is no worse": {
        f"planning.{module}.span_hops": lambda span: span_hops(replace(span, encoded=False))
        for module in ("spans", "plan", "travel")
    },
    "repaired copies travel as int8": {"planning.travel.HOPS_PUBLISHED_MAX": 2, "planning.plan.HOPS_PUBLISHED_MAX": 2},
    "exact blocks travel as int8": {
        "planning.fetches.encoded_blocks": lambda spans: encoded_blocks(
            [replace(span, encoded=True) for span in spans if any(each.encoded for each in spans)]
        )
    },
    "a plan with holes forgets how its runs travelled": {
        "planning.replan.Candidate": lambda donor, pieces, encoded: Candidate(donor, pieces)
    },
    "all blocks come": {"planning.replan.without_blocks": lambda plan, failed, rules: plan},
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_what_breaks_is_noticed(mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in MUTATIONS[mutation].items():
        monkeypatch.setattr(f"kvcomm_p2p.{name}", value)
    with pytest.raises(Leak):
        for history in (SHIFTED, INTERPOLATED, SECRET, REPLICA, INT8, CHAIN):
            play(history)
        for seed in range(8):
            play(random.Random(seed))
