from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvcomm_p2p.errors import InternalError, UsageError
from kvcomm_p2p.local_api import REQUEST_BYTES_MAX, NodeUnreachableError, request, request_async
from kvcomm_p2p.local_names import claim_name, socket_path
from kvcomm_p2p.local_server import LocalServer


@asynccontextmanager
async def served(fakes: ModuleType, directory: Path, *, system: str = "") -> AsyncIterator[tuple[Any, LocalServer]]:
    claim = claim_name(directory, "planner")
    agent = fakes.Agent("planner", model="x", settings=None)
    await agent.start()
    server = LocalServer(agent, claim, system=system)
    await server.start()
    try:
        yield agent, server
    finally:
        await server.close()
        await agent.close()


async def events_of(directory: Path, body: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [event async for event in request_async(directory, "planner", body, timeout_s=10)]


def ask(prompt: Any, **rest: Any) -> dict[str, Any]:
    return {"op": "ask", "prompt": prompt, **rest}


def test_an_answer_streams_and_ends_with_the_reply(fake_agent: ModuleType, runtime_dir: Path) -> None:
    async def run() -> None:
        async with served(fake_agent, runtime_dir):
            events = await events_of(runtime_dir, ask("a {x} c", slots={"x": "b"}, sampling={"max_new_tokens": 9}))
            assert [event["text"] for event in events[:-1]] == ["a ", "b ", "c "]
            reply = events[-1]["reply"]
            assert reply["text"] == "a b c"
            assert reply["report"]["mode"] == "balanced"
            assert reply["report"]["spans"][0]["source"] == "planner"

    asyncio.run(run())


def test_the_blocking_client_sees_the_same(fake_agent: ModuleType, runtime_dir: Path) -> None:
    async def run() -> None:
        async with served(fake_agent, runtime_dir):
            events = await asyncio.to_thread(lambda: list(request(runtime_dir, "planner", ask("a b"), timeout_s=10)))
            assert [event["event"] for event in events] == ["text", "text", "done"]
            [status] = await events_of(runtime_dir, {"op": "status"})
            assert status["status"]["prompt_tokens"] == 2

    asyncio.run(run())


def test_the_node_s_system_prompt_is_added_unless_there_is_one(fake_agent: ModuleType, runtime_dir: Path) -> None:
    async def run() -> None:
        async with served(fake_agent, runtime_dir, system="Be brief."):
            texts = []
            for prompt in ("hi", [{"role": "user", "content": "hi"}], [{"role": "system", "content": "Own."}]):
                texts.append((await events_of(runtime_dir, ask(prompt)))[-1]["reply"]["text"])
            assert texts == ["system:Be brief. user:hi", "system:Be brief. user:hi", "system:Own."]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"op": "dance"}, "unknown op 'dance'"),
        ({}, "unknown op None"),
        (ask(7), "`prompt` must be"),
        (ask([{"role": "user"}]), "`prompt` must be"),
        (ask("hi", slots=["x"]), "`slots` must map"),
        (ask("hi", slots={"x": 1}), "`slots` must map"),
        (ask("hi", mode=3), "`mode` must be"),
        (ask("hi", sampling={"heat": 1}), "unknown sampling parameter 'heat': use max_new_tokens, temperature"),
        (ask("hi", sampling=3), "`sampling` must be"),
        ({"op": "compare", "prompt": "hi", "tokens": 0}, "`tokens` must be"),
        (ask("LONG"), "9,000 tokens"),
    ],
)
def test_wrong_requests_are_usage_errors(
    fake_agent: ModuleType, runtime_dir: Path, body: dict[str, Any], message: str
) -> None:
    async def run() -> None:
        async with served(fake_agent, runtime_dir):
            with pytest.raises(UsageError, match=message):
                await events_of(runtime_dir, body)
            assert (await events_of(runtime_dir, {"op": "status"}))[0]["event"] == "done"

    asyncio.run(run())


def test_a_bug_in_the_node_is_an_internal_error_and_the_node_lives_on(
    fake_agent: ModuleType, runtime_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        async with served(fake_agent, runtime_dir):
            with pytest.raises(InternalError, match="RuntimeError: a bug"):
                await events_of(runtime_dir, ask("CRASH"))
            assert (await events_of(runtime_dir, {"op": "status"}))[0]["event"] == "done"

    asyncio.run(run())
    assert "a local request failed" in caplog.text


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"not json\n", "not JSON"),
        (b"[1]\n", "not a JSON object"),
        (b"\xff\xfe\n", "not JSON"),
        (b"x" * (REQUEST_BYTES_MAX + 65536 * 4), "at most"),
    ],
)
def test_bytes_that_are_no_request_get_an_error_event(
    fake_agent: ModuleType, runtime_dir: Path, line: bytes, message: str
) -> None:
    def talk() -> dict[str, Any]:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(10)
            connection.connect(os.fspath(socket_path(runtime_dir, "planner")))
            with suppress(ConnectionError):  # the server may close before it has read everything
                connection.sendall(line)
            answer: dict[str, Any] = json.loads(connection.makefile().readline())
            return answer

    async def run() -> None:
        async with served(fake_agent, runtime_dir):
            event = await asyncio.to_thread(talk)
            assert event["kind"] == "UsageError"
            assert message in event["message"]

    asyncio.run(run())


def test_the_client_refuses_to_send_too_much(fake_agent: ModuleType, runtime_dir: Path) -> None:
    async def run() -> None:
        async with served(fake_agent, runtime_dir):
            with pytest.raises(UsageError, match="shorten it"):
                await events_of(runtime_dir, ask("x" * REQUEST_BYTES_MAX))

    asyncio.run(run())


def test_closing_the_connection_cancels_the_request(fake_agent: ModuleType, runtime_dir: Path) -> None:
    async def run() -> None:
        async with served(fake_agent, runtime_dir) as (agent, _):
            events = request_async(runtime_dir, "planner", ask("SLOW " + "word " * 500))
            assert (await anext_of(events))["event"] == "text"
            await events.aclose()  # type: ignore[attr-defined]
            for _ in range(500):
                if agent.cancelled:
                    break
                await asyncio.sleep(0.01)
            assert agent.cancelled == 1

    asyncio.run(run())


def test_closing_the_server_ends_requests_and_tells_the_client(fake_agent: ModuleType, runtime_dir: Path) -> None:
    async def run() -> None:
        async with served(fake_agent, runtime_dir) as (_, server):
            events = request_async(runtime_dir, "planner", ask("SLOW " + "word " * 500))
            await anext_of(events)
            await server.close()
            with pytest.raises(NodeUnreachableError, match="ended before"):
                while True:
                    await anext_of(events)
        assert list(runtime_dir.iterdir()) == []

    asyncio.run(run())


def test_stop_is_answered_and_announced(fake_agent: ModuleType, runtime_dir: Path) -> None:
    async def run() -> None:
        async with served(fake_agent, runtime_dir) as (_, server):
            assert await events_of(runtime_dir, {"op": "stop"}) == [{"event": "done"}]
            await asyncio.wait_for(server.wait_stop_requested(), 5)

    asyncio.run(run())


def test_a_node_that_works_says_so_and_the_client_goes_on_waiting(
    fake_agent: ModuleType, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcomm_p2p.local_server.WORKING_S", 0.01)

    async def run() -> None:
        async with served(fake_agent, runtime_dir) as (_, server):
            reader, writer = await asyncio.open_unix_connection(server._claim.socket)
            writer.write(json.dumps(ask("SLOW one two three")).encode() + b"\n")
            told = [json.loads(line)["event"] async for line in reader]
            writer.close()
            assert "working" in told and told[-1] == "done"
            events = [e async for e in request_async(runtime_dir, "planner", ask("SLOW one two three"), timeout_s=5)]
            assert {event["event"] for event in events} == {"text", "done"}
            answers = await asyncio.to_thread(
                lambda: list(request(runtime_dir, "planner", ask("SLOW one two three"), timeout_s=5))
            )
            assert answers == events

    asyncio.run(run())


def test_a_silent_node_does_not_hold_the_client(runtime_dir: Path) -> None:
    claim = claim_name(runtime_dir, "planner")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.fspath(claim.socket))
        listener.listen()
        with pytest.raises(NodeUnreachableError, match=r"within 0\.05 s"):
            list(request(runtime_dir, "planner", {"op": "status"}, timeout_s=0.05))
    claim.release()


def test_unknown_and_loading_nodes_are_told_apart(runtime_dir: Path) -> None:
    with pytest.raises(UsageError, match="none runs; start one with `kvcomm node --name planner`"):
        list(request(runtime_dir, "planner", {"op": "status"}))
    claim = claim_name(runtime_dir, "coder")
    with pytest.raises(UsageError, match="these run: coder"):
        list(request(runtime_dir, "planner", {"op": "status"}))
    with pytest.raises(NodeUnreachableError, match="still loading"):
        list(request(runtime_dir, "coder", {"op": "status"}))
    claim.release()


def test_the_socket_is_private(fake_agent: ModuleType, runtime_dir: Path) -> None:
    async def run() -> None:
        async with served(fake_agent, runtime_dir):
            assert socket_path(runtime_dir, "planner").stat().st_mode & 0o777 == 0o600

    asyncio.run(run())


def test_another_user_is_refused(fake_agent: ModuleType, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with served(fake_agent, runtime_dir):
            monkeypatch.setattr("kvcomm_p2p.local_server._peer_uid", lambda writer: os.geteuid() + 1)
            with pytest.raises(NodeUnreachableError):
                await events_of(runtime_dir, {"op": "status"})

    asyncio.run(run())


async def anext_of(events: AsyncIterator[dict[str, Any]]) -> dict[str, Any]:
    return await asyncio.wait_for(events.__anext__(), 10)
