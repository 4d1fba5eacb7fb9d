"""Who takes part: what multiplies by a weight. Here the dense matmul and qmm's kernels; peers are in bench/."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

import qmm
from qmm.call import make_call
from qmm.timing.problem import Problem
from qmm.weight import QuantizedWeight

Multiply = Callable[[Tensor], Any]

OWN_BOUND = 1.5  # times the error of rounding W once: the numerics contract (docs/numerics.md)
PEER_BOUND = 4.0  # others may round scales or partial sums too


class Contestant(abc.ABC):
    """One way to multiply by a quantised weight.

    Attributes:
        name: in tables and files.
        bound: relative error allowed, in units of that of a correct emulation.
    """

    name: str
    bound: float = PEER_BOUND
    dtype: ClassVar[torch.dtype | None] = None

    def problem(self, problem: Problem) -> Problem:
        """What this one computes where it cannot do just that: another dtype, in which case its result says so."""
        return problem

    def why_not(self, problem: Problem) -> str:
        """Why it cannot take part, and what would change that; empty where it can."""
        return ""

    def why_not_rows(self, problem: Problem, w: QuantizedWeight, a: Tensor) -> str:
        """The same for one A."""
        return ""

    @abc.abstractmethod
    def bytes_each(self, problem: Problem) -> int:
        """Bytes of one copy of the weight."""

    @abc.abstractmethod
    def copies(self, problem: Problem, w: QuantizedWeight, count: int) -> list[Multiply]:
        """``count`` multiplications of ``[M, K]`` by copies of ``w`` of their own: what makes them cold."""

    def facts(self, problem: Problem, w: QuantizedWeight, a: Tensor) -> dict[str, str]:
        """What ran: ``kernel`` and ``config``, where there is a choice."""
        return {}


class Dense(Contestant):
    """torch.mm with W in A's dtype: what a quantised matmul has to beat."""

    name = "torch.mm"
    bound = OWN_BOUND

    def bytes_each(self, problem: Problem) -> int:
        """Bytes of one copy of the weight."""
        return problem.dense_bytes()

    def copies(self, problem: Problem, w: QuantizedWeight, count: int) -> list[Multiply]:
        """See the base class."""
        dense = w.dequantize(problem.dtype)
        ring = [dense, *(dense.clone() for _ in range(count - 1))]
        return [lambda a, d=d: torch.mm(a, d) for d in ring]  # type: ignore[misc]


class Quantised(Contestant):
    """qmm.matmul: on the kernel that auto chooses, or on a forced one (``"triton.tiled"``)."""

    bound = OWN_BOUND

    def __init__(self, kernel: str | None = None) -> None:
        self.name = "qmm" if kernel is None else kernel
        self._options: dict[str, Any] = {}
        if kernel is not None:
            self._options = {"backend": kernel.split(".")[0], "kernel": kernel}

    def why_not_rows(self, problem: Problem, w: QuantizedWeight, a: Tensor) -> str:
        """The reasons of the forced kernel, or of all where none takes the call."""
        if self._options:
            backend = qmm.backends()[self._options["backend"]]
            kernel = next(k for k in backend.kernels if self.name == f"{backend.name}.{k.name}")
            return "; ".join(map(str, backend.why_not(make_call(a, w), kernel)))
        found = qmm.explain(a, w)
        return "" if found.backend else found.why

    def bytes_each(self, problem: Problem) -> int:
        """Bytes of one copy of the weight."""
        return problem.weight_bytes()

    def copies(self, problem: Problem, w: QuantizedWeight, count: int) -> list[Multiply]:
        """Released copies for auto, as a loaded model has them; a forced kernel finds, or makes, what it reads."""
        ring = [w.clone() for _ in range(count)]
        if not self._options:
            for copy in ring:
                qmm.prepare(copy, release=True)
        return [lambda a, x=x: qmm.matmul(a, x, **self._options) for x in ring]  # type: ignore[misc]

    def facts(self, problem: Problem, w: QuantizedWeight, a: Tensor) -> dict[str, str]:
        """See the base class."""
        found = qmm.explain(a, w, **self._options)
        return {"kernel": f"{found.backend}.{found.kernel}", "config": str(found.config)}
