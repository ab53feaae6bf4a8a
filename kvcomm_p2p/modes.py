"""How much approximation a caller may ask for, and a role allows."""

from __future__ import annotations

from kvcomm_p2p.errors import UsageError
from kvcomm_p2p.planning.types import Mode

EXACT_ONLY_ROLES = frozenset({"judge", "selector", "voter", "ranker"})
"""Roles that compare candidates: approximate reuse is known to push their verdicts towards chance."""


def parse_mode(mode: str | Mode) -> Mode:
    """Raises UsageError naming the modes there are."""
    try:
        return Mode(mode)
    except ValueError:
        raise UsageError(f"mode {mode!r} is not known: use one of {', '.join(m.value for m in Mode)}") from None


def exact_only_reason(role: str) -> str:
    """Why a role gets exact reuse only; "" if it does not."""
    return f"role {role!r} compares candidates" if role.lower() in EXACT_ONLY_ROLES else ""
