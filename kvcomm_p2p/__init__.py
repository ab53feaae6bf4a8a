"""Peer-to-peer KV-cache exchange between LLM agents. Public names load on first use; importing this costs milliseconds."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "Agent": "kvcomm_p2p.agent",
    "SyncAgent": "kvcomm_p2p.sync",
    "Reply": "kvcomm_p2p.reply",
    "Text": "kvcomm_p2p.prompts",
    "Sampling": "kvcomm_p2p.model.decoding",
    "Settings": "kvcomm_p2p.settings",
    "PrefillReport": "kvcomm_p2p.report",
    "KVCommError": "kvcomm_p2p.errors",
    "ConfigError": "kvcomm_p2p.errors",
    "ModelError": "kvcomm_p2p.errors",
    "NameTakenError": "kvcomm_p2p.errors",
    "UsageError": "kvcomm_p2p.errors",
    "TransportError": "kvcomm_p2p.errors",
    "CancelledByCaller": "kvcomm_p2p.errors",
}

__all__ = [
    "Agent",
    "CancelledByCaller",
    "ConfigError",
    "KVCommError",
    "ModelError",
    "NameTakenError",
    "PrefillReport",
    "Reply",
    "Sampling",
    "Settings",
    "SyncAgent",
    "Text",
    "TransportError",
    "UsageError",
    "__version__",
]

if TYPE_CHECKING:
    from kvcomm_p2p.agent import Agent
    from kvcomm_p2p.errors import (
        CancelledByCaller,
        ConfigError,
        KVCommError,
        ModelError,
        NameTakenError,
        TransportError,
        UsageError,
    )
    from kvcomm_p2p.model.decoding import Sampling
    from kvcomm_p2p.prompts import Text
    from kvcomm_p2p.reply import Reply
    from kvcomm_p2p.report import PrefillReport
    from kvcomm_p2p.settings import Settings
    from kvcomm_p2p.sync import SyncAgent


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'kvcomm_p2p' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
