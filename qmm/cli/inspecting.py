"""``qmm inspect``: what a checkpoint holds, layer by layer, and what is wrong with it."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

import qmm
from qmm.checkpoint import Checkpoint, LayerFacts
from qmm.cli.report import Step, progress
from qmm.weight import WeightSpec

# small models are read whole, so that their values are checked; of larger ones only the headers are
READ_BYTES = 64 << 20
_SHOWN_REASONS = 8  # tensors not used that are listed one by one, for each kind of reason


@dataclass
class Findings:
    """What was found.

    Attributes:
        layers: facts of each sound layer.
        broken: ``{layer: what is wrong}``.
        warned: ``{layer: what may be read in more than one way}``.
        values_read: layers whose values were checked, not their headers alone.
    """

    layers: dict[str, LayerFacts] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)
    warned: dict[str, list[str]] = field(default_factory=dict)
    values_read: int = 0


def run(console: Console, path: Path, prefix: str | None, as_json: bool, check: bool) -> bool:
    """Inspect and print.

    Args:
        path: see :func:`qmm.load`.
        prefix: only tensors whose names begin so.
        as_json: one JSON object in the place of the table.
        check: read every layer's values, however large the model.

    Returns:
        Whether nothing is wrong.

    Raises:
        OSError: a file cannot be opened.
        WeightFormatError: the whole cannot be opened.
    """
    checkpoint = qmm.load(path, prefix)
    whole = check or sum(map(checkpoint.nbytes, checkpoint)) <= READ_BYTES
    if whole and not as_json and len(checkpoint) > 1:
        with progress(console, len(checkpoint)) as step:
            found = examine(checkpoint, whole, step)
    else:
        found = examine(checkpoint, whole, lambda text, advance=0: None)
    if as_json:
        print(json.dumps(_as_json(checkpoint, found), indent=2))
    else:
        _print(console, checkpoint, found)
    return not found.broken and not _faults(checkpoint)


def examine(checkpoint: Checkpoint, whole: bool, step: Step) -> Findings:
    """Look at every layer; a broken one does not stop the rest."""
    found = Findings()
    for name in checkpoint:
        step(name)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                facts = checkpoint.facts(name)
                if whole:
                    facts = LayerFacts(facts.format, checkpoint[name].spec, facts.nbytes)
                    found.values_read += 1
                found.layers[name] = facts
            except qmm.WeightFormatError as error:
                found.broken[name] = str(error)
        if caught:
            found.warned[name] = list(dict.fromkeys(str(w.message) for w in caught))
        step(name, advance=1)
    return found


def plural(count: int, what: str) -> str:
    """``"1 layer"``, ``"2 layers"``."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def _zeros(s: WeightSpec) -> str:
    return str(s.zero_kind) if s.codebook_dtype is None else "codebook"


# column, right-aligned, cell
_COLUMNS: tuple[tuple[str, bool, Callable[[LayerFacts], object]], ...] = (
    ("format", False, lambda f: f.format),
    ("bits", True, lambda f: f.spec.bits),
    ("group", True, lambda f: f.spec.group_size),
    ("zeros", False, lambda f: _zeros(f.spec)),
    ("act-order", False, lambda f: "yes" if f.spec.act_order else "no"),
    ("K x N", True, lambda f: f"{f.spec.in_features} x {f.spec.out_features}"),
    ("MB", True, lambda f: f"{f.nbytes / 1e6:.2f}"),
)


def _faults(checkpoint: Checkpoint) -> dict[str, str]:
    """Tensors that are not used, and should be."""
    plain = set(checkpoint.plain)
    return {name: why for name, why in checkpoint.unused.items() if name not in plain}


def _print(console: Console, checkpoint: Checkpoint, found: Findings) -> None:
    _line(console, f"{checkpoint.path}: {checkpoint.method}")
    table = Table()
    table.add_column("layer", overflow="fold")
    for header, right, _ in _COLUMNS:
        table.add_column(header, justify="right" if right else "left", no_wrap=True)
    for name in checkpoint:
        if name in found.layers:
            facts = found.layers[name]
            table.add_row(Text(name), *(Text(str(cell(facts))) for _, _, cell in _COLUMNS))
        else:
            table.add_row(Text(name), Text("BROKEN"), style="bold red")
    if len(checkpoint):
        console.print(table)
    _print_totals(console, checkpoint, found)
    _print_unused(console, "Not quantised", {name: checkpoint.unused[name] for name in checkpoint.plain})
    _print_unused(console, "Not used, and should be", _faults(checkpoint))
    for name, lines in found.warned.items():
        for line in lines:
            _line(console, f"Warning: {line if name in line else f'{name}: {line}'}", "yellow")
    for line in found.broken.values():
        _line(console, f"Problem: {line}", "bold red")


def _line(console: Console, text: str, style: str = "") -> None:
    """Not wrapped: paths and messages stay whole for whoever copies or searches them."""
    console.print(Text(text), style=style, soft_wrap=True)


def _print_totals(console: Console, checkpoint: Checkpoint, found: Findings) -> None:
    layers = found.layers.values()
    weights = sum(f.spec.in_features * f.spec.out_features for f in layers)
    nbytes = sum(f.nbytes for f in layers)
    kinds = Counter(f"{f.spec.bits}-bit group {f.spec.group_size}" for f in layers).most_common()
    per = f", {8 * nbytes / weights:.2f} bits a weight" if weights else ""
    _line(
        console,
        f"{plural(len(checkpoint), 'layer')}, {weights / 1e6:.1f} million weights, {nbytes / 1e6:.1f} MB{per}"
        + (f" ({', '.join(f'{count} {kind}' for kind, count in kinds)})" if kinds else ""),
    )
    if found.values_read < len(found.layers):
        _line(console, "Headers checked; --check reads the values of every layer too.")
    wrong = len(found.broken) + len(_faults(checkpoint))
    _line(console, plural(wrong, "problem") if wrong else "No problem found.")


def _print_unused(console: Console, title: str, reasons: dict[str, str]) -> None:
    if not reasons:
        return
    _line(console, f"{title}: {plural(len(reasons), 'tensor')}")
    for name in list(reasons)[:_SHOWN_REASONS]:
        _line(console, f"  {name}: {reasons[name]}")
    if len(reasons) > _SHOWN_REASONS:
        _line(console, f"  and {len(reasons) - _SHOWN_REASONS} more (--json lists all)")


def _as_json(checkpoint: Checkpoint, found: Findings) -> dict[str, object]:
    layers = {
        name: {
            "format": f.format,
            "bits": f.spec.bits,
            "group_size": f.spec.group_size,
            "zeros": _zeros(f.spec),
            "act_order": f.spec.act_order,
            "in_features": f.spec.in_features,
            "out_features": f.spec.out_features,
            "nbytes": f.nbytes,
        }
        for name, f in found.layers.items()
    }
    return {
        "path": str(checkpoint.path),
        "method": checkpoint.method,
        "layers": layers,
        "problems": found.broken | _faults(checkpoint),
        "warnings": found.warned,
        "unused": checkpoint.unused,
        "values_read": found.values_read,
    }
