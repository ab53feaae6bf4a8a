"""Metrics are what happened, and the page that describes them is complete."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from agent_cases import met, random_ids
from prometheus_client.parser import text_string_to_metric_families

from kvcomm_p2p.agent import Agent
from kvcomm_p2p.agent_status import Distribution, Totals
from kvcomm_p2p.errors import ConfigError, TransportError
from kvcomm_p2p.metrics import ALIGNMENT_ERRORS, METRICS
from kvcomm_p2p.protocol.anchors import MissReason
from kvcomm_p2p.settings import METRICS_ANY_PORT, Settings

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
MakeAgent = Callable[..., Agent]
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def samples(text: str) -> Samples:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_the_page_lists_every_metric_with_its_labels_and_kind() -> None:
    rows = re.findall(r"^\| `(kvcomm_[a-z_]+)` \| (\w+) \|([^|]*)\|([^|]*)\| ", PAGE.read_text(), re.MULTILINE)
    told = {name: (kind, tuple(re.findall(r"`(\w+)`", labels)), unit.strip()) for name, kind, labels, unit in rows}
    assert len(told) == len(rows)
    here = {
        spec.name + "_total" * (spec.kind == "counter"): (spec.kind, spec.labels, spec.unit or "–") for spec in METRICS
    }
    assert told == here


def test_alignment_errors_are_reasons_of_misses() -> None:
    assert set(ALIGNMENT_ERRORS) <= {reason.value for reason in MissReason}


def test_what_two_agents_did_is_what_their_metrics_say(make_agent: MakeAgent) -> None:
    async def run() -> tuple[Samples, Samples, Any, Any]:
        async with make_agent("first") as first, make_agent("second", join=[first.address]) as second:
            await met(first, second)
            document = random_ids(7, 192)
            one = await first.prefill(document)
            await first.settled()
            for _ in range(200):
                if second.status().peers[0]["anchors"]:
                    break
                await asyncio.sleep(0.02)
            two = await second.prefill(document)
            await second.settled()
            for _ in range(200):
                if sum(first.watch().facts().stats.node.sync_counts):
                    break
                await asyncio.sleep(0.02)
            return samples(first.watch().metrics_text()), samples(second.watch().metrics_text()), one.report, two.report

    first, second, one, two = asyncio.run(run())
    for found, report in ((first, one), (second, two)):
        for how in ("exact", "continued", "reused", "recomputed"):
            assert found["kvcomm_prompt_tokens_total", (("how", how),)] == getattr(report, f"{how}_tokens")
        assert found["kvcomm_requests_total", ()] == 1
        assert found["kvcomm_fallbacks_total", ()] == 0
    assert two.pulled_bytes > 0
    assert second["kvcomm_pulled_bytes_total", ()] == first["kvcomm_uploaded_bytes_total", ()] == two.pulled_bytes
    assert second["kvcomm_prefill_seconds_count", (("how", "reused"),)] == 1
    assert first["kvcomm_prefill_seconds_count", (("how", "computed"),)] == 1
    assert second["kvcomm_prefill_seconds_sum", (("how", "reused"),)] == pytest.approx(two.timings.total_s)
    assert first["kvcomm_sync_seconds_count", ()] >= 1
    assert first["kvcomm_peers", (("state", "alive"),)] == 1
    pool = first["kvcomm_memory_bytes", (("level", "pool"),)]
    assert 0 < pool <= first["kvcomm_memory_bytes", (("level", "store"),)]
    assert second["kvcomm_anchors", (("where", "peers"),)] >= 1
    assert first["kvcomm_violations_total", ()] == 0
    silent = {"kvcomm_round_trip_seconds", "kvcomm_misses", "kvcomm_block_misses", "kvcomm_frames_lost"}
    silent |= {"kvcomm_frames_dropped", "kvcomm_penalties", "kvcomm_reused_likeness", "kvcomm_divergence_nats"}
    names = {name for name, _ in second}
    for spec in METRICS:
        told = spec.name + {"counter": "_total", "gauge": "", "histogram": "_count"}[spec.kind]
        assert told in names or spec.name in silent, spec.name


def test_the_server_answers_on_loopback_and_ends_with_the_agent(make_agent: MakeAgent) -> None:
    async def run() -> None:
        async with make_agent("served", metrics_port=METRICS_ANY_PORT) as agent:
            address = agent.watch().peers()["metrics_address"]
            assert address.startswith("127.0.0.1:") and not address.endswith(":0")
            told = await asyncio.to_thread(_get, f"http://{address}/metrics")
            assert 'kvcomm_agent_info{model="' in told and 'name="served"' in told
        with pytest.raises(urllib.error.URLError):
            await asyncio.to_thread(_get, f"http://{address}/metrics")
        async with make_agent("silent") as agent:
            assert agent.watch().peers()["metrics_address"] == ""

    before = threading.active_count()
    asyncio.run(run())
    assert threading.active_count() <= before


def test_a_port_in_use_is_told_with_its_fix_and_leaves_nothing_behind(make_agent: MakeAgent) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()

        async def run() -> None:
            with pytest.raises(TransportError, match=r"metrics_port .*choose another one, or any"):
                await make_agent("a", metrics_port=taken.getsockname()[1]).start()

        asyncio.run(run())


def test_settings_of_the_port() -> None:
    for text, port in (("off", 0), ("0", 0), ("any", METRICS_ANY_PORT), (" ANY ", METRICS_ANY_PORT), ("9100", 9100)):
        assert Settings.from_env({"KVCOMM_METRICS_PORT": text, "KVCOMM_CONFIG": "/dev/null"}).metrics_port == port
    for text in ("70000", "-2", "some"):
        with pytest.raises(ConfigError, match=r"(?i)metrics_port"):
            Settings.from_env({"KVCOMM_METRICS_PORT": text, "KVCOMM_CONFIG": "/dev/null"})


def test_distributions_count_every_value_once() -> None:
    distribution = Distribution.over((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 2.5, 99.0):
        distribution.add(value)
    assert distribution.counts == [2, 2, 2]
    assert distribution.total == pytest.approx(106.5)


def test_reading_distributions_gives_copies() -> None:
    totals = Totals()
    totals._distribution("kvcomm_prefill_seconds", "reused", (1.0,)).add(0.5)
    totals.distributions()["kvcomm_prefill_seconds", "reused"].add(0.5)
    assert totals.distributions()["kvcomm_prefill_seconds", "reused"].counts == [1, 0]


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())
