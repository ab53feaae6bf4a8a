"""The local API of a node process: newline-delimited JSON over a Unix socket that only the same user can open.

One request object per connection, then a stream of event objects; the last one is `done` or `error`. Closing the
connection cancels the request.

    {"op": "ask", "prompt": str | [{"role", "content"}], "slots": {name: text}, "mode": "balanced", "sampling": {...}}
        -> {"event": "text", "text"}*, {"event": "done", "reply": {text, finish_reason, ttft_s, total_s, report}}
    {"op": "status"}                                      -> {"event": "done", "status": {...}}
    {"op": "compare", "prompt", "slots", "tokens": 32}    -> {"event": "done", "comparison": {...}}
    {"op": "explain", "prompt", "slots", "mode"}          -> {"event": "done", "report": {...}}, of a plan, not carried out
    {"op": "explain", "last": true}                       -> {"event": "done", "report": {...}}, of the last request
    {"op": "peers"}                                       -> {"event": "done", "peers": {...}}, see `watching.Watch.peers`
    {"op": "inspect"}                                     -> {"event": "done", "inspect": {...}}, for `kvcomm doctor`
    {"op": "metrics"}                                     -> {"event": "done", "metrics": str}, as Prometheus reads it
    {"op": "recording"}                                   -> {"event": "done", "recording": {path, redacted}}
    {"op": "forget", "what": str, "everywhere": bool}     -> {"event": "done", "forgotten": {anchors, told}}
    {"op": "stop"}                                        -> {"event": "done"}, then the node leaves
    any                                                   -> {"event": "error", "kind": "UsageError", "message": "..."}

While it works on a request and has nothing to say, a node sends {"event": "working"} every few seconds: whoever hears nothing
at all talks to a frozen process.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

from kvcomm_p2p import errors
from kvcomm_p2p.errors import InternalError, KVCommError, TransportError, UsageError
from kvcomm_p2p.local_names import running_nodes, socket_path

REQUEST_BYTES_MAX = 4 << 20
"""Longest request line: enough for a prompt of any context that runs here."""

EVENT_BYTES_MAX = 16 << 20
CONNECT_TIMEOUT_S = 2.0
WORKING_S = 5.0
SILENCE_S = 30.0
"""A node says every WORKING_S that it works; one that says nothing for so long is given up."""


class NodeUnreachableError(TransportError):
    """A local node is still loading, did not answer in time, or ended before its answer was complete."""


def request(
    directory: Path, name: str, body: Mapping[str, Any], *, timeout_s: float = SILENCE_S
) -> Iterator[dict[str, Any]]:
    """Sends `body` to the local node `name` and yields its events, `done` last. Closing the iterator cancels the
    request.

    `timeout_s` bounds the wait for each sign of life. Raises UsageError for a name that does
    not run (listing those that do), NodeUnreachableError, and whatever the node answered as an error.
    """
    path = find_socket(directory, name)
    within_s = CONNECT_TIMEOUT_S
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(within_s)
        try:
            connection.connect(os.fspath(path))
            within_s = timeout_s
            connection.settimeout(within_s)
            connection.sendall(_request_line(body))
            with connection.makefile("rb") as lines:
                while True:
                    event = _event(name, lines.readline(EVENT_BYTES_MAX))
                    if event["event"] == "working":
                        continue
                    yield event
                    if event["event"] == "done":
                        return
        except TimeoutError as error:
            raise _no_answer(name, within_s) from error
        except OSError as error:
            raise _lost(name, error) from error


async def request_async(
    directory: Path, name: str, body: Mapping[str, Any], *, timeout_s: float = SILENCE_S
) -> AsyncIterator[dict[str, Any]]:
    """`request` for an event loop. Leaving the loop over it early needs `aclose()` to cancel at once."""
    path = find_socket(directory, name)
    within_s = CONNECT_TIMEOUT_S
    try:
        opening = asyncio.open_unix_connection(path, limit=EVENT_BYTES_MAX)
        reader, writer = await asyncio.wait_for(opening, within_s)
        within_s = timeout_s
        try:
            writer.write(_request_line(body))
            while True:
                event = _event(name, await asyncio.wait_for(reader.readline(), within_s))
                if event["event"] == "working":
                    continue
                yield event
                if event["event"] == "done":
                    return
        finally:
            writer.close()
    except (TimeoutError, asyncio.TimeoutError) as error:
        raise _no_answer(name, within_s) from error
    except OSError as error:
        raise _lost(name, error) from error


def find_socket(directory: Path, name: str) -> Path:
    """The socket of the live node `name`. Raises UsageError (listing the names that run) or NodeUnreachableError."""
    path = socket_path(directory, name)
    nodes = running_nodes(directory)
    if not any(node.socket == path for node in nodes):
        names = ", ".join(node.name for node in nodes)
        known = f"these run: {names}" if names else f"none runs; start one with `kvcomm node --name {name}`"
        raise UsageError(f"no node named {name!r} runs here ({known})")
    if not path.exists():
        raise NodeUnreachableError(f"node {name!r} is still loading its model: try again in a few seconds")
    return path


def _request_line(body: Mapping[str, Any]) -> bytes:
    line = json.dumps(body).encode() + b"\n"
    if len(line) > REQUEST_BYTES_MAX:
        raise UsageError(f"the request has {len(line):,} bytes, at most {REQUEST_BYTES_MAX:,} are allowed: shorten it")
    return line


def _event(name: str, line: bytes) -> dict[str, Any]:
    """Raises what an error event says."""
    if not line.endswith(b"\n"):
        raise NodeUnreachableError(f"node {name!r} ended before its answer was complete")
    event: dict[str, Any] = json.loads(line)
    if event["event"] != "error":
        return event
    kind = getattr(errors, str(event["kind"]), None)
    if isinstance(kind, type) and issubclass(kind, KVCommError):
        raise kind(event["message"])
    raise InternalError(f"node {name!r}: {event['message']}")


def _no_answer(name: str, waited_s: float) -> NodeUnreachableError:
    return NodeUnreachableError(f"node {name!r} did not answer within {waited_s:g} s: it is frozen or overloaded")


def _lost(name: str, error: OSError) -> OSError:
    """Our own errors are OSErrors too and pass unchanged."""
    if isinstance(error, KVCommError):
        return error
    return NodeUnreachableError(f"node {name!r} cannot be reached ({error.strerror or error}): it has just ended")
