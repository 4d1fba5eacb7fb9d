"""``qmm bench``: a quick grid on this machine against the dense matmul; a table, a JSON file and a picture."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from qmm.cli.choices import Dtype
from qmm.cli.consoles import make_console
from qmm.cli.failing import failing

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from qmm.timing import Failed, Measured, Point, Problem, Results, Roof

GPU_SHAPES, GPU_ROWS = "4096x4096,4096x14336", "1,2,4,8,16,32,64,128,256,512,1024,4096"
CPU_SHAPES, CPU_ROWS = "256x256,512x256", "1,4,16"
CPU_REPLAYS = 5
HEADERS = ("K x N", "M", "dense us", "us", "times faster", "% of roof", "spread", "kernel")
DENSE = "torch.mm"


def bench(
    shapes: Annotated[
        Optional[str],  # noqa: UP045  # typer evaluates it, on Python 3.10 too
        typer.Option(help=f"K x N; by default {GPU_SHAPES} on a GPU, and tiny ones on a CPU."),
    ] = None,
    rows: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Numbers of rows of A, e.g. 1,16,256."),
    ] = None,
    bits: Annotated[int, typer.Option(min=1, max=8, help="Bits of a code.")] = 4,
    group_size: Annotated[int, typer.Option(min=1, help="Rows of K that share a scale.")] = 128,
    zeros: Annotated[bool, typer.Option("--zeros", help="Integer zero points; symmetric without.")] = False,
    dtype: Annotated[Dtype, typer.Option(help="Dtype of A.")] = Dtype.FLOAT16,
    kernel: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            help="Time this kernel, e.g. triton.tiled (repeat for several); by default what auto chooses."
        ),
    ] = None,
    seconds: Annotated[float, typer.Option(min=0, help="What is not begun by then is left out.")] = 60.0,
    out: Annotated[Path, typer.Option(help="The JSON file; the picture lies beside it.")] = Path(
        "qmm-bench.json"
    ),
    as_json: Annotated[
        bool,
        typer.Option("--json", help="The saved file's text on standard output, in the place of the table."),
    ] = False,
) -> None:
    """Time qmm.matmul against torch.mm with float weights: cold weights on a GPU, plain wall time on a CPU.

    Saves a JSON file and a PNG with the time and the share of the roof against M (the picture needs matplotlib).
    ``python -m bench.report`` in a checkout of the project prints and draws such a file too.

    Exit code 0: timed; 1: nothing could be timed; 2: bad input.
    """
    with failing("bench", ValueError, OSError):
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
        asked = _problems(shapes or (GPU_SHAPES if device == "cuda" else CPU_SHAPES), bits, group_size, zeros)
        counts = _numbers("--rows", rows or (GPU_ROWS if device == "cuda" else CPU_ROWS))
        console = make_console(stderr=as_json)
        results = _run(console, asked, counts, getattr(torch, dtype.value), device, kernel or [], seconds)
        results.save(out)
        if as_json:
            typer.echo(out.read_text(), nl=False)
        console.print(f"saved {out}", markup=False, soft_wrap=True)
        if results.points:
            console.print(_picture(results, out.with_suffix(".png")), markup=False, soft_wrap=True)
    raise typer.Exit(0 if results.points else 1)


def _numbers(option: str, text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise ValueError(f"{option}: must be positive integers with commas between; got {text!r}")
    return found


def _problems(shapes: str, bits: int, group_size: int, zeros: bool) -> list[dict[str, Any]]:
    found = []
    for shape in shapes.split(","):
        k, _, n = shape.partition("x")
        try:
            found.append({"k": int(k), "n": int(n), "bits": bits, "group_size": group_size, "zeros": zeros})
        except ValueError:
            raise ValueError(f"--shapes: must be K x N, e.g. 4096x14336,8192x8192; got {shape!r}") from None
        if min(found[-1]["k"], found[-1]["n"]) < 1:
            raise ValueError(f"--shapes: K and N must be positive; got {shape!r}")
    return found


def _run(
    console: Console,
    asked: list[dict[str, Any]],
    counts: list[int],
    dtype: Any,
    device: str,
    kernels: list[str],
    seconds: float,
) -> Results:
    from rich.text import Text

    from qmm.timing import Dense, Problem, Quantised, Results, contest, known_roof, measure_roof
    from qmm.timing.results import this_machine

    deadline = time.monotonic() + seconds
    contestants = [Dense(), *([Quantised(_known(name)) for name in kernels] or [Quantised()])]
    machine = this_machine(device)
    roof = known_roof(machine["device"]) or measure_roof(device)
    say = console.print
    say(Text(f"{machine['device']}: roof {_rates(roof)} ({roof.source})"))
    if device == "cpu":
        say(Text("No GPU: tiny shapes, and the times say nothing about one."))
    options = {"rounds": 2} if device == "cuda" else {"rounds": 1, "replays": CPU_REPLAYS, "idle": 0.0}
    results = Results(machine, roof, how=f"qmm bench: {options}")
    with _Lines(console, len(asked) * len(counts) * (len(contestants) - 1)) as lines:
        for facts in asked:
            problem: Problem = Problem(dtype=dtype, device=device, **facts)
            for found in contest(problem, contestants, counts, deadline=deadline, **options):
                lines.add(_line(found, results.add(found), results))
    return results


def _known(kernel: str) -> str:
    import qmm

    known = [f"{b.name}.{k.name}" for b in qmm.backends().values() for k in b.kernels]
    if kernel not in known:
        raise ValueError(f"--kernel: must be one of {', '.join(known)}; got {kernel!r}")
    return kernel


def _rates(roof: Roof) -> str:
    return f"{roof.bytes_per_s / 1e9:.4g} GB/s, {roof.flops_per_s / 1e9:.4g} GFLOP/s"


def _line(found: Measured | Failed, point: Point | None, results: Results) -> tuple[str, ...] | None:
    """Cells of a row; None for the dense matmul, which stands in the rows of the others."""
    shape, m = found.problem.shape, "all" if found.m is None else str(found.m)
    if point is None:
        why = str(results.left_out[-1]["why"])
        return (shape, m, "", "", "", "", "", f"{found.contestant} left out: {why}")
    if point.contestant == DENSE:
        return None
    dense = next(
        (p.us for p in results.points if p.contestant == DENSE and (p.shape, p.m) == (point.shape, point.m)),
        None,
    )
    return (
        shape,
        m,
        "" if dense is None else f"{dense:.1f}",
        f"{point.us:.1f}",
        "" if dense is None else f"{dense / point.us:.2f}",
        f"{100 * point.roof_seconds(results.roof) / point.us * 1e6:.0f}",
        f"{100 * (point.spread or 0):.0f}%",
        point.kernel,
    )


class _Lines:
    """A table that grows on a terminal; a line each where output is piped."""

    WIDTHS = (13, 5, 9, 9, 12, 9, 7, 0)

    def __init__(self, console: Console, total: int) -> None:
        from rich.live import Live

        self.console, self.total, self.rows = console, total, list[tuple[str, ...]]()
        self.live = Live(console=console, auto_refresh=False) if console.is_terminal else None

    def __enter__(self) -> _Lines:
        if self.live is not None:
            self.live.start()
        else:
            self._print(HEADERS)
        return self

    def __exit__(self, *_: object) -> None:
        if self.live is not None:
            self.live.update(self._table(), refresh=True)
            self.live.stop()

    def add(self, cells: tuple[str, ...] | None) -> None:
        """Show a row."""
        if cells is None:
            return
        self.rows.append(cells)
        if self.live is None:
            self._print(cells)
        else:
            self.live.update(self._table(f"{len(self.rows)} of {self.total}"), refresh=True)

    def _print(self, cells: tuple[str, ...]) -> None:
        text = "  ".join(
            cell.ljust(width) if i in (0, len(cells) - 1) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, self.WIDTHS, strict=True))
        )
        self.console.print(text.rstrip(), markup=False, soft_wrap=True)

    def _table(self, caption: str | None = None) -> Table:
        from rich.table import Table
        from rich.text import Text

        table = Table(caption=caption)
        for i, header in enumerate(HEADERS):
            table.add_column(header, justify="left" if i in (0, len(HEADERS) - 1) else "right")
        for row in self.rows:
            table.add_row(*map(Text, row))
        return table


def _picture(results: Results, path: Path) -> str:
    """Draw it, and say where it is; or what it needs."""
    from qmm.timing.draw import INSTALL, two

    curves: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for point in sorted(results.points, key=lambda p: p.m):
        mine = curves.setdefault(point.shape, {})
        mine.setdefault(point.contestant, []).append((point.m, point.us))
        mine.setdefault("roof", []).append((point.m, point.roof_seconds(results.roof) * 1e6))
    p = results.points[0]
    try:
        two(curves, path, f"{results.machine['device']}, int{p.bits}, group {p.group_size}, {p.dtype}")
    except ImportError as error:
        return f"no picture: it needs matplotlib ({error}): {INSTALL}"
    return f"drew {path}"
