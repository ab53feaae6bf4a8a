"""Events, messages and effects in a few words: their important fields, with names in place of ids."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import msgspec

from kvcomm_p2p.protocol import events as ev
from kvcomm_p2p.protocol.anchors import HeldAnchor, Miss

SHOWN_MAX = 2
"""Of longer lists only those are shown that mention what the story is about, and so many."""

BYTES_SHOWN = 3
TEXT_MAX = 150
DEPTH_MAX = 3

_NOT_TOLD = (
    "rng",
    "token_ids",
    "digests",
    "handles",
    "landmarks",
    "fingerprints",
    "signature",
    "head_signature",
    "bulk",
)

Names = Mapping[bytes, str]
"""Of nodes, by id."""


def mentions(value: Any, about: Collection[bytes]) -> bool:
    """Whether any of these ids is in the value, or in something in it; packed bytes are searched, too."""
    if isinstance(value, bytes):
        return any(each in value for each in about)
    if isinstance(value, tuple | list):
        return any(mentions(each, about) for each in value)
    if isinstance(value, msgspec.Struct):
        return any(mentions(getattr(value, name), about) for name in value.__struct_fields__)
    if dataclasses.is_dataclass(value):
        return any(mentions(getattr(value, field.name), about) for field in dataclasses.fields(value))
    return False


def brief(value: Any, names: Names, about: Collection[bytes] = (), depth: int = 0) -> str:
    """In one line; at the outermost level at most TEXT_MAX characters."""
    if isinstance(value, bytes):
        told = names.get(value, value[:BYTES_SHOWN].hex() or "-")
    elif isinstance(value, enum.Enum):
        told = value.name.lower()
    elif isinstance(value, float):
        told = f"{value:.6g}"
    elif isinstance(value, Miss):
        told = value.reason.value + (f" ({value.detail})" if value.detail else "")
    elif isinstance(value, HeldAnchor):
        told = brief(value.meta, names, about, depth)
    elif isinstance(value, tuple | list) and not hasattr(value, "_fields"):
        told = _brief_list(value, names, about, depth)
    elif (fields := list(_fields(value))) or isinstance(value, msgspec.Struct):
        inner = (
            ", ".join(_field(name, each, names, about, depth) for name, each in fields) if depth < DEPTH_MAX else "…"
        )
        told = f"{type(value).__name__}({inner})"
    else:
        told = str(value)
    return told if depth or len(told) <= TEXT_MAX else told[: TEXT_MAX - 1] + "…"


def _field(name: str, value: Any, names: Names, about: Collection[bytes], depth: int) -> str:
    return f"{name}={brief(value, names, about, depth + 1)}"


def _brief_list(items: Any, names: Names, about: Collection[bytes], depth: int) -> str:
    shown = items if len(items) <= SHOWN_MAX else [each for each in items if mentions(each, about)][:SHOWN_MAX]
    told = [brief(each, names, about, depth + 1) for each in shown]
    if len(items) > len(shown):
        told.append(f"… of {len(items)}")
    return f"[{', '.join(told)}]"


def _fields(value: Any) -> Iterator[tuple[str, Any]]:
    """Those that say something: not the defaults, not what is long and means nothing to people."""
    if isinstance(value, msgspec.Struct):
        for field in msgspec.structs.fields(value):
            given = getattr(value, field.name)
            if field.name not in _NOT_TOLD and not (field.default is not msgspec.NODEFAULT and given == field.default):
                yield field.name, given
    elif hasattr(value, "_asdict"):
        yield from ((name, each) for name, each in value._asdict().items() if name not in _NOT_TOLD)
    elif dataclasses.is_dataclass(value):
        for item in dataclasses.fields(value):
            given = getattr(value, item.name)
            if item.name not in _NOT_TOLD and not (item.default is not dataclasses.MISSING and given is item.default):
                yield item.name, given


def told_effect(effect: ev.Effect, names: Names, about: Collection[bytes]) -> str:
    """What a node says of itself or of a peer, in words; "" for what goes on its way to others, who will tell."""
    if isinstance(effect, ev.FinishFetch):
        reasons = sorted({block.miss.reason.value for block in effect.missed})
        missed = f"{len(effect.missed)} missed ({', '.join(reasons)})" if reasons else "none missed"
        return f"finishes fetch {effect.fetch_id}: {len(effect.found)} found, {missed}"
    if isinstance(effect, ev.FinishTokens):
        result = effect.result
        told = brief(result, names) if isinstance(result, Miss) else f"{len(result.token_ids)} token ids"
        return f"finishes request {effect.request_id}: {told}"
    if isinstance(effect, ev.ReportPeer):
        detail = f" ({effect.detail})" if effect.detail else ""
        return f"reports {effect.name}: {effect.change}{detail}"
    if isinstance(effect, ev.FinishJoin | ev.RenewIdentity | ev.SaveState | ev.ReportErased):
        return brief(effect, names, about)
    return ""
