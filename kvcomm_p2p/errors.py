"""Errors, by whose fault it is.

    KVCommError                  everything a caller may want to catch
    ├─ ConfigError               settings that cannot work; says which and what to write instead
    │  ├─ ModelError             the model cannot be found, loaded or used; says how to get it
    │  └─ NameTakenError         another live node has this name
    ├─ UsageError                the caller broke the API's rules (empty prompt, closed agent, prompt longer than the context)
    ├─ TransportError            our own sockets failed (port in use, cannot bind)
    │  └─ NodeUnreachableError   a node's local socket does not answer (in `local_api`)
    └─ CancelledByCaller         a generation was cancelled through its handle

    InternalError                an invariant broke: our bug, please report it. Not a KVCommError.

The wire's own `WireError` lives in `protocol.wire`, because the protocol imports nothing of ours. A peer's
fault is a counter and a miss, and a miss is a value (`protocol.anchors.Miss`), not an error.
"""

from __future__ import annotations


class KVCommError(Exception):
    """Base of everything that is not our own bug. `str()` is one sentence for a person, naming the fix."""


class ConfigError(KVCommError, ValueError):
    """Settings that cannot work."""


class ModelError(ConfigError):
    """The model cannot be found, loaded or used."""


class NameTakenError(ConfigError):
    """Another live node already has this name."""


class UsageError(KVCommError, ValueError):
    """The caller broke the API's rules."""


class TransportError(KVCommError, OSError):
    """Our own sockets failed."""


class CancelledByCaller(KVCommError):
    """The generation was cancelled."""


class InternalError(Exception):
    """An invariant broke: a bug of ours."""
