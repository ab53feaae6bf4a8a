"""`kvcomm model`: getting models and listing those that are here."""

from __future__ import annotations

import typer

models = typer.Typer(help="Get models and list those that are here.", no_args_is_help=True)
