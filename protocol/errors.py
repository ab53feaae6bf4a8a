"""The two errors that this folder raises on purpose: `SettingsError` here, `WireError` in `wire`.

Anything else that escapes from a node is a bug.
"""

from __future__ import annotations


class SettingsError(ValueError):
    """A NodeConfig that cannot work. `problems` lists every one of them; `str()` joins them."""

    def __init__(self, problems: tuple[str, ...]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems
