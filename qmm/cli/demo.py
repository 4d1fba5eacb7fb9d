"""``qmm demo``: every layer of a model on every backend usable here, against the gguf package and float64."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.text import Text

import qmm
from qmm.cli import smollm2
from qmm.cli.check import Result, check_blocks
from qmm.cli.emulated import BUDGET_SECONDS, EMULATORS, ChildError, kinds_of_layers, run_child
from qmm.cli.report import Step, Tally, print_reasons, print_table, progress
from qmm.formats.gguf import GGUFFile, read

_SHOWN_TENSORS = 8  # tensors of unsupported types that are listed one by one


class DemoError(Exception):
    """What the user can put right; shown as one line."""


@dataclass
class _Plan:
    native: list[str] = field(default_factory=list)
    emulated: list[str] = field(default_factory=list)
    unusable: dict[str, list[str]] = field(default_factory=dict)


def run(
    console: Console, model: Path | None, names: Sequence[str], limit: int | None, rows: int, dtype: str
) -> bool:
    """Run the demo and print it.

    Args:
        model: GGUF file, or None for the default one.
        names: backends; empty means all.
        limit: only the first so many layers.
        rows: rows of A.
        dtype: name of A's dtype.

    Returns:
        Whether something ran and every layer was within the bound.

    Raises:
        DemoError: a missing model or package, an unreadable file, an unknown backend.
    """
    started = time.perf_counter()
    file = _open(model)
    layers = list(file)[:limit]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    plan = _plan(names)
    _print_model(console, file, layers, rows, dtype)
    slices = kinds_of_layers(layers)
    native = {name: Tally(name, len(layers), device) for name in plan.native}
    emulated = {
        name: Tally(f"{name} ({EMULATORS[name].label}, slices)", len(slices), "cpu") for name in plan.emulated
    }
    failures: dict[str, list[str]] = {}
    total = (len(layers) if native else 0) + len(slices) * len(emulated)
    with progress(console, max(1, total)) as step:
        if native:
            _run_native(file, layers, native, rows, dtype, device, step)
        for name, tally in emulated.items():
            _run_emulated(name, file.path, slices, dtype, tally, plan, failures, step)
    tallies = [*native.values(), *emulated.values()]
    print_table(console, tallies)
    refused = {t.label: list(dict.fromkeys(s for r in t.results for s in r.reasons)) for t in tallies}
    print_reasons(console, "Layers refused:", {k: v for k, v in refused.items() if v})
    print_reasons(console, "Left out:", {t.label: t.left_out for t in tallies if t.left_out})
    print_reasons(console, "Not usable natively here:", plan.unusable)
    print_reasons(console, "Failed:", failures)
    wrong = {
        t.label: [f"{r.layer}: {r.ratio:.3g} times the bound" for r in t.wrong] for t in tallies if t.wrong
    }
    print_reasons(console, "Over the bound:", wrong)
    ran = sum(len(t.ran) for t in tallies)
    passed = ran > 0 and not wrong and not failures
    verdict = "all within the numerics bound" if passed else "FAILED" if ran else "FAILED: no layer ran"
    console.print(Text(f"{ran} products in {time.perf_counter() - started:.1f} s: {verdict}"))
    return passed


def _open(model: Path | None) -> GGUFFile:
    path = smollm2.find_model() if model is None else model
    if path is None:
        raise DemoError(
            f"the default model is not installed: {smollm2.INSTALL} (or name a GGUF file with --model)"
        )
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise DemoError(f"the reference needs the gguf package ({error}): pip install 'qmm[gguf]'") from None
    try:
        file = read(path)
    except (OSError, qmm.WeightFormatError) as error:
        raise DemoError(str(error)) from None
    if not file.info:
        why = next(iter(file.unused.values()), "it holds no tensors")
        raise DemoError(
            f"{path}: no layer of a supported block type ({len(file.unused)} tensors; the first: {why})"
        )
    return file


def _plan(names: Sequence[str]) -> _Plan:
    known = qmm.backends()
    unknown = [name for name in names if name not in known]
    if unknown:
        raise DemoError(f"--backend must be one of {', '.join(known)}; got {', '.join(unknown)}")
    plan = _Plan()
    for name in dict.fromkeys(names or known):
        backend = known[name]
        reasons = backend.environment()
        if not reasons and not backend.emulated:
            plan.native.append(name)
            continue
        plan.unusable[name] = [str(r) for r in reasons] or [
            f"runs under the {backend.emulated} in this environment"
        ]
        if name in EMULATORS and not torch.cuda.is_available():
            plan.emulated.append(name)
    return plan


def _run_native(
    file: GGUFFile,
    layers: list[str],
    tallies: dict[str, Tally],
    rows: int,
    dtype: str,
    device: str,
    step: Step,
) -> None:
    for layer in layers:
        step(f"{', '.join(tallies)}  {layer}")
        results = check_blocks(
            file.blocks(layer),
            file.info[layer].qtype,
            layer,
            list(tallies),
            rows=rows,
            dtype=getattr(torch, dtype),
            device=device,
        )
        for result in results:
            tallies[result.backend].results.append(result)
        step(f"{', '.join(tallies)}  {layer}", advance=1)


def _run_emulated(
    name: str,
    model: Path,
    layers: list[str],
    dtype: str,
    tally: Tally,
    plan: _Plan,
    failures: dict[str, list[str]],
    step: Step,
) -> None:
    step(tally.label)
    try:
        for event in run_child(name, model, layers, dtype):
            if isinstance(event.get("reasons"), list):
                # the child knows best: what is missing even when emulated
                plan.unusable[name] = [str(r) for r in event["reasons"]]  # type: ignore[attr-defined]
            elif "left_out" in event:
                tally.left_out = [
                    f"{event['left_out']} slices, past the time limit of {BUDGET_SECONDS:.0f} s"
                ]
            elif isinstance(event.get("result"), dict):
                result = Result(**event["result"])  # type: ignore[arg-type]
                tally.results.append(result)
                step(f"{tally.label}  {result.layer}", advance=1)
    except ChildError as error:
        failures[tally.label] = [str(error)]


def _print_model(console: Console, file: GGUFFile, layers: list[str], rows: int, dtype: str) -> None:
    info = [file.info[name] for name in layers]
    types = ", ".join(f"{count} {qtype}" for qtype, count in Counter(i.qtype for i in info).most_common())
    weights = sum(i.in_features * i.out_features for i in info)
    console.print(
        Text(f"{file.path.name}: {len(layers)} layers ({types}), {weights / 1e6:.1f} million weights")
    )
    console.print(Text(f"A: {rows} rows of {dtype}. Reference: gguf.quants.dequantize and a float64 product"))
    plain = [name for name, why in file.unused.items() if why.startswith("not quantised")]
    other = {name: why for name, why in file.unused.items() if name not in plain}
    console.print(
        Text(f"Not multiplied: {len(plain)} tensors that are not quantised, {len(other)} unsupported")
    )
    for name in list(other)[:_SHOWN_TENSORS]:
        console.print(Text(f"  {name}: {other[name]}"))
    if len(other) > _SHOWN_TENSORS:
        console.print(Text(f"  and {len(other) - _SHOWN_TENSORS} more"))
