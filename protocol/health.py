"""How far this node may trust its own clockwork (Lifeguard's local health multiplier)."""

from __future__ import annotations

HEALTH_MAX = 7


class LocalHealth:
    """0 is well; each point of trouble makes this node that much more patient with others.

    Lifeguard (arXiv 1707.00788), section 3.1: a node that does not get its own messages or timers in time must not
    judge others by its usual measure.
    """

    def __init__(self) -> None:
        self.trouble = 0

    @property
    def patience(self) -> int:
        """Factor for probe intervals and timeouts, 1 to HEALTH_MAX + 1."""
        return self.trouble + 1

    def better(self) -> None:
        """A probe was answered."""
        self.trouble = max(0, self.trouble - 1)

    def worse(self) -> None:
        """Somebody suspected us though we live, our timer was late, or helpers did not answer us."""
        self.trouble = min(HEALTH_MAX, self.trouble + 1)
