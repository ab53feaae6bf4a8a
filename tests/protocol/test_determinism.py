"""The same scenario gives the same effects in every process, whatever the hash seed."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

from protocol_harness import Network, joined, meta

from kvcomm_p2p.protocol import events as ev


def scenario() -> str:
    """Digest of every frame and answer of a run with gossip, pulls, expiry and churn."""
    seen = hashlib.sha256()
    network, ids = joined(5, seed=3)
    original = network._carry_out

    def record(me: bytes, effect: ev.Effect, cause: ev.Event) -> None:
        if isinstance(effect, ev.SendMessage | ev.ReportPeer | ev.FinishTokens):
            seen.update(repr((network.now, me, effect)).encode())
        original(me, effect, cause)  # type: ignore[arg-type]

    network._carry_out = record  # type: ignore[method-assign]
    rng = network.rng
    network.fault = lambda source, target, message: [] if rng.random() < 0.1 else [rng.uniform(0.001, 0.02)]
    for step in range(30):
        network.publish(ids[step % 5], meta(step), meta(("second", step)))
        if step % 4 == 0:
            network.handle(ids[step % 5], ev.AnchorsForgotten((meta(step).anchor_id,)))
        network.fetch(ids[(step + 1) % 5], step, ids[step % 5], meta(("second", step)))
        network.run(0.4)
    network.frozen.add(ids[4])
    network.run(12.0)
    for node in network.nodes.values():
        seen.update(repr((node.peers(), node.stats())).encode())
    return seen.hexdigest()


def test_same_effects_in_other_processes() -> None:
    here = Path(__file__).parent
    code = "import test_determinism as t; print(t.scenario())"
    digests = set()
    for hash_seed in ("0", "1", "12345"):
        env = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(here)}
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, cwd=here, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
        digests.add(done.stdout.strip())
    assert len(digests) == 1 and len(digests.pop()) == 64


def test_scenario_depends_on_what_happens() -> None:
    network = Network(1)
    assert network.now == 0.0
    assert scenario() == scenario()
