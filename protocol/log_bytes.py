"""How many bytes parts of gossip take at most: deltas are filled by these."""

from __future__ import annotations

from kvcomm_p2p.protocol.messages import Del, MemberRecord, Put

DELTA_BYTES_MIN = 256
"""Upper bound of an OriginDelta's bytes without entries and member record."""


ENTRY_BYTES_MAX = 160
"""Upper bound of a log entry's encoding, without its fingerprints."""


def entry_bytes_max(entry: Put | Del) -> int:
    """Upper bound of the entry's bytes on the wire."""
    return ENTRY_BYTES_MAX + len(entry.fingerprints) if isinstance(entry, Put) else 32


def member_bytes_max(member: MemberRecord) -> int:
    """Upper bound of the bytes of a member record (a character takes at most 4 bytes)."""
    return 320 + 4 * (len(member.name) + len(member.control) + len(member.bulk)) + 10 * len(member.groups)
