"""The server side of the local API (see `kvcomm_p2p.local_api` for the protocol)."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import struct
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kvcomm_p2p.errors import KVCommError, TransportError, UsageError
from kvcomm_p2p.local_api import REQUEST_BYTES_MAX, WORKING_S
from kvcomm_p2p.local_names import NameClaim

if TYPE_CHECKING:
    from kvcomm_p2p.agent import Agent
    from kvcomm_p2p.forgetting import Forgotten
    from kvcomm_p2p.model.decoding import Sampling
    from kvcomm_p2p.report import PrefillReport
    from kvcomm_p2p.watching import Watch

REQUEST_WAIT_S = 5.0
COMPARE_TOKENS_DEFAULT = 32

WATCH_OPS: dict[str, Callable[[Watch], Any]] = {
    "peers": lambda watch: watch.peers(),
    "inspect": lambda watch: watch.inspect(),
    "metrics": lambda watch: watch.metrics_text(),
    "recording": lambda watch: watch.recording(),
}
"""Questions without parameters; each is answered under its own name."""

_log = logging.getLogger(__name__)


class LocalServer:
    """Serves one agent on the socket of `claim` (see `claim_name`), which it releases when closed.

    `system` (if any) becomes the system message of asked messages that have none. Start the agent before `start()`.
    """

    def __init__(self, agent: Agent, claim: NameClaim, *, system: str = "") -> None:
        self._agent = agent
        self._claim = claim
        self._system = system
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._stop_requested = asyncio.Event()

    async def start(self) -> None:
        """Has the system prompt computed, then listens. Raises TransportError if the socket cannot be made."""
        if self._system:
            with suppress(UsageError):  # a model without a chat template, say: asking will tell
                await self._agent.warm([{"role": "system", "content": self._system}])
        path = self._claim.socket
        try:
            self._server = await asyncio.start_unix_server(self._connected, path, limit=REQUEST_BYTES_MAX)
            path.chmod(0o600)
        except OSError as error:
            raise TransportError(f"cannot listen on {path} ({error.strerror}): check KVCOMM_RUNTIME_DIR") from error

    async def wait_stop_requested(self) -> None:
        """Returns once somebody sent `stop`."""
        await self._stop_requested.wait()

    async def close(self) -> None:
        """Cancels what is in flight, stops listening and gives the name back. Calling it again does nothing."""
        if self._server is not None:
            self._server.close()
            for task in self._connections:
                task.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)
            self._server = None
        self._claim.release()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            if _peer_uid(writer) == os.geteuid():
                await self._answer(reader, writer)
            else:
                _log.warning("refused a local connection of another user")
        except (ConnectionError, asyncio.CancelledError):
            pass  # the caller went away, or the node is closing: nobody is left to tell
        finally:
            self._connections.discard(task)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            request = await _read_request(reader)
            work = asyncio.create_task(self._run(request, writer))
            gone = asyncio.create_task(_until_closed(reader))
            try:
                while not (await asyncio.wait({work, gone}, timeout=WORKING_S, return_when=asyncio.FIRST_COMPLETED))[0]:
                    await _send(writer, {"event": "working"})
            finally:
                gone.cancel()
                if not work.done():
                    work.cancel()
            await work
        except KVCommError as error:
            await _send(writer, {"event": "error", "kind": type(error).__name__, "message": str(error)})
        except ConnectionError:
            raise
        except Exception as error:
            _log.exception("a local request failed")
            message = f"{type(error).__name__}: {error} (the node's log has the traceback)"
            await _send(writer, {"event": "error", "kind": "InternalError", "message": message})

    async def _run(self, request: Mapping[str, Any], writer: asyncio.StreamWriter) -> None:
        op = request.get("op")
        if op == "ask":
            await self._ask(request, writer)
        elif op == "status":
            await _send(writer, {"event": "done", "status": self._agent.status().as_dict()})
        elif op == "compare":
            await self._compare(request, writer)
        elif op == "explain":
            await _send(writer, {"event": "done", "report": (await self._explained(request)).as_dict()})
        elif op in WATCH_OPS:
            answer = await asyncio.to_thread(WATCH_OPS[op], self._agent.watch())
            await _send(writer, {"event": "done", op: answer})
        elif op == "forget":
            await _send(writer, {"event": "done", "forgotten": asdict(await self._forgotten(request))})
        elif op == "stop":
            await _send(writer, {"event": "done"})
            self._stop_requested.set()
        else:
            known = ", ".join(sorted({"ask", "status", "compare", "explain", "forget", "stop", *WATCH_OPS}))
            raise UsageError(f"unknown op {op!r}: use one of {known}")

    async def _ask(self, request: Mapping[str, Any], writer: asyncio.StreamWriter) -> None:
        stream = self._agent.stream(
            self._prompt(request),
            slots=_slots(request),
            mode=_mode(request),
            sampling=_sampling(request),
        )
        try:
            async for piece in stream:
                if isinstance(piece, str):
                    await _send(writer, {"event": "text", "text": piece})
                else:
                    await _send(writer, {"event": "done", "reply": piece.as_dict()})
        finally:
            close = getattr(stream, "aclose", None)
            if close is not None:
                await close()

    async def _compare(self, request: Mapping[str, Any], writer: asyncio.StreamWriter) -> None:
        tokens = request.get("tokens", COMPARE_TOKENS_DEFAULT)
        if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
            raise UsageError(f"`tokens` must be a whole number from 1, not {tokens!r}")
        from kvcomm_p2p.evaluation.compare import compare

        comparison = await compare(self._agent, self._prompt(request), _slots(request), tokens)
        await _send(writer, {"event": "done", "comparison": comparison})

    async def _explained(self, request: Mapping[str, Any]) -> PrefillReport:
        if request.get("last") is not True:
            return await self._agent.explain(self._prompt(request), slots=_slots(request), mode=_mode(request))
        report = self._agent.last_report
        if report is None:
            raise UsageError(f"node {self._agent.name!r} has had no request yet: ask it something first")
        return report

    async def _forgotten(self, request: Mapping[str, Any]) -> Forgotten:
        what, everywhere = request.get("what"), request.get("everywhere", False)
        if not isinstance(what, str) or not isinstance(everywhere, bool):
            raise UsageError("`what` must be a text, `everywhere` true or false")
        return await self._agent.forget(what, everywhere=everywhere)

    def _prompt(self, request: Mapping[str, Any]) -> str | list[dict[str, Any]]:
        prompt = request.get("prompt")
        if isinstance(prompt, str):
            if not self._system:
                return prompt
            prompt = [{"role": "user", "content": prompt}]
        if not isinstance(prompt, list) or not all(_is_message(message) for message in prompt):
            raise UsageError('`prompt` must be a text or a list of {"role": text, "content": text}')
        if self._system and not any(message["role"] == "system" for message in prompt):
            return [{"role": "system", "content": self._system}, *prompt]
        return prompt


async def _read_request(reader: asyncio.StreamReader) -> dict[str, Any]:
    try:
        line = await asyncio.wait_for(reader.readline(), REQUEST_WAIT_S)
    except ValueError as error:
        raise UsageError(f"a request may have at most {REQUEST_BYTES_MAX:,} bytes: shorten it") from error
    except (TimeoutError, asyncio.TimeoutError) as error:
        raise UsageError(f"no request within {REQUEST_WAIT_S:g} s: send one JSON object and a newline") from error
    try:
        body = json.loads(line)
    except ValueError as error:
        raise UsageError("the request is not JSON: send one JSON object and a newline") from error
    if not isinstance(body, dict):
        raise UsageError("the request is not a JSON object")
    return body


async def _until_closed(reader: asyncio.StreamReader) -> None:
    with suppress(ConnectionError):
        while await reader.read(4096):
            pass


async def _send(writer: asyncio.StreamWriter, event: Mapping[str, Any]) -> None:
    writer.write(json.dumps(event, ensure_ascii=False, default=_plain).encode() + b"\n")
    await writer.drain()


def _plain(value: Any) -> Any:
    """Dataclasses and NumPy scalars, for JSON. Raises TypeError for anything else."""
    if hasattr(value, "as_dict"):
        return value.as_dict()
    if hasattr(value, "__dataclass_fields__"):
        return asdict(value)
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"{type(value).__name__} has no JSON form")


def _peer_uid(writer: asyncio.StreamWriter) -> int:
    connection = writer.get_extra_info("socket")
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _pid, uid, _gid = struct.unpack("3i", credentials)
    return int(uid)


def _is_message(message: object) -> bool:
    return (
        isinstance(message, dict) and isinstance(message.get("role"), str) and isinstance(message.get("content"), str)
    )


def _slots(request: Mapping[str, Any]) -> dict[str, str] | None:
    slots = request.get("slots")
    if slots is None:
        return None
    if not isinstance(slots, dict) or not all(isinstance(text, str) for text in slots.values()):
        raise UsageError("`slots` must map names to texts")
    return slots or None


def _mode(request: Mapping[str, Any]) -> str:
    mode = request.get("mode", "balanced")
    if not isinstance(mode, str):
        raise UsageError(f"`mode` must be a text, not {mode!r}")
    return mode


def _sampling(request: Mapping[str, Any]) -> Sampling | None:
    fields = request.get("sampling")
    if fields is None:
        return None
    from kvcomm_p2p.model.decoding import Sampling

    if not isinstance(fields, dict):
        raise UsageError("`sampling` must be an object")
    unknown = sorted(set(fields) - set(Sampling.__dataclass_fields__))
    if unknown:
        raise UsageError(
            f"unknown sampling parameter {unknown[0]!r}: use {', '.join(sorted(Sampling.__dataclass_fields__))}"
        )
    try:
        return Sampling(**fields)
    except TypeError as error:
        raise UsageError(f"sampling parameters of a wrong type: {error}") from error
