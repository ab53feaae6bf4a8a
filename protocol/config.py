"""What can be set on a node. Every field says its unit and what a larger value does."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields

from kvcomm_p2p.protocol.errors import SettingsError
from kvcomm_p2p.protocol.messages import CLUSTER_ID_BYTES, COUNTER_MAX, RETRY_AFTER_S_MAX

MIB = 1024 * 1024
ERASING_KEY_BYTES = 16

PEERS_MAX_MAX = 8192
"""Rows of so many peers fit into one control frame; full entries are told by buckets, as many as fit."""

DELTA_BYTES_MAX_MAX = 128 * 1024

DIRECTORY_MODES = ("auto", "full", "sharded")
_LENGTHS = {"cluster_id": CLUSTER_ID_BYTES, "erasing_key": ERASING_KEY_BYTES}

_MAY_BE_ZERO = ("anchor_ttl_s", "passing_on_s", "upload_bytes_per_s_max")


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """Settings of one node. Raises SettingsError naming every problem at once.

    The waits for a peer that does not deliver (`tokens_timeout_s`, `pull_stall_timeout_s`) bound what one frozen peer
    can cost a request: after either, the peer sits in the penalty box and is not waited for again.
    """

    cluster_id: bytes = bytes(CLUSTER_ID_BYTES)
    """16 bytes; nodes of different clusters refuse each other."""

    gossip_interval_s: float = 0.2
    """Seconds between gossip rounds. Larger: less traffic, later news."""

    probe_interval_s: float = 1.0
    """Seconds between probes, each of one peer. Larger: less traffic, but the dead are found later (also because
    suspects get 4 to 24 intervals to clear themselves)."""

    probe_timeout_s: float = 0.5
    """Seconds until others are asked to probe a peer that did not answer. Larger: slow peers are suspected less; what
    is left of the interval must suffice for the others' answers."""

    forget_after_s: float = 600.0
    """Seconds that a dead or departed peer is remembered. Larger: a longer memory for who must not be
    resurrected."""

    recontact_s: float = 30.0
    """Mean seconds between attempts to reach each lost seed and each dead peer. Larger: partitions merge later."""

    join_retry_s: float = 0.25
    """Seconds until an unanswered Hello is first repeated (then twice as long each time, up to 5 s)."""

    delta_bytes_max: int = DELTA_BYTES_MAX_MAX
    """Bytes of log entries per gossip message. Larger: a newcomer catches up in fewer rounds, but bursts are bigger."""

    gossip_bytes_per_s_max: int = 4_000_000
    """Bytes of log entries sent per second at most, averaged. Larger: newcomers and healed partitions catch up sooner,
    bursts are bigger."""

    require_signatures: bool = False
    """Whether news of a log count only with a head that its writer signed. Needs peers that have keys."""

    tombstone_s: float = 60.0
    """Seconds that a deletion is told. A peer that was away longer gets a fresh snapshot. Larger: more memory."""

    tokens_timeout_s: float = 0.1
    """Seconds to wait for token ids. Larger: a frozen peer costs a request more."""

    pull_stall_timeout_s: float = 0.2
    """Seconds without progress until a pull is given up. Larger: a frozen peer costs a request more."""

    uploads_max: int = 4
    """Pulls served at a time; more are told BUSY. Larger: each gets less bandwidth."""

    upload_lease_s: float = 5.0
    """Seconds without credit until a puller is taken to have gone. Larger: silent pullers hold slots and blocks
    longer."""

    upload_bytes_in_flight_max: int = 32 * MIB
    """Bytes sent to one peer, in all its pulls, that it has not credited yet. Larger: better use of slow links, more
    memory."""

    upload_bytes_per_s_max: int = 0
    """Bytes of blocks sent per second to all peers together, 0: no limit. Larger: peers get theirs sooner, others on
    the link wait longer."""

    requests_per_peer_s_max: int = 1000
    """Pulls and questions for token ids answered per second and peer. Larger: a peer can keep this node busier."""

    passing_on_s: float = 10.0
    """Seconds that blocks just pulled are served to others, and that those who pulled here are named to others; 0: neither.
    Larger: more is found at peers when many want the same, more memory is used."""

    passing_on_bytes_max: int = 128 * MIB
    """Bytes of blocks just pulled that are kept for others. Larger: more memory."""

    busy_retry_s: float = 0.04
    """Seconds after which a puller that was told BUSY should ask again. Larger: fewer questions, later answers."""

    credit_bytes: int = 16 * MIB
    """Bytes of one pull that may be on the way. Larger: better use of slow links, more memory at both ends."""

    pull_piece_bytes: int = 2 * MIB
    """Bytes of blocks asked for in one pull (at least one block). Larger: fewer messages; smaller: a holder that many want
    can be left sooner for peers that have the piece already."""

    pull_busy_wait_s: float = 2.0
    """Seconds that a fetch waits without progress for holders that answer, but are busy. Larger: fewer misses when many
    want the same, longer waits in vain."""

    pulls_per_peer_max: int = 2
    """Own pulls in flight to one holder; more wait their turn. Larger: one node can take more of a holder's slots."""

    pool_bytes_max: int = 1024 * MIB
    """Bytes of KV held. Larger: more is found, more memory is used."""

    pool_anchors_max: int = 5000
    """Anchors held. Larger: more is found, more gossip."""

    peers_max: int = 1024
    """Peers remembered, whatever their state. More are turned down."""

    anchors_per_peer_max: int = 5000
    """Anchors remembered per peer. A peer that announces more is followed no further."""

    directory_anchors_max: int = 200_000
    """Anchors of peers remembered in all. Past it, peers with news are followed no further until others leave."""

    directory: str = "auto"
    """Who knows which anchors are where. "full": this node keeps an index of everybody's; "sharded": it asks the owners of
    shards; "auto": full while the two limits below allow it."""

    directory_bytes_max: int = 256_000_000
    """Bytes that a full index may take. Larger: lookups stay local in larger clusters, more memory is used."""

    directory_bytes_per_s_max: int = 256_000
    """Bytes per second of news that a full index may need. Larger: lookups stay local in busier clusters."""

    lookup_timeout_s: float = 0.1
    """Seconds that a lookup waits for owners of shards. Larger: more is found while peers are slow, a frozen peer costs a
    request more."""

    penalty_first_s: float = 1.0
    """Seconds that a peer is not asked after it failed to deliver; doubles each time in a row."""

    penalty_max_s: float = 30.0
    """Longest penalty. Larger: peers that recovered are used later."""

    anchor_ttl_s: float = 0.0
    """Seconds after which an anchor that nobody published again is forgotten; 0: never."""

    erasing_key: bytes = field(default=bytes(ERASING_KEY_BYTES), repr=False)
    """16 bytes by which content to be erased is named; equal on all nodes of the cluster, derived from its secret."""

    def __post_init__(self) -> None:
        problems = self._bad_numbers()
        if self.directory not in DIRECTORY_MODES:
            problems.append(f"directory must be one of {', '.join(DIRECTORY_MODES)}, not {self.directory!r}")
        if all(
            isinstance(getattr(self, item.name), int | float | bytes) or item.name == "directory"
            for item in fields(self)
        ):
            problems += self._bad_relations()
        if problems:
            raise SettingsError(tuple(problems))

    def _bad_numbers(self) -> list[str]:
        problems: list[str] = []
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name in _LENGTHS:
                if not isinstance(value, bytes) or len(value) != _LENGTHS[item.name]:
                    problems.append(f"{item.name} must be {_LENGTHS[item.name]} bytes")
            elif item.name == "directory" or (item.name in _MAY_BE_ZERO and value == 0):
                continue
            elif item.name == "require_signatures":
                if not isinstance(value, bool):
                    problems.append(f"require_signatures must be true or false, not {value!r}")
            elif isinstance(value, bool) or not isinstance(value, int | float):
                problems.append(f"{item.name} must be a number, not {value!r}")
            elif not (math.isfinite(value) and 0 < value <= COUNTER_MAX):
                problems.append(f"{item.name} must be above 0 and finite, not {value}")
            elif not item.name.endswith("_s") and not isinstance(value, int):
                problems.append(f"{item.name} must be a whole number, not {value}")
        return problems

    def _bad_relations(self) -> list[str]:
        checks = (
            ("probe_interval_s", ">=", 2 * self.probe_timeout_s, "twice probe_timeout_s, or helpers could not answer"),
            (
                "forget_after_s",
                ">=",
                10 * self.probe_interval_s,
                "10 probe intervals, or old news would resurrect peers",
            ),
            ("tombstone_s", ">=", 5 * self.gossip_interval_s, "5 gossip intervals, or deletions would not arrive"),
            ("upload_lease_s", ">=", self.pull_stall_timeout_s, "pull_stall_timeout_s"),
            ("penalty_max_s", ">=", self.penalty_first_s, "penalty_first_s"),
            ("anchors_per_peer_max", ">=", self.pool_anchors_max, "pool_anchors_max, since peers have the same limits"),
            ("directory_anchors_max", ">=", self.anchors_per_peer_max, "anchors_per_peer_max"),
            ("delta_bytes_max", ">=", 8192, "8192, room for the longest record and the largest anchor"),
            ("gossip_bytes_per_s_max", ">=", 65536, "65536, or newcomers would hardly catch up"),
            ("delta_bytes_max", "<=", DELTA_BYTES_MAX_MAX, f"{DELTA_BYTES_MAX_MAX}, or a frame would be too long"),
            ("peers_max", "<=", PEERS_MAX_MAX, f"{PEERS_MAX_MAX}, or a digest would be too long"),
            ("busy_retry_s", "<=", RETRY_AFTER_S_MAX, f"{RETRY_AFTER_S_MAX}"),
        )
        problems: list[str] = []
        for name, relation, limit, why in checks:
            value = getattr(self, name)
            if not (value >= limit if relation == ">=" else value <= limit):
                problems.append(f"{name} ({value}) must be {'at least' if relation == '>=' else 'at most'} {why}")
        return problems
