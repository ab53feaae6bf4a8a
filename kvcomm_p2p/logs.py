"""The log of `kvcomm` commands: lines for people, or one JSON object a line.

Whoever logs an event passes what belongs to it as `extra`, with the names of FIELDS; the text is for people. No text of a
prompt, no token id and no key is ever logged.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import datetime, timezone
from typing import IO

from kvcomm_p2p.settings import Settings

FIELDS = ("event", "node", "peer", "peer_id", "anchor", "reason", "detail", "seconds", "bytes", "count", "path")
"""What an event may carry beside its text. `seconds` and `bytes` are numbers in these units."""

ROOT = "kvcomm_p2p"


class JsonFormatter(logging.Formatter):
    """`{"time", "level", "logger", "message", …}` with those of FIELDS that the event has, and `error` with a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """One line. Values that JSON does not know are written as text."""
        line = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: record.__dict__[name] for name in FIELDS if name in record.__dict__}
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class TextFormatter(logging.Formatter):
    """`12:34:56 warning net: peer coder is suspect`."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, and a traceback where there is one."""
        at = datetime.fromtimestamp(record.created).strftime("%H:%M:%S")
        where = record.name.removeprefix(f"{ROOT}.")
        line = f"{at} {record.levelname.lower()} {where}: {record.getMessage()}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def configure(settings: Settings, stream: IO[str] | None = None) -> logging.Handler:
    """Sends our log to `stream` (stderr) as the settings say, in place of what an earlier call set up; returns the handler."""
    root = logging.getLogger(ROOT)
    for old in [handler for handler in root.handlers if isinstance(handler.formatter, JsonFormatter | TextFormatter)]:
        root.removeHandler(old)
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if settings.log == "json" else TextFormatter())
    root.addHandler(handler)
    root.setLevel(settings.log_level.upper())
    root.propagate = False
    return handler
