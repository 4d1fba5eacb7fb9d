"""How a command fails: one line on standard error and an exit code; ``qmm --debug`` gives the traceback instead."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import typer

from qmm.cli import USAGE_ERROR

debugging: ContextVar[bool] = ContextVar("qmm_debugging", default=False)  # set by qmm --debug


@contextmanager
def failing(command: str, *kinds: type[Exception]) -> Iterator[None]:
    """Within the block, errors of these kinds are the user's to repair: one line, exit code 2."""
    try:
        yield
    except kinds as error:
        if debugging.get():
            raise
        lines = str(error).splitlines() or [type(error).__name__]
        typer.echo(f"qmm {command}: {lines[0]}", err=True)
        for line in lines[1:]:  # reasons, one a line
            typer.echo(line, err=True)
        raise typer.Exit(USAGE_ERROR) from None
