"""What the demo shows: a live bar (plain lines where output is piped), then one table and the reasons."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from qmm.cli.check import Result


@dataclass
class Tally:
    """Results of one backend as they come.

    Attributes:
        label: the table's name for it, e.g. ``"triton (interpreter, slices)"``.
        total: layers that were to be run.
        device: where.
        left_out: why layers that were to be run were not.
    """

    label: str
    total: int
    device: str
    results: list[Result] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    @property
    def ran(self) -> list[Result]:
        """Results with an error to show."""
        return [r for r in self.results if r.ratio is not None]

    @property
    def wrong(self) -> list[Result]:
        """Results over the bound."""
        return [r for r in self.results if not r.passed]


class Step(Protocol):
    """What :func:`progress` gives."""

    def __call__(self, text: str, advance: int = 0) -> None:
        """Say what is at work, and how many layers have just been finished."""


@contextmanager
def progress(console: Console, total: int) -> Iterator[Step]:
    """A live bar on a terminal; one line each quarter otherwise."""
    if console.is_terminal:
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("", total=total)
            yield lambda text, advance=0: bar.update(task, description=text, advance=advance)
        return
    done = shown = 0

    def line(text: str, advance: int = 0) -> None:
        nonlocal done, shown
        done += advance
        if done * 4 // total > shown:
            shown = done * 4 // total
            console.print(Text(f"  {done} of {total}  {text}"))

    yield line


def print_table(console: Console, tallies: Sequence[Tally]) -> None:
    """One row a backend and kernel."""
    table = Table()
    for header in ("backend", "kernel", "device"):
        table.add_column(header)
    for header in ("layers", "worst error / bound", "time"):
        table.add_column(header, justify="right")
    for tally in tallies:
        for kernel in dict.fromkeys(r.kernel for r in tally.ran):
            mine = [r for r in tally.ran if r.kernel == kernel]
            worst = max(mine, key=_severity)
            style = "bold red" if any(not r.passed for r in mine) else ""
            seconds = sum(r.seconds for r in mine)
            cells = (f"{len(mine)} of {tally.total}", f"{worst.ratio:.3f}", f"{seconds:.2f} s")
            table.add_row(Text(tally.label), Text(kernel), tally.device, *cells, style=style)
    console.print(table)


def _severity(r: Result) -> float:
    return float("inf") if r.ratio is None or r.ratio != r.ratio else r.ratio


def print_reasons(console: Console, title: str, reasons: Mapping[str, Sequence[str]]) -> None:
    """``title`` and the reasons of each name, if there are any."""
    if not reasons:
        return
    console.print(Text(title))
    for name, lines in reasons.items():
        for line in lines:
            console.print(Text(f"  {name}: {line}"))
