"""Notices while a node runs that its keys or its allow-list were changed on disk."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvcomm_p2p.errors import ConfigError
from kvcomm_p2p.net.identity import ALLOWED_FILE, Allowed, load_allowed
from kvcomm_p2p.net.keys import KEY_FILE, OLD_KEY_FILE, ClusterKeys, load_cluster_keys, load_old_seal
from kvcomm_p2p.net.private_files import version_of
from kvcomm_p2p.net.seal import Sealer

LOOK_EVERY_S = 1.0

log = logging.getLogger("kvcomm_p2p.net")


class KeyWatch:
    """Looks at the files of a state directory every second, on a loop. A file that cannot be used is reported and changes
    nothing: who was let in still is, and nobody else."""

    def __init__(
        self, state_dir: Path, keys: ClusterKeys, sealer: Sealer, on_allowed: Callable[[tuple[Allowed, ...]], None]
    ) -> None:
        """`keys`: those that this node seals with. `on_allowed` gets every new allow-list, on the loop."""
        self._state_dir = state_dir
        self._keys = keys
        self._sealer = sealer
        self._on_allowed = on_allowed
        self._timer: asyncio.TimerHandle | None = None
        self._seen: dict[str, tuple[int, int, int]] = {}

    def start(self) -> None:
        """Begin, on the running loop: secrets at once, the allow-list when it changes."""
        self._loop = asyncio.get_running_loop()
        self._seen[ALLOWED_FILE] = version_of(self._state_dir / ALLOWED_FILE)
        self.look()
        self._again()

    def stop(self) -> None:
        """No callback follows."""
        if self._timer is not None:
            self._timer.cancel()

    def look(self) -> None:
        """Take in what has changed since the last look."""
        if self._changed(KEY_FILE) | self._changed(OLD_KEY_FILE):
            with _reported():
                self._accept_secrets()
        if self._changed(ALLOWED_FILE):
            with _reported():
                self._on_allowed(load_allowed(self._state_dir))

    def _accept_secrets(self) -> None:
        """The secret before ours opens until its time has come; one that came after ours, as long as we run."""
        now = time.time()
        others: list[tuple[bytes, float]] = []
        old = load_old_seal(self._state_dir, now)
        if old is not None:
            others.append((old.key, time.monotonic() + old.until - now))
        if (self._state_dir / KEY_FILE).exists():
            newest = load_cluster_keys(self._state_dir)
            if newest != self._keys:
                log.warning(
                    "the cluster's secret was exchanged: restart this node; until then it seals with the old one"
                )
                others.append((newest.seal, math.inf))
        self._sealer.accept(others)

    def _changed(self, name: str) -> bool:
        before, now = self._seen.get(name), version_of(self._state_dir / name)
        self._seen[name] = now
        return now != before

    def _again(self) -> None:
        self._timer = self._loop.call_later(LOOK_EVERY_S, self._tick)

    def _tick(self) -> None:
        self.look()
        self._again()


@contextmanager
def _reported() -> Iterator[None]:
    """Logs a ConfigError instead of raising it."""
    try:
        yield
    except ConfigError as error:
        log.error("keys were changed on disk and cannot be used: %s", error)
