"""One weight, many numbers of rows: every contestant checked, then all timed in turn."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from qmm.timing.clock import IDLE, REPLAYS, Sampler, Taken, alternate, ring_size, sampler
from qmm.timing.contestant import Contestant, Multiply
from qmm.timing.problem import Problem

CHECKED_ROWS = 64
_FLOOR = 2.0**-20  # of the emulation's error, where rounding happens to be exact or the dtype is float32


@dataclass(frozen=True)
class Measured:
    """One contestant at one number of rows.

    Attributes:
        error: relative, in the Frobenius norm, against a float32 product with W exact.
        facts: see :meth:`Contestant.facts`.
    """

    contestant: str
    problem: Problem
    m: int
    taken: Taken
    error: float
    facts: dict[str, str]


@dataclass(frozen=True)
class Failed:
    """One that did not take part, or was wrong; ``m`` is None where that holds for every number of rows."""

    contestant: str
    problem: Problem
    m: int | None
    why: str


class _Reference:
    """W of one dtype and its exact values, for the check."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.w = problem.weight()
        self._exact = self.w.dequantize(torch.float32)

    def rows(self, m: int) -> tuple[Tensor, Tensor, float]:
        """A, the exact product of its first rows, and the relative error of a correct kernel there."""
        a = self.problem.rows(m)
        head = a[:CHECKED_ROWS].float()
        exact = head @ self._exact
        rounded = (head @ self._exact.to(a.dtype).float()).to(a.dtype)
        return a, exact, max(relative_error(rounded, exact), _FLOOR)


def relative_error(got: Tensor, exact: Tensor) -> float:
    """``|got - exact| / |exact|`` in the Frobenius norm."""
    return float((got.float() - exact).norm() / exact.norm())


def contest(
    problem: Problem,
    contestants: Sequence[Contestant],
    rows: Sequence[int],
    *,
    rounds: int = 2,
    replays: int = REPLAYS,
    idle: float = IDLE,
    deadline: float = float("inf"),
) -> Iterator[Measured | Failed]:
    """Time ``contestants`` at each of ``rows``, in turn, each after its result was checked.

    Args:
        problem: the weight.
        contestants: those that cannot take part come out as :class:`Failed`, with the reason.
        rows: the numbers of rows of A.
        rounds: turns of each contestant at a number of rows.
        replays: samples a turn.
        idle: seconds before each turn.
        deadline: in ``time.monotonic()``; what is not begun by then is :class:`Failed`.
    """
    references: dict[torch.dtype, _Reference] = {}
    rings: dict[str, tuple[Contestant, Problem, list[Multiply]]] = {}
    for one in contestants:
        mine = one.problem(problem)
        reason = one.why_not(mine) or ("" if time.monotonic() < deadline else "no time left")
        if not reason:
            if mine.dtype not in references:
                references[mine.dtype] = _Reference(mine)
            count = ring_size(one.bytes_each(mine), mine.device)
            try:
                rings[one.name] = (one, mine, one.copies(mine, references[mine.dtype].w, count))
            except Exception as error:  # a peer may fail in any way; the others go on
                reason = f"{type(error).__name__}: {error}"
        if reason:
            yield Failed(one.name, mine, None, reason)
    for m in rows:
        if time.monotonic() >= deadline:
            yield from (Failed(name, mine, m, "no time left") for name, (_, mine, _) in rings.items())
            continue
        yield from _point(rings, references, m, rounds, replays, idle)


def _point(
    rings: dict[str, tuple[Contestant, Problem, list[Multiply]]],
    references: dict[torch.dtype, _Reference],
    m: int,
    rounds: int,
    replays: int,
    idle: float,
) -> Iterator[Measured | Failed]:
    samplers: dict[str, Sampler] = {}
    found: dict[str, tuple[Problem, float, dict[str, str]]] = {}
    expected = {dtype: reference.rows(m) for dtype, reference in references.items()}
    for name, (one, mine, ring) in rings.items():
        w, (a, exact, normal) = references[mine.dtype].w, expected[mine.dtype]
        reason = one.why_not_rows(mine, w, a)
        if not reason:
            try:
                error = relative_error(ring[0](a)[:CHECKED_ROWS], exact)
                if error <= one.bound * normal:
                    samplers[name] = sampler([partial(run, a) for run in ring], mine.device)
                    found[name] = (mine, error, one.facts(mine, w, a))
                else:
                    reason = f"wrong: relative error {error:.1e}, and rounding alone gives {normal:.1e}"
            except Exception as failure:
                reason = f"{type(failure).__name__}: {failure}"
        if reason:
            yield Failed(name, mine, m, reason)
    for name, taken in alternate(samplers, rounds=rounds, replays=replays, idle=idle).items():
        mine, error, facts = found[name]
        yield Measured(name, mine, m, taken, error, facts)
