"""The control of `bench cluster latency`: what plain sockets do under the same load, in as many processes.

One process echoes on one TCP connection while threads of it send bytes on two others as fast as they go; two read those; one
asks. Nothing of ours runs in them, so what they show is the machine's: its scheduler and its network stack.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from kvcomm_p2p.child_processes import own_group
from kvcomm_p2p.evaluation.cluster_node import die_with_parent

BUFFER_BYTES = 256 * 1024
QUESTION_BYTES = 64
END_S = 5.0


def round_trips(questions: int, interval_s: float) -> list[float]:
    """Seconds of each of so many questions, one every `interval_s`, while bytes flow. The caller makes the rest of the load."""
    with _process("serve") as server, ExitStack() as readers:
        port = json.loads(server.stdout.readline())  # type: ignore[union-attr]
        for _ in range(2):
            readers.enter_context(_process("read", port))
        with _process("ask", port, questions, interval_s) as asker:
            seconds: list[float] = json.loads(asker.stdout.readline())  # type: ignore[union-attr]
        return seconds


@contextmanager
def _process(role: str, *arguments: float) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", __name__, str(os.getpid()), role, *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **own_group())
    try:
        yield process
    finally:
        process.kill()
        process.wait(END_S)
        process.stdout.close()  # type: ignore[union-attr]


def _serve() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    _say(listener.getsockname()[1])
    while True:
        connection, _ = listener.accept()
        role = connection.recv(1)
        threading.Thread(target=_send if role == b"r" else _echo, args=(connection,), daemon=True).start()


def _send(connection: socket.socket) -> None:
    data = bytes(BUFFER_BYTES)
    with suppress(OSError):
        while True:
            connection.sendall(data)


def _echo(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with suppress(OSError):
        while question := connection.recv(QUESTION_BYTES):
            connection.sendall(question)


def _read(port: int) -> None:
    connection = socket.create_connection(("127.0.0.1", port))
    connection.sendall(b"r")
    buffer = bytearray(BUFFER_BYTES)
    while connection.recv_into(buffer):
        pass


def _ask(port: int, questions: int, interval_s: float) -> None:
    connection = socket.create_connection(("127.0.0.1", port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(b"a")
    seconds: list[float] = []
    for _ in range(questions):
        time.sleep(interval_s)
        started = time.perf_counter()
        connection.sendall(bytes(QUESTION_BYTES))
        left = QUESTION_BYTES
        while left:
            left -= len(connection.recv(left))
        seconds.append(time.perf_counter() - started)
    _say(seconds)


def _say(answer: object) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Plays one of the parts until the process that started it ends."""
    die_with_parent(int(sys.argv[1]))
    role, numbers = sys.argv[2], sys.argv[3:]
    if role == "serve":
        _serve()
    elif role == "read":
        _read(int(numbers[0]))
    else:
        _ask(int(numbers[0]), int(numbers[1]), float(numbers[2]))


if __name__ == "__main__":
    main()
