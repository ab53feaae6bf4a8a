"""Running `kvcomm` as a user does: in processes, with its own runtime directory, against a fake agent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

FAKES = Path(__file__).parent / "fakes"
PATIENCE_S = 60.0


class Process:
    """A `kvcomm` process whose output is read line by line."""

    def __init__(self, arguments: Sequence[str], environment: dict[str, str], *, session: bool = True) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "kvcomm_p2p.cli", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            start_new_session=session,
        )
        self.lines: list[str] = []
        self.ready: dict[str, Any] = {}

    def wait_for(self, event: str, count: int = 1) -> list[dict[str, Any]]:
        """Reads until `count` JSON events of this kind have come."""
        assert self.popen.stdout is not None
        found: list[dict[str, Any]] = []
        for line in self.popen.stdout:
            self.lines.append(line)
            if line.startswith("{") and json.loads(line)["event"] == event:
                found.append(json.loads(line))
                if len(found) == count:
                    return found
        raise AssertionError(f"ended before {event!r} came {count} times: {''.join(self.lines)}")

    def interrupt(self, number: int = signal.SIGINT) -> int:
        """Sends a signal and returns the exit code."""
        self.popen.send_signal(number)
        return self.finish()

    def finish(self) -> int:
        assert self.popen.stdout is not None
        self.lines += self.popen.stdout.readlines()
        return self.popen.wait(PATIENCE_S)

    def close(self) -> None:
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait()
        assert self.popen.stdout is not None
        self.popen.stdout.close()


class Kvcomm:
    """`kvcomm …` in a fresh runtime directory; with real agents, each computes on one core."""

    def __init__(self, runtime_dir: Path, *, fakes: bool = True) -> None:
        self.runtime_dir = runtime_dir
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(FAKES) if fakes else "",
            "KVCOMM_RUNTIME_DIR": str(runtime_dir),
            "KVCOMM_STATE_DIR": str(runtime_dir / "state"),
            **({} if fakes else {"OMP_NUM_THREADS": "1"}),
        }
        self._started: list[Process] = []

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Runs to the end."""
        return subprocess.run(
            [sys.executable, "-m", "kvcomm_p2p.cli", *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env={**self.environment, **environment},
            timeout=PATIENCE_S,
            check=False,
        )

    def start(self, *arguments: str, **environment: str) -> Process:
        """Starts and returns at once; ended with the test."""
        process = Process(arguments, {**self.environment, **environment})
        self._started.append(process)
        return process

    def node(self, name: str, *arguments: str, **environment: str) -> Process:
        """A node that is ready."""
        process = self.start("node", "--name", name, "--json", *arguments, **environment)
        process.ready = process.wait_for("ready")[0]
        return process

    def close(self) -> None:
        for process in self._started:
            process.close()


def eventually(condition: Callable[[], bool], *, within_s: float = PATIENCE_S) -> bool:
    """Whether `condition` comes true in time."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


def is_alive(pid: int) -> bool:
    """Whether a process runs (zombies do not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
