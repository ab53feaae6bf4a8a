"""What is logged of peers: no more than somebody can read, whatever they do."""

from __future__ import annotations

import logging

from kvcomm_p2p.protocol.events import ReportPeer
from kvcomm_p2p.protocol.ids import short

LINES_PER_S = 10.0
LINES_BURST = 1000.0
"""A cluster of a thousand may come, or go, at once."""

_LEVELS = {
    "violation": logging.WARNING,
    "name_conflict": logging.WARNING,
    "refused": logging.WARNING,
    "twin": logging.ERROR,
}

log = logging.getLogger("kvcomm_p2p.net")


class PeerReports:
    """Logs reports until LINES_BURST, then LINES_PER_S; says how many it left out."""

    def __init__(self) -> None:
        self._lines = LINES_BURST
        self._at = 0.0
        self.left_out = 0

    def write(self, report: ReportPeer, now: float) -> None:
        """`now`: seconds of a monotonic clock."""
        self._lines = min(LINES_BURST, self._lines + max(0.0, now - self._at) * LINES_PER_S)
        self._at = now
        if self._lines < 1:
            self.left_out += 1
            return
        self._lines -= 1
        if self.left_out:
            log.warning("%d more reports of peers were not logged", self.left_out)
            self.left_out = 0
        detail = report.detail and f": {report.detail}"
        fields = {"event": f"peer_{report.change}", "peer": report.name, "peer_id": short(report.peer)}
        if report.detail:
            fields["detail"] = report.detail
        level = _LEVELS.get(report.change, logging.INFO)
        log.log(level, "peer %s (%s) %s%s", report.name, short(report.peer), report.change, detail, extra=fields)
