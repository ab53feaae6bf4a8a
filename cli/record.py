"""`kvcomm record` and `kvcomm replay`: keep what a node lived through, and live it again."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvcomm_p2p.cli.outcome import ExitCode, guarded
from kvcomm_p2p.cli.output import counted, emit, stdout
from kvcomm_p2p.cli.peers import AsJson, ask
from kvcomm_p2p.cli.setup import load_settings
from kvcomm_p2p.errors import UsageError

if TYPE_CHECKING:
    from kvcomm_p2p.settings import Settings


def recorded(settings: Settings, to: Path | None, redact: bool) -> Settings:
    """The settings with a recording in the folder `to`, if any. Raises BadParameter for --redact without one."""
    if to is None:
        if redact and not settings.record_dir:
            raise typer.BadParameter("--redact goes with --record DIR")
        return replace(settings, record_redact=True) if redact else settings
    return replace(settings, record_dir=str(to.absolute()), record_redact=redact or settings.record_redact)


@guarded
def record(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A running node that was started with --record.")],
    to: Annotated[Path, typer.Option("--to", metavar="FILE", help="Where the copy goes; it must not exist yet.")],
    seconds: Annotated[
        float, typer.Option("--seconds", min=0.0, metavar="SECONDS", help="Wait so long before copying.")
    ] = 0.0,
    as_json: AsJson = False,
) -> None:
    """Copy the recording of a running node, from its start until now, to a file that can be replayed."""
    directory = load_settings().runtime_dir
    from kvcomm_p2p.net.recorder import copy_recording

    ask(directory, name, "recording")  # before waiting: whether there is one
    time.sleep(seconds)
    found = ask(directory, name, "recording")
    try:
        events = copy_recording(Path(found["path"]), to)
    except OSError as error:
        raise UsageError(
            f"{error.filename or to} cannot be used: {error.strerror or error}; choose another file"
        ) from error
    if as_json:
        emit({"path": str(to), "events": events, "redacted": found["redacted"]})
        return
    kept = "token ids are redacted" if found["redacted"] else "it holds token ids: do not give it away"
    stdout().print(f"{to} has {counted(events, 'event')} of {name}; {kept}", markup=False, soft_wrap=True)


@guarded
def replay(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A recording, by kvcomm record or --record.")],
    as_json: AsJson = False,
) -> None:
    """Give a fresh node the events of a recording, and check that it does exactly the same. Exit code 1 if it does not."""
    from kvcomm_p2p.net import recorder

    try:
        outcome = recorder.replay(recorder.read_recording(file))
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror or error}") from error
    same = outcome.differs_at is None
    if as_json:
        emit({"events": outcome.events, "same": same, "differs_at": outcome.differs_at, "end": outcome.end})
    else:
        end = "" if outcome.end else " (the file was cut off after them)"
        text = f"{counted(outcome.events, 'event')} gave the same effects{end}"
        stdout().print(text if same else f"{text}; event {outcome.differs_at:,} did not", markup=False, soft_wrap=True)
    raise typer.Exit(ExitCode.OK if same else ExitCode.USER)
