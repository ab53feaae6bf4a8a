"""Counts, sizes and times for people."""

from __future__ import annotations


def counted(count: int, noun: str, plural: str = "") -> str:
    """A number of things for people: 1 anchor, 3,000 anchors; `plural` where it is not the noun and an s."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def size(count_bytes: float) -> str:
    """Bytes for people: 512 B, 23.1 MB."""
    for unit in ("B", "kB", "MB"):
        if count_bytes < 1000:
            return f"{count_bytes:.0f} B" if unit == "B" else f"{count_bytes:.1f} {unit}"
        count_bytes /= 1000
    return f"{count_bytes:.1f} GB"


def duration(seconds: float) -> str:
    """Seconds for people: 85 ms, 1.23 s, 4 min 10 s, 2 h 5 min."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
