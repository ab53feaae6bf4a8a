"""How a command ends: exit codes, and errors as one sentence on stderr."""

from __future__ import annotations

import enum
import functools
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import typer

from kvcomm_p2p.cli.output import stderr
from kvcomm_p2p.errors import CancelledByCaller, KVCommError
from kvcomm_p2p.local_api import NodeUnreachableError


class ExitCode(enum.IntEnum):
    """Documented in docs/cli.md. `USAGE` is typer's own for arguments that do not parse."""

    OK = 0
    USER = 1
    USAGE = 2
    PARTIAL = 3
    INTERNAL = 70
    INTERRUPTED = 130


class PartialError(Exception):
    """Part of what was asked for worked; the rest is said in the message."""


Command = TypeVar("Command", bound=Callable[..., Any])


def guarded(command: Command) -> Command:
    """Turns what a command raises into an exit code and one sentence; a traceback appears for our own bugs only."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except (typer.Exit, typer.BadParameter):
            raise
        except BrokenPipeError:
            # The reader of our output (`| head`) had enough: not an error, and nobody is left to tell.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(ExitCode.OK) from None
        except (NodeUnreachableError, PartialError) as error:
            fail(str(error), ExitCode.PARTIAL)
        except (KeyboardInterrupt, CancelledByCaller):
            fail("interrupted", ExitCode.INTERRUPTED)
        except KVCommError as error:
            fail(str(error), ExitCode.USER)
        except Exception as error:
            stderr().print(traceback.format_exc(), markup=False, highlight=False)
            fail(f"internal error, please report it: {type(error).__name__}: {error}", ExitCode.INTERNAL)

    return run  # type: ignore[return-value]


def fail(message: str, code: ExitCode) -> NoReturn:
    """Says `message` on stderr and leaves with `code`."""
    prefix = "" if code is ExitCode.INTERRUPTED else "error: "
    stderr().print(f"{prefix}{message}", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(code)
