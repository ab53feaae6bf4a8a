"""Settings are checked all at once."""

from __future__ import annotations

import pytest

from kvcomm_p2p.protocol.config import NodeConfig
from kvcomm_p2p.protocol.errors import SettingsError


def test_defaults_are_valid() -> None:
    config = NodeConfig()
    assert max(config.tokens_timeout_s, config.pull_stall_timeout_s) <= 0.25


def test_every_problem_is_named() -> None:
    with pytest.raises(SettingsError) as caught:
        NodeConfig(
            cluster_id=b"short",
            gossip_interval_s=float("nan"),
            uploads_max=0,
            peers_max=9999,
            pool_bytes_max=1.5,  # type: ignore[arg-type]
        )
    text = str(caught.value)
    assert all(
        name in text for name in ("cluster_id", "gossip_interval_s", "uploads_max", "peers_max", "pool_bytes_max")
    )
    assert len(caught.value.problems) >= 5


@pytest.mark.parametrize(
    "changes",
    [
        {"probe_interval_s": 0.5},
        {"forget_after_s": 1.0},
        {"tombstone_s": 0.5},
        {"upload_lease_s": 0.1},
        {"penalty_max_s": 0.5},
        {"anchors_per_peer_max": 10},
        {"directory_anchors_max": 10},
        {"delta_bytes_max": 100},
        {"delta_bytes_max": 10**6},
        {"busy_retry_s": 100.0},
        {"gossip_interval_s": "fast"},
        {"gossip_interval_s": None},
        {"uploads_max": True},
    ],
)
def test_settings_that_cannot_work(changes: dict[str, object]) -> None:
    with pytest.raises(SettingsError, match=next(iter(changes))):
        NodeConfig(**changes)  # type: ignore[arg-type]
