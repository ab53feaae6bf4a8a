"""`kvcomm model`: getting models and listing those that are here."""

from __future__ import annotations

from typing import Annotated

import typer

from kvcomm_p2p.cli.outcome import guarded

models = typer.Typer(help="Get models and list those that are here.", no_args_is_help=True)
