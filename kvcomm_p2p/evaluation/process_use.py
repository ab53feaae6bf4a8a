"""What this process uses, as Linux tells. Elsewhere there is nothing to read, and the figures are missing."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def process_use(pid: int | None = None) -> dict[str, float]:
    """Of this process, or of `pid`: `rss_bytes` (resident, shared memory included), `pss_bytes` (shared pages divided by who
    shares them), `shared_bytes` (resident and in shared memory), `descriptors`, `segments` (those of them that are shared
    memory), `cpu_s` (user and system). Raises nothing; a figure that cannot be read is missing."""
    folder = Path(f"/proc/{os.getpid() if pid is None else pid}")
    use: dict[str, float] = {}
    with suppress(OSError, ValueError, IndexError):
        for line in (folder / "status").read_text().splitlines():
            for field, name in (("VmRSS:", "rss_bytes"), ("RssShmem:", "shared_bytes")):
                if line.startswith(field):
                    use[name] = int(line.split()[1]) * 1024
    with suppress(OSError, ValueError, IndexError):
        for line in (folder / "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                use["pss_bytes"] = int(line.split()[1]) * 1024
    with suppress(OSError):
        use["descriptors"] = use["segments"] = 0
        for path in (folder / "fd").iterdir():
            use["descriptors"] += 1
            with suppress(OSError):  # closed meanwhile
                use["segments"] += str(path.readlink()).startswith("/memfd:")
    with suppress(OSError, ValueError, IndexError):
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        use["cpu_s"] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return use
