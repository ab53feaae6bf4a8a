"""Runs a program that a model wrote, in a process of its own with little time, little memory and no place to write.

That is a limit for accidents, not a sandbox against malice: the program can read what this user can read and reach the
network. It runs only where somebody asked for it.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import tempfile

TIMEOUT_S = 10.0
CPU_S = 5
MEMORY_BYTES = 1 << 30
FILE_BYTES = 0

_LIMITER = """
import resource, sys
cpu_s, memory_bytes, file_bytes, token = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
del sys.argv[1:]
source = sys.stdin.read()
for limit, value in (
    (resource.RLIMIT_CPU, cpu_s), (resource.RLIMIT_AS, memory_bytes), (resource.RLIMIT_FSIZE, file_bytes),
    (resource.RLIMIT_CORE, 0),
):
    resource.setrlimit(limit, (value, value))
real, sys.stdout, sys.stderr = sys.stdout, None, None
exec(compile(source, "completion", "exec"), {"__name__": "__main__"})
real.write(token)
real.flush()
"""
"""A completion that ends the process before its test is over never gets to the token."""


def passes(source: str, timeout_s: float = TIMEOUT_S) -> bool:
    """Whether a module runs to its end without an exception, in an empty folder, with an empty environment.

    Limits: `timeout_s` of time, CPU_S of computing, MEMORY_BYTES of address space, no file of more than FILE_BYTES.
    Children that it started end with it, as far as they stayed in its session. What it prints is lost.
    """
    token = secrets.token_hex(16)
    command = [sys.executable, "-I", "-c", _LIMITER, str(CPU_S), str(MEMORY_BYTES), str(FILE_BYTES), token]
    with tempfile.TemporaryDirectory(prefix="kvcomm-code-") as folder:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={},
            start_new_session=True,
            text=True,
            encoding="utf-8",
            errors="replace",
        )
        try:
            said, _ = process.communicate(source, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return False
        finally:
            _end(process)
    return process.returncode == 0 and said == token


def _end(process: subprocess.Popen[str]) -> None:
    """The process and what it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        process.kill()
    process.communicate()
