"""The text that tells an operator what its ``parts`` are and who runs: plain, so that programs can be saved with it.

``<facts of the weight>;layout=<whose tensors, in order>;backend=triton;kernel=-``, see :mod:`qmm.weight.text` and
:func:`qmm.weight.store.layout_of`. Parsing is cached.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from qmm.weight import WeightSpec, text
from qmm.weight.store import groups_of


@dataclass(frozen=True)
class OpSpec:
    """A parsed spec.

    Attributes:
        weight: facts of the weight.
        fits_float16: whether all its values lie inside float16's range.
        even_groups: whether every group has its rows.
        layout: whose tensors ``parts`` are, in order: ``""`` for the canonical ones, else a backend's name.
        backend: who runs.
        kernel: the kernel that was asked for by name, or None.
    """

    weight: WeightSpec
    fits_float16: bool
    even_groups: bool
    layout: tuple[tuple[str, tuple[str, ...]], ...]
    backend: str
    kernel: str | None


def write(facts: str, layout: str, runner: str) -> str:
    """The spec of a weight with these facts and parts, to be run by ``runner`` (from :func:`runner_text`)."""
    return f"{facts};layout={layout};{runner}"


def runner_text(backend: str, kernel: str | None) -> str:
    """The part of a spec that says who runs."""
    return f"backend={backend};kernel={kernel or '-'}"


@lru_cache(maxsize=1024)
def parse(spec: str) -> OpSpec:
    """The inverse of :func:`write`.

    Raises:
        ValueError: it is none.
    """
    found = text.split(spec)
    missing = [name for name in ("layout", "backend", "kernel") if name not in found]
    if missing:
        raise ValueError(f"spec: must have {', '.join(missing)}; got {spec!r}")
    weight, fits, even = text.from_fields(found)
    kernel = None if found["kernel"] == "-" else found["kernel"]
    return OpSpec(weight, fits, even, tuple(groups_of(found["layout"])), found["backend"], kernel)
