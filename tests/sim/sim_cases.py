"""What several files of tests simulate."""

from __future__ import annotations

from typing import Any

from kvcomm_p2p.planning.types import ReuseRules

RULES = ReuseRules(approximate=True, reason="", kl_target=1.0, kl_max=2.0)

TINY: dict[str, Any] = {
    "name": "tiny",
    "agents": 2,
    "duration_s": 5.0,
    "costs": "llama-3.1-8b-h100",
    "updates": 2,
    "fabrics": ["none", "peers"],
    "workload": {"kind": "rag", "tasks_per_s": 1.0, "documents": 4},
    "network": {"inside": "fast"},
}
"""A scenario as it is written, over in a moment."""
