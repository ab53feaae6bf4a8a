"""A token bucket: so many bytes a second, and what was saved up to a limit."""

from __future__ import annotations

ROUNDING_S = 1e-6


class Budget:
    """`left(now)` bytes may be spent; it grows by `per_s` each second up to `burst`. Spending more makes a debt."""

    def __init__(self, per_s: float, burst: float, now: float) -> None:
        self._per_s = per_s
        self._burst = burst
        self._left = burst
        self._at = now

    def left(self, now: float) -> float:
        """What may be spent now; below 0 after a debt."""
        if now > self._at:
            self._left = min(self._burst, self._left + (now - self._at) * self._per_s)
            self._at = now
        return self._left

    def spend(self, amount: float, now: float) -> None:
        """Take `amount`, whether there is so much or not."""
        self._left = self.left(now) - amount

    def ready_at(self, amount: float, now: float) -> float:
        """When `amount` (at most the burst) may be spent; a little later, so that rounding does not make it too early."""
        missing = amount - self.left(now)
        return now if missing <= 0 else now + missing / self._per_s + ROUNDING_S
