"""What this process uses, as Linux tells. Elsewhere there is nothing to read, and the figures are missing."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")


def process_use(pid: int | None = None) -> dict[str, float]:
    """Of this process, or of `pid`: `rss_bytes` (resident), `pss_bytes` (shared pages divided by who shares them),
    `descriptors`, `cpu_s` (user and system). Raises nothing; a figure that cannot be read is missing."""
    folder = Path(f"/proc/{os.getpid() if pid is None else pid}")
    use: dict[str, float] = {}
    with suppress(OSError, ValueError, IndexError):
        use["rss_bytes"] = int((folder / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError, IndexError):
        for line in (folder / "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                use["pss_bytes"] = int(line.split()[1]) * 1024
    with suppress(OSError):
        use["descriptors"] = len(list((folder / "fd").iterdir()))
    with suppress(OSError, ValueError, IndexError):
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        use["cpu_s"] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return use


def shared_segments() -> dict[str, int]:
    """Names and bytes of what lies in shared memory, of all users' processes."""
    segments: dict[str, int] = {}
    with suppress(OSError):
        for path in SHARED_MEMORY.iterdir():
            with suppress(OSError):
                segments[path.name] = path.stat().st_size
    return segments
