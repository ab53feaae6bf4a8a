"""TCP relays that can fall silent without closing anything: how a peer looks whose machine lost power or network."""

from __future__ import annotations

import contextlib
import math
import socket
import threading
from collections.abc import Sequence


class Relays:
    """Listen on `host` at each of `ports` and pass everything on to 127.0.0.1 at the same port. A context manager.

    Silent, no byte gets through any of them, and no connection is closed; new ones are accepted and stay dumb.
    """

    def __init__(self, host: str, ports: Sequence[int]) -> None:
        self._servers = [socket.create_server((host, port)) for port in ports]
        self._sockets: list[socket.socket] = []
        self._left = math.inf
        self._lock = threading.Lock()
        for server, port in zip(self._servers, ports, strict=True):
            threading.Thread(target=self._accept, args=(server, port), daemon=True).start()

    def __enter__(self) -> Relays:
        return self

    def __exit__(self, *_: object) -> None:
        for each in (*self._servers, *self._sockets):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def fall_silent(self, after_bytes: int = 0) -> None:
        """Once so many more bytes got through, in both directions together."""
        with self._lock:
            self._left = after_bytes

    @property
    def silent(self) -> bool:
        return self._left <= 0

    def _accept(self, server: socket.socket, port: int) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = server.accept()
                self._sockets.append(near)
                if self.silent:
                    continue
                far = socket.create_connection(("127.0.0.1", port))
                self._sockets.append(far)
                for source, target in ((near, far), (far, near)):
                    threading.Thread(target=self._pass_on, args=(source, target), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while content := source.recv(1 << 18):
                if self.silent:
                    return
                with self._lock:
                    self._left -= len(content)
                target.sendall(content)
            if not self.silent:
                target.shutdown(socket.SHUT_WR)
