"""A progress bar where there is a console, and nothing where there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

Step = Callable[[str], None]
"""Call it after each step; the text says what comes next."""


@contextmanager
def stepping(console: Console | None, title: str, steps: int) -> Iterator[Step]:
    """A bar of `steps` steps on `console` (None: silent), which disappears when the context ends."""
    if console is None:
        yield lambda text: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(title, total=steps)

        def step(text: str) -> None:
            progress.update(task, advance=1, description=f"{title}: {text}" if text else title)

        yield step
