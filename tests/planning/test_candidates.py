"""Equal runs as candidates for reuse: what is found for certain, chained over holes, clipped, repaired and chosen."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_cases import KEY, RULES, Tokens, donor, joined, words
from repair_cases import candidates, repairs, rules

from kvcomm_p2p.planning.candidates import (
    GAP_MAX,
    HEAD_WHY,
    HOLE_WHY,
    INTERPOLATED_WHY,
    PIECE_TOKENS_MIN,
    Candidate,
    choose,
    find_candidates,
    head_tokens,
)
from kvcomm_p2p.planning.placing import placed
from kvcomm_p2p.planning.types import Donor, Provenance, Repair, ReuseRules, SpanKind
from kvcomm_p2p.protocol.anchors import HOPS_PUBLISHED_MAX

RUN_TOKENS_MIN = 64


class Shared(NamedTuple):
    """A run that stands in the prompt and in one donor."""

    donor: int
    donor_start: int
    prompt_start: int
    tokens: int


class World(NamedTuple):
    prompt: Tokens
    donors: list[Donor]
    shared: list[Shared]


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Runs of at least 64 tokens, each at random offsets of the prompt and of one donor, between other text."""
    seed = draw(st.integers(0, 10_000))
    fresh = iter(range(seed * 1000, seed * 1000 + 1000))
    other = st.integers(0, 150)

    def text(tokens: int) -> Tokens:
        return words(next(fresh), tokens)

    parts: list[list[Tokens]] = [[text(draw(other))] for _ in range(draw(st.integers(1, 3)))]
    starts = [draw(st.sampled_from([0, 32, 4096])) for _ in parts]
    prompt, shared = [text(draw(other))], []
    for _ in range(draw(st.integers(1, 4))):
        run, number = text(draw(st.integers(RUN_TOKENS_MIN, 200))), draw(st.integers(0, len(parts) - 1))
        donor_start = starts[number] + sum(map(len, parts[number]))
        shared.append(Shared(number, donor_start, sum(map(len, prompt)), len(run)))
        parts[number] += [run, text(draw(other))]
        prompt += [run, text(draw(other))]
    if draw(st.booleans()):
        parts = [each[::-1] for each in parts]  # moved blocks; positions follow
        shared = [
            replace_start(
                each, starts[each.donor] + sum(map(len, parts[each.donor])) - (each.donor_start - starts[each.donor])
            )
            for each in shared
        ]
    donors = [
        donor(joined(*each), start=start, name=i) for i, (each, start) in enumerate(zip(parts, starts, strict=True))
    ]
    return World(joined(*prompt), donors, shared)


def replace_start(run: Shared, end: int) -> Shared:
    return run._replace(donor_start=end - run.tokens)


def mapping(found: list[Candidate], source: Donor) -> dict[int, int]:
    """Prompt position -> donor position, in the candidates of one donor."""
    return {
        piece.prompt_start + i: piece.donor_start + i
        for candidate in found
        if candidate.donor is source
        for piece in candidate.pieces
        for i in range(piece.length)
    }


@settings(deadline=None)
@given(worlds(), st.sampled_from([16, RUN_TOKENS_MIN]))
def test_every_equal_run_of_64_tokens_at_any_offset_of_any_donor_is_in_a_candidate(
    world: World, length_min: int
) -> None:
    found = list(find_candidates(world.prompt, world.donors, length_min))
    for run in world.shared:
        at = mapping(found, world.donors[run.donor])
        for i in range(run.tokens):
            assert at.get(run.prompt_start + i) == run.donor_start + i


@settings(deadline=None)
@given(worlds(), st.sampled_from([16, RUN_TOKENS_MIN]))
def test_candidates_hold_equal_tokens_in_order_with_small_holes(world: World, length_min: int) -> None:
    found = list(find_candidates(world.prompt, world.donors, length_min))
    assert [(c.donor.sequence_id, c.pieces) for c in find_candidates(world.prompt, world.donors, length_min)] == [
        (c.donor.sequence_id, c.pieces) for c in found
    ]
    for candidate in found:
        assert candidate.tokens >= length_min
        check(candidate, world.prompt)


def check(candidate: Candidate, prompt: Tokens) -> None:
    for piece in candidate.pieces:
        at = piece.donor_start - candidate.donor.start
        assert np.array_equal(
            prompt[piece.prompt_start : piece.prompt_end], candidate.donor.token_ids[at : at + piece.length]
        )
    for before, after in pairwise(candidate.pieces):
        holes = after.prompt_start - before.prompt_end, after.donor_start - before.donor_start - before.length
        assert min(holes) >= 0 < max(holes) <= GAP_MAX


@st.composite
def edited(draw: st.DrawFn) -> tuple[Tokens, Tokens, int]:
    """A text, the same with a few tokens replaced, left out or inserted in places far apart, and the number of places."""
    seed = draw(st.integers(0, 10_000))
    parts = [words(seed * 100 + i, draw(st.integers(64, 150))) for i in range(draw(st.integers(2, 5)))]
    theirs, ours = [parts[0]], [parts[0]]
    for i, part in enumerate(parts[1:]):
        removed, added = draw(st.tuples(st.integers(0, GAP_MAX), st.integers(0, GAP_MAX)).filter(any))
        theirs += [words(seed * 100 + 50 + i, removed), part]
        ours += [words(seed * 100 + 75 + i, added), part]
    return joined(*ours), joined(*theirs), len(parts)


@settings(deadline=None)
@given(edited(), st.integers(0, 90))
def test_a_chain_over_small_holes_is_one_candidate(texts: tuple[Tokens, Tokens, int], before: int) -> None:
    ours, theirs, pieces = texts
    prompt, source = joined(words(10_000_000, before), ours), donor(joined(words(20_000_000, 50), theirs))
    [found] = find_candidates(prompt, [source], RUN_TOKENS_MIN)
    assert (found.start, found.end) == (before, len(prompt))
    assert len(found.pieces) == pieces
    check(found, prompt)


def test_a_large_hole_separates_candidates_and_crumbs_do_not_bridge_it() -> None:
    first, second = words(1, 80), words(2, 90)
    source = donor(joined(first, words(3, 40), second))
    apart = list(find_candidates(joined(first, words(4, 40), second), [source], RUN_TOKENS_MIN))
    assert [(c.start, c.tokens) for c in apart] == [(0, 80), (120, 90)]
    # Equal crumbs between two holes are no pieces: what is left is one hole too large.
    crumb = words(5, PIECE_TOKENS_MIN - 1)
    source = donor(joined(first, words(6, 25), crumb, words(7, 25), second))
    crumbs = list(find_candidates(joined(first, words(8, 25), crumb, words(9, 25), second), [source], RUN_TOKENS_MIN))
    assert [(c.start, c.tokens) for c in crumbs] == [(0, 80), (80 + 50 + len(crumb), 90)]


def test_candidates_end_where_copies_become_unpublishable() -> None:
    ids = words(1, 300)
    source = donor(ids, anchor_tokens=100, hops=[0, HOPS_PUBLISHED_MAX + 1, 0])
    found = list(find_candidates(joined(words(2, 10), ids), [source], RUN_TOKENS_MIN))
    assert [(c.start, c.end) for c in found] == [(10, 110), (110, 210), (210, 310)]


@given(candidates(), st.integers(0, 2500), st.integers(0, 2500))
def test_clipping_keeps_what_is_inside(candidate: Candidate, start: int, length: int) -> None:
    end = start + length
    clipped = candidate.clipped(start, end)
    at = {p: q for p, q in mapping([candidate], candidate.donor).items() if start <= p < end}
    assert (clipped is None) == (not at)
    if clipped is not None:
        assert mapping([clipped], candidate.donor) == at
        assert (clipped.provenance, clipped.likeness) == (candidate.provenance, candidate.likeness)
        assert list(clipped.pieces) == sorted(clipped.pieces, key=lambda piece: piece.prompt_start)
    assert candidate.clipped(candidate.start, candidate.end) is candidate


@given(candidates(), repairs, rules())
def test_a_repaired_run_is_covered_from_start_to_end(candidate: Candidate, repair: Repair, allowed: ReuseRules) -> None:
    spans = candidate.spans(repair, allowed, run=3)
    assert (spans[0].start, spans[-1].end) == (candidate.start, candidate.end)
    assert all(before.end == after.start and before.tokens for before, after in pairwise(spans))
    at = mapping([candidate], candidate.donor)
    for span in spans:
        if span.donor is None:
            interpolated = span.why == INTERPOLATED_WHY
            assert span.why in (HOLE_WHY, INTERPOLATED_WHY) and not span.probes
            assert interpolated == (span.tokens <= allowed.interpolated_tokens) == (span.kind is SpanKind.REUSE)
            assert not any(row in at for row in range(span.start, span.end))
        else:
            assert [at[row] for row in range(span.start, span.end)] == list(
                range(span.donor_start, span.donor_start + span.tokens)
            )
            assert span.run == 3 and (span.why == HEAD_WHY) == (span.kind is SpanKind.RECOMPUTE)
            assert span.probes <= span.tokens // 2 and (not span.shift or (repair.shift and span.probes > 1))


@given(candidates(), repairs, rules())
def test_the_head_comes_first_and_the_guard_gets_its_probes(
    candidate: Candidate, repair: Repair, allowed: ReuseRules
) -> None:
    spans = candidate.spans(repair, allowed)
    heads = [span for span in spans if span.why == HEAD_WHY]
    assert sum(span.tokens for span in heads) >= head_tokens(repair, candidate.tokens)
    if repair.head_tokens and candidate.tokens >= 4:
        assert heads[0].start == candidate.start
    body = [span for span in spans if span.kind is SpanKind.REUSE and span.donor is not None]
    if not repair.memory and all(span.tokens >= 2 * allowed.guard_probes for span in body):
        skipped = sum(span.tokens for span in heads) - head_tokens(repair, candidate.tokens)
        least = allowed.guard_probes * (1 - skipped / candidate.tokens) - 1
        assert sum(span.probes for span in body) >= least


@settings(deadline=None)
@given(st.lists(candidates(pieces_max=3), max_size=6), st.sampled_from([12, 64]), st.integers(0, 100))
def test_chosen_runs_do_not_overlap_and_are_worth_it(found: list[Candidate], tokens_min: int, price: int) -> None:
    chosen = choose(found, lambda run: float(run.tokens - price), tokens_min)
    for before, after in pairwise(chosen):
        assert before.end <= after.start
    for run in chosen:
        assert run.tokens > price
        assert run in found or run.tokens >= tokens_min
    if found and (best := max(found, key=lambda run: run.tokens)).tokens > price:
        assert max(run.tokens for run in chosen) == best.tokens


def test_a_part_of_a_run_is_chosen_where_another_covers_the_rest() -> None:
    ids = words(1, 400)
    longer, shorter = donor(ids[:300], name=1), donor(ids[200:], name=2)
    found = list(find_candidates(ids, [longer, shorter], RUN_TOKENS_MIN))
    chosen = choose(found, lambda run: float(run.tokens), RUN_TOKENS_MIN)
    assert [(run.start, run.end, run.donor.sequence_id[0]) for run in chosen] == [(0, 300, 1), (300, 400, 2)]
    assert [(run.start, run.end) for run in choose(found, lambda run: float(run.tokens), 101)] == [(0, 300)]


def found_and_placed(prompt: Tokens, theirs: Tokens) -> Candidate:
    [found] = find_candidates(prompt, [donor(theirs)], RUN_TOKENS_MIN)
    return placed(found, prompt, KEY)


def test_a_few_other_words_in_a_system_prompt_do_not_make_another_role() -> None:
    template, system, document = words(1, 4), words(2, 70), words(3, 400)
    theirs = joined(template, words(4, 1), system, words(5, 3), document)
    found = found_and_placed(joined(template, system, document), theirs)
    assert len(found.pieces) == 2 and found.start <= 4
    assert found.provenance is Provenance.NEAR and found.likeness > 0.9


def test_a_shared_template_does_not_make_another_role_the_same() -> None:
    template, document = words(1, 20), words(2, 400)
    found = found_and_placed(joined(template, words(3, 30), document), joined(template, words(4, 30), document))
    assert found.start == 0 and len(found.pieces) == 2
    assert found.provenance is Provenance.ROLE


def test_a_bare_copy_with_an_edit_is_bare() -> None:
    first, second = words(1, 100), words(2, 300)
    theirs = joined(first, words(3, 5), second)
    found = found_and_placed(joined(words(4, 80), first, words(5, 5), second), theirs)
    assert len(found.pieces) == 2 and found.pieces[0].donor_start == 0
    assert found.provenance is Provenance.BARE


def test_preferred_are_better_contexts_then_likeness_then_what_is_here() -> None:
    ids = words(1, 100)
    run = next(iter(find_candidates(ids, [donor(ids)], RUN_TOKENS_MIN)))
    here = replace(run, donor=donor(ids, local=True))
    near, alike = replace(run, provenance=Provenance.NEAR), replace(here, provenance=Provenance.ROLE, likeness=0.9)
    less = replace(here, provenance=Provenance.ROLE, likeness=0.5)
    away = replace(run, provenance=Provenance.ROLE, likeness=0.5)
    assert sorted([away, less, alike, near], key=Candidate.preference) == [near, alike, less, away]


def test_without_donors_there_is_nothing() -> None:
    assert list(find_candidates(words(1, 100), [], 16)) == []
    assert list(find_candidates(words(1, 100), [donor(words(2, 100))], 16)) == []
    assert choose([], lambda run: 1.0, 16) == []
    assert RULES.run_tokens_min == RUN_TOKENS_MIN
