"""The support table: what each kernel takes, printed from the backends' class data; the README holds this text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from qmm.backend import Backend, Kernel
from qmm.registry import TABLE, backends
from qmm.weight.spec import dtype_name

BEGIN, END = "<!-- support-table -->", "<!-- /support-table -->"
COLUMNS = (
    "kernel", "tier", "devices", "A", "bits", "zeros", "scales", "two-level", "codebook", "act-order", "group size",
    "M", "activations", "deterministic",
)  # fmt: skip
_SHORT = {
    "float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64",
    "float8_e4m3fn": "e4m3", "float8_e8m0fnu": "e8m0",
}  # fmt: skip


def support_rows(names: Iterable[str] | None = None) -> list[tuple[str, ...]]:
    """One row a kernel, in table order, with the cells of ``COLUMNS``.

    Args:
        names: backends to list; None means those of this repository (outside ones are no part of the README).
    """
    known = backends()
    chosen = [name for name, _ in TABLE] if names is None else names
    return [_row(known[name], kernel) for name in chosen for kernel in known[name].kernels]


def support_table(names: Iterable[str] | None = None) -> str:
    """The table as GitHub markdown, without a newline at its end."""
    lines = [COLUMNS, ("---",) * len(COLUMNS), *support_rows(names)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _row(backend: Backend, kernel: Kernel) -> tuple[str, ...]:
    x = kernel.limits
    return (
        f"{backend.name}.{kernel.name}",
        kernel.tier.name.lower(),
        "any" if x.devices is None else ", ".join(x.devices),
        ", ".join(_short(dtype_name(d)) for d in x.a_dtypes),
        _ranges(x.bits),
        ", ".join(str(k) for k in x.zero_kinds),
        ", ".join(_short(dtype_name(d)) for d in x.scale_dtypes),
        _yes(x.two_level_scales),
        _yes(x.codebook),
        _yes(x.act_order),
        "any" if x.group_sizes is None else ", ".join(map(str, x.group_sizes)),
        _rows_of_a(x.min_m, x.max_m),
        ", ".join(x.activations) or "none",
        ", ".join(str(d) for d in x.deterministic),
    )


def _short(name: str) -> str:
    return _SHORT.get(name, name)


def _yes(supported: bool) -> str:
    return "yes" if supported else "no"


def _rows_of_a(low: int, high: int | None) -> str:
    if high is None:
        return "any" if low <= 1 else f">= {low}"
    return f"{low} to {high}"


def _ranges(numbers: Sequence[int]) -> str:
    """``1-8`` for 1, 2, ..., 8; runs of three and more are shortened."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{r[0]}-{r[-1]}" if len(r) > 2 else ", ".join(map(str, r)) for r in runs)
