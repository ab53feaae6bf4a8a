"""What is measured is what is said: the slow link, the guards that reject, the ratios; all of it once with a tiny model."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvcomm_p2p.errors import KVCommError, UsageError
from kvcomm_p2p.evaluation import overhead
from kvcomm_p2p.evaluation.documents import Document
from kvcomm_p2p.evaluation.overhead import REJECTIONS, Link, Pair, Sizes, SlowDriver, measure, pair_rows
from kvcomm_p2p.evaluation.workers import Worker, private_cluster
from kvcomm_p2p.model.runner import ModelRunner
from kvcomm_p2p.model.spec import Profile
from kvcomm_p2p.planning.costs import CostTracker
from kvcomm_p2p.planning.divergence import Symptoms
from kvcomm_p2p.planning.plan import KL_MAX
from kvcomm_p2p.planning.types import Costs, Mode, Provenance, Repair
from kvcomm_p2p.protocol.anchors import BlockKey
from kvcomm_p2p.protocol.ids import AnchorId, NodeId
from kvcomm_p2p.report import PrefillReport, SpanReport, Timings
from kvcomm_p2p.reuse.guard import Verdict, verdict
from kvcomm_p2p.settings import Settings

SHOWN = [Symptoms(head, body, entropy) for head in (0.0, 2.0) for body in (0.0, 2.0) for entropy in (0.0, 8.0)]


def report(*, covered: int = 0, source: str = "") -> PrefillReport:
    span = SpanReport(0, 100, "reuse" if source else "recompute", source)
    return PrefillReport(
        "balanced", 100, 0, 0, 0, 100, 0, 0, (span,), (), Timings(), 0.0, covered_tokens=covered
    )  # fmt: skip


def test_a_link_brings_one_thing_after_the_other() -> None:
    link = Link(bytes_per_s=100.0)
    assert link.arrival(50, now=10.0) == 10.5
    assert link.arrival(100, now=10.2) == 11.5
    assert link.arrival(10, now=20.0) == 20.1


def test_a_slow_driver_brings_nothing_sooner_and_is_the_driver_otherwise() -> None:
    class Fake:
        asked: tuple[Any, ...] = ()

        async def fetch(self, *arguments: Any) -> str:
            self.asked = arguments
            return "what came"

        def held(self, anchor_id: AnchorId) -> AnchorId:
            return anchor_id

    fake = Fake()
    slow: Any = SlowDriver(fake, Link(1e6))  # type: ignore[arg-type]
    assert slow.held(AnchorId(b"a")) == b"a"
    blocks = [(BlockKey(AnchorId(b"a"), index), 10_000, b"digest") for index in range(2)]
    started = time.perf_counter()
    assert asyncio.run(slow.fetch(NodeId(b"peer"), blocks, 1.0, 0.5)) == "what came"
    assert time.perf_counter() - started >= 0.02
    assert fake.asked == (b"peer", blocks, 1.0, 0.5)


def test_one_guard_rejects_at_once_and_one_asks_for_longer_heads_first() -> None:
    limit = KL_MAX[Mode.BALANCED]
    first = {
        title: {verdict(fit.kl(shown), limit, may_widen=True) for shown in SHOWN} for title, fit in REJECTIONS.items()
    }
    assert list(first.values()) == [{Verdict.RECOMPUTE}, {Verdict.WIDEN}]
    for fit in REJECTIONS.values():
        assert {verdict(fit.kl(shown), limit, may_widen=False) for shown in SHOWN} == {Verdict.RECOMPUTE}


def test_rows_tell_how_many_times_as_long_and_how_much_better() -> None:
    pairs = [Pair(allowed, dense, report()) for allowed, dense in ((2.0, 1.0), (3.0, 4.0), (9.0, 2.0))]
    better, slower = pair_rows("a case", pairs)
    assert (better.value, better.baseline, better.ratio, better.n) == (3.0, 2.0, pytest.approx(2 / 3), 3)
    assert (slower.value, slower.unit) == (1.5, "×")


def test_only_what_came_from_a_peer_is_reuse() -> None:
    assert Pair(1.0, 1.0, report(source="holder")).reused
    assert not Pair(1.0, 1.0, report()).reused


def test_a_document_that_was_not_found_is_no_measurement() -> None:
    document = Document("A title", "text", 100)
    assert overhead._checked(report(covered=95), document)
    with pytest.raises(KVCommError, match="80 of the 100 tokens of 'A title'"):
        overhead._checked(report(covered=80), document)


def test_a_model_without_a_profile_is_refused(word_runner: ModelRunner) -> None:
    bare = ModelRunner(
        word_runner.model, word_runner.tokenizer, replace(word_runner.spec, profile=None), word_runner._call
    )
    with pytest.raises(UsageError, match="kvcomm calibrate tiny-words"):
        measure(bare, None, Settings(), 1)  # type: ignore[arg-type]


class Unmoved(CostTracker):
    """What is told of links counts; computing is slow, whatever is measured: a tiny model has no use for reuse."""

    def __init__(self, costs: Costs) -> None:
        slow = replace(
            costs, forward_s=1e-3, token_s=1e-2, attention_s=1e-9, pull_latency_s=1e-4, align_bytes_per_s=1e10
        )
        super().__init__(slow)

    def saw_forward(self, *_: Any) -> None:
        pass

    def saw_pull(self, *_: Any) -> None:
        pass

    def saw_align(self, *_: Any) -> None:
        pass


def test_everything_is_measured_with_a_peer_in_another_process(
    word_runner: ModelRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "tiny"
    word_runner.model.save_pretrained(folder)
    word_runner.tokenizer.save_pretrained(folder)
    for name in ("STATE", "CACHE", "RUNTIME"):
        monkeypatch.setenv(f"KVCOMM_{name}_DIR", str(tmp_path / name.lower()))
    monkeypatch.setattr(overhead, "CostTracker", Unmoved)
    monkeypatch.setattr(overhead, "HEARD_ROUNDS", 1)
    settings = replace(Settings.from_env(), cluster=private_cluster())
    loaded = ModelRunner.load(folder, cache_dir=settings.cache_dir)
    repairs = {each: (Repair(16),) for each in Provenance}
    profile = Profile(64, repairs, overhead.constant_fit(1e-9), "tests")
    runner = ModelRunner(loaded.model, loaded.tokenizer, replace(loaded.spec, profile=profile), loaded._call)
    sizes = Sizes(missing=(100,), rejected=(150,), runs=(128,), links=(100.0, 1e9), searched=(300,))
    with Worker("holder", str(folder), cluster=settings.cluster) as holder:
        rows = measure(runner, holder.wait_ready(), settings, 1, sizes)
    found = {(row.case, row.metric): row.value for row in rows}
    assert found["128 shared tokens over 0 MB/s", "requests that reuse"] == 0
    assert found["128 shared tokens over 1,000 MB/s", "requests that reuse"] == 100
    for title in REJECTIONS:
        assert found[f"{title}, 150 shared tokens", "requests rejected"] == 100
    assert {case for case, metric in found if metric == "times full prefill"} == {
        "nothing to reuse, 100 tokens",
        "128 shared tokens over 0 MB/s",
        "128 shared tokens over 1,000 MB/s",
        *(f"{title}, 150 shared tokens" for title in REJECTIONS),
    }
    share = found["search and plan, 300 shared tokens", "of it: search, alignment and planning"]
    assert 0 < share < 100
    assert all(math.isfinite(value) and value >= 0 for value in found.values())
