"""What one peer may use of this node, and what this node may use of the machine. All generous: they stop floods, not work."""

from __future__ import annotations

import logging
import resource
from collections import OrderedDict
from dataclasses import dataclass

from kvcomm_p2p.errors import ConfigError

PEER_FRAMES_PER_S = 4_000.0
PEER_BYTES_PER_S = 32.0 * (1 << 20)
"""Of frames without payload: payloads come only as far as they were asked for."""

PEER_WORK_S_PER_S = 0.25
"""Seconds of processor time per second that what one peer says may take on the loop: short frames can ask for much."""

WORK_BURST_S = 3.0

BURST_S = 2.0
"""What was not used for this long may be used at once."""

PEERS_COUNTED_MAX = 4096

DESCRIPTORS_PER_PEER = 4
DESCRIPTORS_BESIDE = 256
PEERS_MIN = 64
"""With descriptors for fewer peers a node does not start."""

log = logging.getLogger("kvcomm_p2p.net")


@dataclass(slots=True)
class _Bucket:
    frames: float
    content: float
    at: float


class PeerLimits:
    """Token buckets: of frames and bytes per sender, of work per who has to answer for it. Not for several threads.

    Who is counted is told by bytes: a node id, or the key of its connection.
    """

    def __init__(
        self,
        frames_per_s: float = PEER_FRAMES_PER_S,
        bytes_per_s: float = PEER_BYTES_PER_S,
        burst_s: float = BURST_S,
        work_s_per_s: float = PEER_WORK_S_PER_S,
    ) -> None:
        self._frames_per_s = frames_per_s
        self._bytes_per_s = bytes_per_s
        self._burst_s = burst_s
        self._work_s_per_s = work_s_per_s
        self._buckets: OrderedDict[bytes, _Bucket] = OrderedDict()
        self._work: OrderedDict[bytes, tuple[float, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._buckets) + len(self._work)

    def take(self, sender: bytes, frame_bytes: int, now: float) -> bool:
        """Whether one more frame of `sender` is within its limits; if so it counts. `now`: seconds of a monotonic clock.

        A frame may overdraw the bytes once, so that the longest frame passes whatever the limit.
        """
        frames_max, bytes_max = self._frames_per_s * self._burst_s, self._bytes_per_s * self._burst_s
        bucket = self._buckets.get(sender)
        if bucket is None:
            bucket = self._buckets[sender] = _Bucket(frames_max, bytes_max, now)
            if len(self._buckets) > PEERS_COUNTED_MAX:
                self._buckets.popitem(last=False)
        self._buckets.move_to_end(sender)
        passed_s = max(0.0, now - bucket.at)
        bucket.at = now
        bucket.frames = min(frames_max, bucket.frames + passed_s * self._frames_per_s)
        bucket.content = min(bytes_max, bucket.content + passed_s * self._bytes_per_s)
        if bucket.frames < 1 or bucket.content <= 0:
            return False
        bucket.frames -= 1
        bucket.content -= frame_bytes
        return True

    def charge(self, payer: bytes, work_s: float, now: float) -> None:
        """What `payer` said took so many seconds of processor time."""
        self._work[payer] = (self._work_left(payer, now) - work_s, now)
        self._work.move_to_end(payer)
        if len(self._work) > PEERS_COUNTED_MAX:
            self._work.popitem(last=False)

    def has_work_left(self, payer: bytes, now: float) -> bool:
        """Whether anything more of `payer` should be looked at."""
        return self._work_left(payer, now) > 0

    def _work_left(self, payer: bytes, now: float) -> float:
        left_s, at = self._work.get(payer, (WORK_BURST_S, now))
        return min(WORK_BURST_S, left_s + max(0.0, now - at) * self._work_s_per_s)


def require_descriptors(peers_max: int) -> int:
    """Make room for `peers_max` peers in this process's table of open files, as far as the hard limit allows.

    ZeroMQ spins without accepting anybody once the table is full, so too small a table is told before. Returns for how many
    peers there is room. Raises ConfigError, naming the fix, if for fewer than PEERS_MIN.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS_PER_PEER * peers_max + DESCRIPTORS_BESIDE
    needed = DESCRIPTORS_PER_PEER * min(PEERS_MIN, peers_max) + DESCRIPTORS_BESIDE
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY:
        return peers_max
    if soft < needed:
        raise ConfigError(f"this process may open {soft} files, a node needs {needed}: run `ulimit -n {wanted}` first")
    room = (soft - DESCRIPTORS_BESIDE) // DESCRIPTORS_PER_PEER
    if room < peers_max:
        log.warning("open files are limited to %d: enough for %d peers; `ulimit -n %d` allows more", soft, room, wanted)
    return min(room, peers_max)
