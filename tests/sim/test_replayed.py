"""Recordings of nodes as a workload: the same questions at the same times, of simulated nodes."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

import numpy as np
import pytest

from kvcomm_p2p.cli.sim_replay import _history
from kvcomm_p2p.errors import ConfigError
from kvcomm_p2p.net.recorded_nodes import RecordedNode
from kvcomm_p2p.net.recorder import Recorder
from kvcomm_p2p.protocol import events as ev
from kvcomm_p2p.protocol.anchors import NO_CHAIN, AnchorMeta, BlockHandle, BlockKey, HeldAnchor, Visibility
from kvcomm_p2p.protocol.config import NodeConfig
from kvcomm_p2p.protocol.ids import AnchorId, ModelId, NodeId, SequenceId
from kvcomm_p2p.protocol.messages import MemberRecord
from kvcomm_p2p.sim.replayed import NodeHistory, replay

MODEL = ModelId(b"recorded model..")
TOKENS = 64


def member(number: int) -> MemberRecord:
    return MemberRecord(
        NodeId(bytes([number]) * 16),
        1,
        f"node{number}",
        MODEL,
        f"127.0.0.1:{7000 + 2 * number}",
        f"127.0.0.1:{7001 + 2 * number}",
    )


def anchor() -> HeldAnchor:
    meta = AnchorMeta(
        anchor_id=AnchorId(b"a" * 16),
        model_id=MODEL,
        sequence_id=SequenceId(b"s" * 8),
        start=0,
        end=TOKENS,
        chain_end=NO_CHAIN,
        fingerprints=b"",
        hops=0,
        visibility=Visibility.PUBLIC,
        group=b"",
        kv_bytes=TOKENS * 1000,
    )
    digests = tuple(hashlib.sha256(bytes([index])).digest() for index in range(meta.blocks))
    return HeldAnchor(meta, np.zeros(TOKENS, np.uint32), (BlockHandle(9, 1, 1), BlockHandle(9, 2, 1)), digests)


def histories(tmp_path: Path) -> list[NodeHistory]:
    """The second node joins the first, which publishes an anchor; the second fetches it. Recorded by real recorders, whose
    clock begins anywhere; nobody answers them."""
    held = anchor()
    wants = tuple(
        ev.Want(
            BlockKey(held.meta.anchor_id, index), held.meta.block_bytes(index), digest, BlockHandle(3, index + 1, 1)
        )
        for index, digest in enumerate(held.digests)
    )
    fetch = ev.FetchRequested(1, (member(1).node_id,), wants, 1013.0, 1.0, 1.0, (held.meta,))
    asked = {
        1: [(1000.5, ev.AnchorsPublished((held,)))],
        2: [(1000.1, ev.JoinRequested((member(1).control,), 1002.0)), (1005.0, fetch)],
    }
    found = []
    for number, events in asked.items():
        recorder = Recorder(tmp_path / f"{number}.kvrec")
        node = RecordedNode(NodeConfig(), me=member(number), rng=random.Random(number), now=1000.0, recorder=recorder)
        for now, event in events:
            node.handle(event, now)
        node.handle(ev.TimerExpired(), 1006.0)
        recorder.close()
        found.append(_history(tmp_path / f"{number}.kvrec"))
    return found


def test_what_was_asked_is_asked_again_and_answered_by_the_world(tmp_path: Path) -> None:
    asked = histories(tmp_path)
    assert [[type(event).__name__ for _, event in each.asked] for each in asked] == [
        ["AnchorsPublished"],
        ["JoinRequested", "FetchRequested"],
    ]
    outcome = replay(asked)
    assert (outcome.fetches, outcome.found, dict(outcome.missed)) == (1, 2, {})
    assert (
        outcome.duration_s == pytest.approx(6.0) and outcome.received["Pull"] == 1 and outcome.frame_bytes["Pull"] > 0
    )
    assert 0 < outcome.fetch_s[0] < 0.1
    assert replay(asked).frame_bytes == outcome.frame_bytes


def test_a_fetch_from_somebody_who_is_not_there_is_a_miss(tmp_path: Path) -> None:
    outcome = replay(histories(tmp_path)[1:])
    assert outcome.found == 0 and sum(outcome.missed.values()) == 2


def test_two_recordings_of_one_node_are_refused(tmp_path: Path) -> None:
    one, _ = histories(tmp_path)
    for bad in ([], [one, one]):
        with pytest.raises(ConfigError, match="one recording per node"):
            replay(bad)
