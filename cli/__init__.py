"""The `kvcomm` command: parses, calls, renders. Importing this costs nothing; typer and rich load in `main`."""

from __future__ import annotations

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line (default: sys.argv) and leaves the process with one of the exit codes of `docs/cli.md`."""
    try:
        from kvcomm_p2p.cli.app import app

        app(args=None if arguments is None else list(arguments), prog_name="kvcomm")
    except KeyboardInterrupt:
        # Before a command has begun to guard itself.
        raise SystemExit(130) from None
