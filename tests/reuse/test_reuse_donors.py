"""Finding donors and pulling their blocks, with a driver that answers what it is told to."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reuse_cases import LAYOUT, donor, meta, plan_of

from kvcomm_p2p.model.spec import ModelSpec
from kvcomm_p2p.net.driver import FetchResult, TokensResult
from kvcomm_p2p.planning.chains import chain_hashes
from kvcomm_p2p.planning.finding import DISTRUST_S, DISTRUSTED_MAX, FoundDonors
from kvcomm_p2p.planning.lineage import LINEAGE_MAX, Lineage
from kvcomm_p2p.planning.segments import cut_anchors
from kvcomm_p2p.planning.simhash import window_sketches
from kvcomm_p2p.planning.stretches import without_gaps
from kvcomm_p2p.planning.types import Costs, Plan, Span, SpanKind
from kvcomm_p2p.planning.winnow import content_marks, fingerprints
from kvcomm_p2p.protocol.anchors import AnchorMeta, BlockKey, HeldAnchor, Miss, MissReason
from kvcomm_p2p.protocol.directory import Directory
from kvcomm_p2p.protocol.events import AnchorTokens
from kvcomm_p2p.protocol.ids import AnchorId, ChainHash, ModelId, NodeId
from kvcomm_p2p.protocol.lookup import AnchorHit, Lookup, LookupResult
from kvcomm_p2p.reuse.donors import DonorFinder
from kvcomm_p2p.reuse.pulling import Pulled, Puller
from kvcomm_p2p.store import BlockStore

ME, ANN, BOB = NodeId(b"me" + bytes(14)), NodeId(b"ann" + bytes(13)), NodeId(b"bob" + bytes(13))
KEY = b"k" * 32
SPEC = ModelSpec("m", ModelId(b"m" * 16), LAYOUT, 1000, None, "", "", None)
COSTS = Costs(1e-3, 1e-4, 1e-9, 1e-3, 1e9, 1e9, LAYOUT.token_bytes)


class FakeDriver:
    """Answers from tables; notes what it was asked."""

    def __init__(self, store: BlockStore | None = None) -> None:
        self.store = store or BlockStore()
        self.hits: list[AnchorHit] = []
        self.miss: MissReason | None = None
        self.ids: dict[tuple[NodeId, AnchorId], Any] = {}
        self.pool: dict[AnchorId, HeldAnchor] = {}
        self.asked: list[tuple[NodeId, AnchorId]] = []
        self.touched: list[AnchorId] = []
        self.lost_s = 0.0
        self.fetching: Callable[[NodeId, Sequence[Any]], Any] | None = None
        self.lookups: list[Lookup] = []
        self.directory: Directory | None = None

    async def find(self, lookup: Lookup) -> LookupResult:
        self.lookups.append(lookup)
        if self.directory is not None:
            return self.directory.find(lookup, lambda *_: True)
        return LookupResult(tuple(self.hits), self.miss)

    def held(self, anchor_id: AnchorId) -> HeldAnchor | None:
        return self.pool.get(anchor_id)

    async def touch(self, anchor_ids: Sequence[AnchorId]) -> None:
        self.touched += anchor_ids

    async def tokens(self, holder: NodeId, anchor: AnchorMeta) -> TokensResult:
        self.asked.append((holder, anchor.anchor_id))
        answer = self.ids[holder, anchor.anchor_id]
        if isinstance(answer, Miss):
            return TokensResult(answer, self.lost_s)
        return TokensResult(AnchorTokens(anchor, holder, answer, (b"d" * 32,) * anchor.blocks), self.lost_s)

    async def fetch(
        self, holder: NodeId, blocks: Sequence[Any], deadline_s: float, stall_s: float, **more: Any
    ) -> FetchResult:
        self.fetched_with = more
        assert deadline_s > 0 and stall_s >= 0 and self.fetching is not None
        return await self.fetching(holder, blocks)


def ids_of(start: int, end: int, salt: int = 0) -> Any:
    return (np.random.default_rng(salt).integers(0, 200, 2000)[start:end]).astype(np.uint32)


def with_fingerprints(anchor: AnchorMeta, salt: int = 0) -> AnchorMeta:
    values, _ = fingerprints(ids_of(anchor.start, anchor.end, salt), KEY)
    return replace(anchor, fingerprints=np.unique(values).astype("<u4").tobytes())


def finder(driver: FakeDriver, lineage: Lineage | None = None, **more: Any) -> DonorFinder:
    fake: Any = driver
    return DonorFinder(fake, lineage or Lineage(), me=ME, spec=SPEC, vocabulary_size=200, content_key=KEY, **more)


def offer(driver: FakeDriver, holder: NodeId, anchor: AnchorMeta, *, prefix: int = 0, salt: int = 0) -> None:
    driver.hits.append(AnchorHit(anchor, holder, 1, prefix))
    driver.ids[holder, anchor.anchor_id] = ids_of(anchor.start, anchor.end, salt)


def find(driver: FakeDriver, lineage: Lineage | None = None) -> FoundDonors:
    return asyncio.run(finder(driver, lineage).find(ids_of(0, 300)))


def reasons(found: FoundDonors) -> list[tuple[NodeId | None, MissReason]]:
    return [(holder, miss.reason) for holder, miss in found.dropped]


# --------------------------------------------------------------------------------------------------------------- donors


def test_consecutive_anchors_of_a_sequence_are_one_donor() -> None:
    driver = FakeDriver()
    for anchor in (meta(2, 64, 128), meta(1, 0, 64), meta(3, 160, 200)):
        offer(driver, ANN, with_fingerprints(anchor), prefix=64 if anchor.start == 0 else 0)
    found = find(driver)
    assert [(d.start, d.end, len(d.anchors), d.same_prefix_until, d.local) for d in found.donors] == [
        (0, 128, 2, 64, False),
        (160, 200, 1, 64, False),
    ]
    for one in found.donors:
        assert (one.token_ids == ids_of(one.start, one.end)).all()
    assert len(found.details) == 3 and found.dropped == ()


def test_an_anchor_without_token_ids_cuts_its_donor() -> None:
    driver = FakeDriver()
    for anchor in (meta(1, 0, 64), meta(2, 64, 128), meta(3, 128, 192)):
        offer(driver, ANN, with_fingerprints(anchor))
    driver.ids[ANN, meta(2, 0, 1).anchor_id] = Miss(MissReason.STALLED)
    driver.lost_s = 0.1
    found = find(driver)
    assert [(d.start, d.end) for d in found.donors] == [(0, 64), (128, 192)]
    assert reasons(found) == [(ANN, MissReason.STALLED)]
    assert found.wait_lost_s == 0.1


def test_token_ids_are_asked_once_until_they_are_forgotten() -> None:
    driver = FakeDriver()
    offer(driver, ANN, with_fingerprints(meta(1, 0, 128)))

    async def run() -> None:
        searching = finder(driver)
        for _ in range(3):
            assert len((await searching.find(ids_of(0, 300))).donors) == 1
        assert len(driver.asked) == 1
        searching.forget(ANN, meta(1, 0, 1).anchor_id)
        searching.forget(BOB, meta(9, 0, 1).anchor_id)
        await searching.find(ids_of(0, 300))
        assert len(driver.asked) == 2

    asyncio.run(run())


def test_a_second_copy_is_not_asked_for() -> None:
    driver = FakeDriver()
    anchor = with_fingerprints(meta(1, 0, 128))
    offer(driver, ANN, anchor)
    offer(driver, BOB, anchor)
    found = find(driver)
    assert [d.holder for d in found.donors] == [ANN]
    assert driver.asked == [(ANN, anchor.anchor_id)]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"kv_bytes": LAYOUT.block_bytes(127)}, MissReason.LENGTH_MISMATCH),
        ({"kv_bytes": LAYOUT.block_bytes(128) * 2}, MissReason.LENGTH_MISMATCH),
        ({"start": 960, "end": 1088}, MissReason.TOKENS_MISMATCH),
    ],
)
def test_metadata_that_cannot_be_is_not_followed(change: dict[str, Any], reason: MissReason) -> None:
    driver = FakeDriver()
    offer(driver, ANN, replace(with_fingerprints(meta(1, 0, 128)), **change))
    found = find(driver)
    assert (found.donors, reasons(found), driver.asked) == ((), [(ANN, reason)], [])


@pytest.mark.parametrize("lie", [lambda ids: ids[::-1].copy(), lambda ids: np.full_like(ids, 7), lambda ids: ids + 200])
def test_token_ids_that_contradict_the_metadata(lie: Callable[[Any], Any]) -> None:
    driver = FakeDriver()
    anchor = with_fingerprints(meta(1, 0, 128))
    offer(driver, ANN, anchor)
    driver.ids[ANN, anchor.anchor_id] = lie(ids_of(0, 128))
    found = find(driver)
    assert (found.donors, reasons(found)) == ((), [(ANN, MissReason.TOKENS_MISMATCH)])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 20), st.integers(1, 400), st.integers(2, 200), st.integers(0, 1000))
def test_true_token_ids_never_contradict_their_metadata(at: int, tokens: int, alphabet: int, seed: int) -> None:
    """Also when fingerprints were selected with the text around the anchor in view, in repetitive text too."""
    whole = np.random.default_rng(seed).integers(0, alphabet, 1200).astype(np.uint32)
    if seed % 3 == 0:
        whole = np.tile(whole[: 1 + seed % 40], 1200)[:1200].astype(np.uint32)
    start, end = 32 * at, 32 * at + tokens
    values, positions = fingerprints(whole, KEY)
    inside = np.unique(values[(positions >= start) & (positions < end)])
    anchor = meta(1, start, end, fingerprints=inside.astype("<u4").tobytes())
    answer = AnchorTokens(anchor, ANN, whole[start:end], ())
    assert finder(FakeDriver())._finding._contradiction(anchor, answer) is None


@pytest.mark.parametrize("miss", [MissReason.NOT_FOUND, MissReason.MODEL_MISMATCH])
def test_nothing_found_says_why(miss: MissReason) -> None:
    driver = FakeDriver()
    driver.miss = miss
    assert reasons(find(driver)) == [(None, miss)]


def test_own_chains_reach_back_to_where_the_sequence_began() -> None:
    driver, lineage = FakeDriver(), Lineage()
    chain = [meta(1, 0, 64, sequence=1), meta(2, 64, 128, sequence=2), meta(3, 128, 190, sequence=3)]
    lineage.add(chain, b"variant")
    for anchor in chain:
        driver.pool[anchor.anchor_id] = HeldAnchor(anchor, ids_of(anchor.start, anchor.end), (), ())
    driver.hits.append(AnchorHit(chain[2], ME, 2, 0))
    found = find(driver, lineage)
    assert [(d.start, d.end, d.local) for d in found.donors] == [(0, 190, True)]
    # Evicted in the middle, the chain begins behind the hole.
    del driver.pool[chain[1].anchor_id]
    found = find(driver, lineage)
    assert [(d.start, d.end) for d in found.donors] == [(128, 190)]


CHAIN = ChainHash(b"c" * 16)


def branch(driver: FakeDriver, holder: NodeId) -> list[AnchorMeta]:
    """What a holder has of two sequences with the same beginning: that, under the first one's name, and both tails."""
    beginning = with_fingerprints(meta(1, 0, 128, sequence=1, chain_end=CHAIN))
    tails = [with_fingerprints(meta(n, 128, end, sequence=n - 1, chain_start=CHAIN)) for n, end in ((2, 200), (3, 230))]
    offer(driver, holder, beginning, prefix=128)
    for tail in tails:
        offer(driver, holder, tail)
    return [beginning, *tails]


def test_branches_reach_back_to_where_they_began_and_are_asked_for_once() -> None:
    driver = FakeDriver()
    anchors = branch(driver, ANN)
    found = find(driver)
    assert sorted((d.start, d.end, d.same_prefix_until) for d in found.donors) == [(0, 200, 128), (0, 230, 128)]
    for one in found.donors:
        assert (one.token_ids == ids_of(0, one.end)).all()
    assert sorted(driver.asked) == sorted((ANN, anchor.anchor_id) for anchor in anchors)


def test_branches_of_our_own_do_too_also_where_we_only_hold_replicas() -> None:
    driver, lineage = FakeDriver(), Lineage()
    beginning, first, second = branch(driver, ME)
    lineage.add([beginning, first], b"")
    for anchor in (beginning, first, second):
        driver.pool[anchor.anchor_id] = HeldAnchor(anchor, ids_of(anchor.start, anchor.end), (), ())
    found = find(driver, lineage)
    assert [(d.start, d.end, d.local) for d in found.donors] == [(0, 200, True), (0, 230, True)]


def test_a_tail_behind_the_prompts_own_beginning_is_exact_whoever_holds_it() -> None:
    driver = FakeDriver()
    prompt = ids_of(0, 300)
    chain = chain_hashes(prompt, KEY, SPEC.model_id)[3]
    offer(driver, BOB, with_fingerprints(meta(2, 128, 230, chain_start=chain)))
    offer(driver, ANN, with_fingerprints(meta(3, 128, 200, chain_start=CHAIN)))
    found = find(driver)
    assert {d.holder: d.same_prefix_until for d in found.donors} == {BOB: 128, ANN: 0}


def test_prompts_that_nobody_knows_are_looked_up_by_simhash_too() -> None:
    driver = FakeDriver()
    asyncio.run(finder(driver).find(ids_of(0, 300)))
    exact, similar = driver.lookups
    assert exact.sketches == () and similar.sketches == window_sketches(ids_of(0, 300), KEY) != ()
    assert np.array_equal(exact.fingerprints, similar.fingerprints)


def test_names_of_short_contents_are_looked_up_with_the_fingerprints() -> None:
    driver = FakeDriver()
    prompt = ids_of(0, 300)
    marks = content_marks(prompt, [(10, 30)], KEY)
    asyncio.run(finder(driver).find(prompt, marks))
    asyncio.run(finder(driver).find(prompt))
    first = [lookup for lookup in driver.lookups if not lookup.sketches]
    named, plain = (set(lookup.fingerprints.tolist()) for lookup in first)
    assert plain == set(fingerprints(prompt, KEY)[0].tolist())
    assert named == plain | {mark.fingerprint for mark in marks}
    assert (np.diff(driver.lookups[0].fingerprints.astype(np.int64)) > 0).all()


def test_anchors_with_names_of_contents_are_no_contradiction() -> None:
    tokens = ids_of(0, 300)
    anchors = cut_anchors(
        tokens,
        hops=((0, 0),),
        visibility=(),
        model_id=SPEC.model_id,
        layout=LAYOUT,
        key=KEY,
        marks=content_marks(tokens, [(3, 40), (100, 160)], KEY),
    )
    for anchor, ids, _ in anchors:
        assert finder(FakeDriver())._finding._contradiction(anchor, AnchorTokens(anchor, ANN, ids, ())) is None


def test_a_short_answer_in_differently_shaped_prompts_resolves_to_one_anchor() -> None:
    """Border tokens differ, and the answer's last token has no KV: with its names it is found, without them it is not."""
    answer = ids_of(500, 540)
    sequence = np.concatenate((ids_of(0, 90), answer[:-1]))
    anchors = cut_anchors(
        sequence,
        hops=((0, 0),),
        visibility=(),
        model_id=SPEC.model_id,
        layout=LAYOUT,
        key=KEY,
        marks=content_marks(sequence, [(90, len(sequence))], KEY),
    )
    (anchor,) = (segment.meta for segment in anchors)
    driver = FakeDriver()
    driver.directory = Directory(ME)
    driver.directory.add(ANN, anchor)
    driver.ids[ANN, anchor.anchor_id] = sequence
    for lost, around in ((0, 10), (1, 33), (2, 70)):
        prompt = np.concatenate((ids_of(700, 700 + around), answer[lost:], ids_of(900, 900 + around)))
        marks = content_marks(prompt, [(around, around + len(answer) - lost)], KEY)
        found = asyncio.run(finder(driver).find(prompt, marks))
        assert [d.anchors for d in found.donors] == [(anchor,)]
        assert asyncio.run(finder(driver).find(prompt)).donors == ()


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_rejected_copy_is_not_offered_for_a_while_another_holders_is() -> None:
    driver, clock = FakeDriver(), Clock()
    anchor = with_fingerprints(meta(1, 0, 128))
    for holder in (ANN, BOB):
        offer(driver, holder, anchor)

    async def run() -> None:
        searching = finder(driver, clock=clock)
        searching.distrust(ANN, anchor.anchor_id)
        found = await searching.find(ids_of(0, 300))
        assert [d.holder for d in found.donors] == [BOB]
        assert reasons(found) == [(ANN, MissReason.RESIDUAL)]
        searching.distrust(BOB, anchor.anchor_id)
        assert (await searching.find(ids_of(0, 300))).donors == ()
        clock.now = DISTRUST_S
        assert [d.holder for d in (await searching.find(ids_of(0, 300))).donors] == [ANN]

    asyncio.run(run())


def test_only_so_many_rejections_are_remembered() -> None:
    driver, clock = FakeDriver(), Clock()
    anchor = with_fingerprints(meta(1, 0, 128))
    offer(driver, ANN, anchor)

    async def run() -> None:
        searching = finder(driver, clock=clock)
        searching.distrust(ANN, anchor.anchor_id)
        for number in range(DISTRUSTED_MAX - 1):
            searching.distrust(BOB, meta(10 + number, 0, 32).anchor_id)
        assert (await searching.find(ids_of(0, 300))).donors == ()
        searching.distrust(BOB, meta(9, 0, 32).anchor_id)
        assert len((await searching.find(ids_of(0, 300))).donors) == 1

    asyncio.run(run())


def test_our_own_rejected_copies_stay_for_prompts_that_begin_with_them() -> None:
    driver, lineage = FakeDriver(), Lineage()
    chain = [
        with_fingerprints(meta(1, 0, 64)),
        with_fingerprints(meta(2, 64, 128)),
        with_fingerprints(meta(3, 128, 190)),
    ]
    lineage.add(chain, b"")
    for anchor in chain:
        driver.pool[anchor.anchor_id] = HeldAnchor(anchor, ids_of(anchor.start, anchor.end), (), ())

    def donors_with(prefix: int) -> list[tuple[int, int]]:
        driver.hits = [AnchorHit(chain[1], ME, 1, prefix), AnchorHit(chain[2], ME, 1, 0)]
        searching = finder(driver, lineage)
        searching.distrust(ME, chain[0].anchor_id)
        searching.distrust(ME, chain[1].anchor_id)
        return [(d.start, d.end) for d in asyncio.run(searching.find(ids_of(0, 300))).donors]

    assert donors_with(0) == [(128, 190)]
    driver.hits = []
    assert donors_with(128) == [(0, 190)]


# ------------------------------------------------------------------------------------------------------- gaps and lineage


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 200)), max_size=12))
def test_stretches_have_neither_gaps_nor_overlaps(places: list[tuple[int, int]]) -> None:
    anchors = [meta(i, 32 * at, 32 * at + tokens) for i, (at, tokens) in enumerate(places)]
    stretches = without_gaps(anchors)
    flat = [anchor for stretch in stretches for anchor in stretch]
    assert set(flat) <= set(anchors) and len(flat) == len(set(flat))
    for stretch in stretches:
        assert all(a.end == b.start for a, b in itertools.pairwise(stretch))
    for left, right in itertools.pairwise(stretches):
        assert left[-1].end < right[0].start
    # Whatever is left out overlaps something that is kept.
    for anchor in set(anchors) - set(flat):
        assert any(kept.start < anchor.end and anchor.start < kept.end for kept in flat)


def test_of_anchors_that_begin_together_the_longest_is_kept() -> None:
    short, long = meta(1, 0, 64), meta(2, 0, 96)
    assert without_gaps([short, long, meta(3, 96, 128)]) == [(long, meta(3, 96, 128))]


def test_lineage() -> None:
    lineage = Lineage()
    first, second, third, other = (meta(n, 32 * n, 32 * n + 32) for n in range(4))
    lineage.add([first, second], b"a")
    lineage.add([third], b"b", second.anchor_id)
    lineage.add([other], b"c", second.anchor_id)
    assert [lineage.before(anchor.anchor_id) for anchor in (first, second, third, other)] == [
        None,
        first.anchor_id,
        second.anchor_id,
        second.anchor_id,
    ]
    assert lineage.variant(third.anchor_id) == b"b" and lineage.variant(AnchorId(b"?")) == b""
    lineage.add([third], b"z", first.anchor_id)
    assert (lineage.before(third.anchor_id), lineage.variant(third.anchor_id)) == (second.anchor_id, b"b")
    assert lineage.known(first.anchor_id) and not lineage.known(AnchorId(b"?"))


def test_lineage_forgets_the_oldest() -> None:
    lineage = Lineage()
    for number in range(LINEAGE_MAX + 10):
        lineage.add([meta(number, 0, 32)], b"")
    assert not lineage.known(meta(9, 0, 1).anchor_id) and lineage.known(meta(10, 0, 1).anchor_id)


# -------------------------------------------------------------------------------------------------------------- pulling


def two_peers() -> tuple[Any, FoundDonors]:
    """A plan that needs two blocks of ann and one of bob, and what they said of them."""
    left, right = meta(1, 0, 64), meta(2, 0, 40)
    spans = [
        Span(0, 50, SpanKind.EXACT, donor([left], holder=ANN), 0),
        Span(50, 60, SpanKind.REUSE, donor([right], holder=BOB), 3),
        Span(60, 61, SpanKind.RECOMPUTE),
    ]
    details = {
        (holder, anchor.anchor_id): AnchorTokens(anchor, holder, ids_of(anchor.start, anchor.end), (b"d" * 32,) * 2)
        for holder, anchor in ((ANN, left), (BOB, right))
    }
    return plan_of(spans), FoundDonors((), details, (), 0.0)


def deliver(driver: FakeDriver, blocks: Sequence[Any]) -> FetchResult:
    return FetchResult({key: driver.store.put(bytes(size)) for key, size, _ in blocks}, {}, 0.0)


async def pull_all(puller: Puller, plan: Plan, found: FoundDonors) -> Pulled:
    handed: dict[BlockKey, memoryview] = {}

    async def on_blocks(blocks: dict[BlockKey, memoryview]) -> None:
        handed.update(blocks)

    local = puller.local(plan)
    own = set(local.blocks)
    pulled = await puller.pull(plan, found, COSTS, local, on_blocks)
    assert handed == {key: data for key, data in pulled.blocks.items() if key not in own}
    return pulled


def test_a_pull_asks_each_holder_for_what_the_plan_needs() -> None:
    driver, (plan, found) = FakeDriver(), two_peers()
    asked: dict[NodeId, list[tuple[int, int]]] = {}

    async def fetching(holder: NodeId, blocks: Sequence[Any]) -> FetchResult:
        asked[holder] = [(key.index, size) for key, size, _ in blocks]
        return deliver(driver, blocks)

    driver.fetching = fetching
    fake: Any = driver
    known = {anchor_id: (ANN, BOB) for _, anchor_id in found.details}
    pulled = asyncio.run(pull_all(Puller(fake, driver.store), plan, replace(found, holders=known)))
    assert driver.fetched_with["others"] in ((ANN,), (BOB,)) and driver.fetched_with["busy_s"] > 0
    assert len(driver.fetched_with["anchors"]) == 1, "blocks of these may be passed on"
    assert asked == {
        ANN: [(0, LAYOUT.block_bytes(32)), (1, LAYOUT.block_bytes(32))],
        BOB: [(0, LAYOUT.block_bytes(32))],
    }
    assert pulled.kv_bytes == driver.store.held_bytes == 3 * LAYOUT.block_bytes(32)
    assert set(pulled.blocks) == set(pulled.remote) == set(pulled.handles) and not pulled.failed
    second = pulled.remote[BlockKey(meta(1, 0, 1).anchor_id, 1)]
    assert (second.position, second.token_ids.tolist()) == (32, ids_of(32, 64).tolist())
    Puller(fake, driver.store).release(pulled, pulled.handles)
    assert driver.store.held_bytes == 0 and pulled.handles == {}


def test_a_cancelled_pull_keeps_nothing() -> None:
    driver, (plan, found) = FakeDriver(), two_peers()

    async def fetching(holder: NodeId, blocks: Sequence[Any]) -> FetchResult:
        if holder == BOB:
            await asyncio.Event().wait()
        return deliver(driver, blocks)

    async def run() -> None:
        driver.fetching = fetching
        fake: Any = driver
        task = asyncio.create_task(pull_all(Puller(fake, driver.store), plan, found))
        while not driver.store.held_bytes:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert driver.store.held_bytes == 0

    asyncio.run(run())


def test_what_was_evicted_meanwhile_is_a_miss() -> None:
    driver = FakeDriver()
    anchor = meta(1, 0, 64)
    kept = driver.store.put(bytes(LAYOUT.block_bytes(32)))
    gone = driver.store.put(bytes(LAYOUT.block_bytes(32)))
    driver.store.drop(gone)
    driver.pool[anchor.anchor_id] = HeldAnchor(anchor, ids_of(0, 64), (kept, gone), (b"", b""))
    lost = meta(2, 64, 96)
    spans = [
        Span(0, 96, SpanKind.EXACT, donor([anchor, lost], holder=ME, local=True), 0),
        Span(96, 97, SpanKind.RECOMPUTE),
    ]
    fake: Any = driver
    pulled = asyncio.run(pull_all(Puller(fake, driver.store), plan_of(spans), FoundDonors((), {}, (), 0.0)))
    assert set(pulled.blocks) == {BlockKey(anchor.anchor_id, 0)}
    assert {key: miss.reason for key, miss in pulled.failed.items()} == {
        BlockKey(anchor.anchor_id, 1): MissReason.EVICTED,
        BlockKey(lost.anchor_id, 0): MissReason.EVICTED,
    }
    assert driver.touched == [anchor.anchor_id]
    assert (pulled.kv_bytes, pulled.handles, pulled.remote) == (0, {}, {})
