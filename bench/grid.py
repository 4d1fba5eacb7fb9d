"""The grid: every shape, every number of rows, every contestant, in one process and within a time limit.

    python -m bench.grid --out grid.json --seconds 500
    python -m bench.grid --contestants torch.mm,qmm --shapes 8192x8192 --rows 1,8,64
    python -m bench.grid --host only
    python -m bench.report grid.json --goals --pictures .

Writes the file after each shape, so that a run cut short leaves what it has. ``--help`` lists the options; in the
weights of ``--group-size 64 --zeros`` the zero points are integers. ``--contestants`` takes ``torch.mm``, ``qmm``,
``qmm-dependent`` (QMM_DEPENDENT_LAUNCH=1), any kernel (``triton.tiled``) and the names in ``bench/peers.py``.
"""

from __future__ import annotations

import argparse
import functools
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

import qmm
from bench.peers import PEERS
from qmm.timing import (
    Contestant,
    Dense,
    Problem,
    Quantised,
    Results,
    contest,
    host_seconds,
    known_roof,
    measure_roof,
)
from qmm.timing.contestant import Multiply
from qmm.timing.results import this_machine
from qmm.weight import QuantizedWeight

GPU_SHAPES = "4096x4096,4096x6144,14336x4096,4096x28672,8192x8192,28672x8192,8192x57344"
GPU_ROWS = "1,2,4,8,16,32,48,64,128,256,512,1024,2048,4096,8192"
CPU_SHAPES, CPU_ROWS = "256x128,128x64", "1,16"
DEFAULT = "torch.mm,qmm,humming,tinygemm"
HOST_SIDE = 1024  # K and N of the call whose host time is taken, at one row


@contextmanager
def dependent_launch() -> Iterator[None]:
    """QMM_DEPENDENT_LAUNCH=1 inside."""
    before = os.environ.get("QMM_DEPENDENT_LAUNCH")
    os.environ["QMM_DEPENDENT_LAUNCH"] = "1"
    try:
        yield
    finally:
        os.environ.pop("QMM_DEPENDENT_LAUNCH")
        if before is not None:
            os.environ["QMM_DEPENDENT_LAUNCH"] = before


class Dependent(Quantised):
    """qmm with dependent launch: each call of the ring overlaps the one before it."""

    def __init__(self) -> None:
        super().__init__()
        self.name = "qmm-dependent"

    def copies(self, problem: Problem, w: QuantizedWeight, count: int) -> list[Multiply]:
        """See the base class; the variable is read when a call is first planned for a weight."""

        def within(run: Multiply, a: Tensor) -> Tensor:
            with dependent_launch():
                return run(a)

        return [functools.partial(within, run) for run in super().copies(problem, w, count)]

    def facts(self, problem: Problem, w: QuantizedWeight, a: Tensor) -> dict[str, str]:
        """See the base class."""
        with dependent_launch():
            return super().facts(problem, w, a)


def contestant(name: str) -> Contestant:
    """By its name on the command line.

    Raises:
        ValueError: there is none of that name.
    """
    own = {"torch.mm": Dense, "qmm": Quantised, "qmm-dependent": Dependent, **PEERS}
    kernels = {f"{b.name}.{k.name}" for b in qmm.backends().values() for k in b.kernels}
    if name in own:
        return own[name]()
    if name in kernels:
        return Quantised(name)
    raise ValueError(f"contestants: must be of {', '.join([*own, *sorted(kernels)])}; got {name!r}")


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    gpu = torch.cuda.is_available()
    out = Path(os.environ.get("OUT", ".")) / "grid.json"
    parser = argparse.ArgumentParser("python -m bench.grid", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--contestants", default=DEFAULT, help=f"default {DEFAULT}")
    add("--shapes", default=GPU_SHAPES if gpu else CPU_SHAPES, help="K x N, e.g. 4096x4096,8192x8192")
    add("--rows", default=GPU_ROWS if gpu else CPU_ROWS, help="numbers of rows of A")
    add("--bits", type=int, default=4)
    add("--group-size", type=int, default=128)
    add("--zeros", action="store_true", help="integer zero points; symmetric without")
    add("--dtype", default="float16", choices=("float16", "bfloat16", "float32"))
    add("--seconds", type=float, default=500, help="what is not begun by then is left out")
    add("--rounds", type=int, default=2, help="turns of each contestant at a point")
    add("--replays", type=int, default=5, help="samples a turn")
    add("--idle", type=float, default=0.25 if gpu else 0.0, help="seconds before each turn")
    add("--max-flop", type=float, default=float("inf"), help="leave out points with more operations")
    add("--out", type=Path, default=out, help="by default grid.json in $OUT")
    add("--host", choices=("yes", "no", "only"), default="yes", help="the host time of an eager call too")
    return parser.parse_args(arguments)


def host_times(
    contestants: Sequence[Contestant], device: str, dtype: torch.dtype
) -> Iterator[tuple[str, float]]:
    """Microseconds that one eager call keeps the host busy, by contestant."""
    problem = Problem(HOST_SIDE, HOST_SIDE, dtype=dtype, device=device)
    for one in contestants:
        mine = one.problem(problem)
        if one.why_not(mine):
            continue
        w, a = mine.weight(), mine.rows(1)
        if one.why_not_rows(mine, w, a):
            continue
        (run,) = one.copies(mine, w, 1)
        yield one.name, round(host_seconds(functools.partial(run, a), device) * 1e6, 2)


def main(arguments: Sequence[str] | None = None) -> int:
    """Time, print a line a point, save."""
    start = time.monotonic()
    o = options(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    contestants = [contestant(name) for name in o.contestants.split(",")]
    machine = this_machine(device)
    roof = known_roof(machine["device"]) or measure_roof(device)
    print(
        f"{machine['device']}: roof {roof.bytes_per_s / 1e9:.4g} GB/s, {roof.flops_per_s / 1e9:.4g} GFLOP/s "
        f"({roof.source})",
        flush=True,
    )
    how = f"bench.grid: {o.rounds} rounds of {o.replays} replays, {o.idle} s of idle before each, cold ring"
    results = Results(machine, roof, how=how)
    if device == "cuda" and o.host != "no":  # on a CPU the call is all there is
        for name, us in host_times(contestants, device, getattr(torch, o.dtype)):
            results.host_us[name] = us
            print(f"host time of an eager call, K=N={HOST_SIDE} M=1: {name} {us:.1f} us", flush=True)
    for shape in [] if o.host == "only" else o.shapes.split(","):
        k, n = map(int, shape.split("x"))
        problem = Problem(k, n, o.bits, o.group_size, o.zeros, getattr(torch, o.dtype), device)
        rows = [m for m in map(int, o.rows.split(",")) if problem.flops(m) <= o.max_flop]
        for found in contest(
            problem,
            contestants,
            rows,
            rounds=o.rounds,
            replays=o.replays,
            idle=o.idle,
            deadline=start + o.seconds,
        ):
            point = results.add(found)
            where = f"{shape:12s} M={'all' if found.m is None else found.m!s:5s} {found.contestant:14s}"
            if point is None:
                print(f"{where} left out: {results.left_out[-1]['why'][:200]}", flush=True)
            else:
                share = point.roof_seconds(roof) / point.us * 1e6
                print(
                    f"{where} {point.us:9.2f} us  spread {point.spread:5.1%}  roof {share:4.0%}  "
                    f"error {point.error:.1e}  {point.kernel} {point.config}",
                    flush=True,
                )
        results.save(o.out)
        if device == "cuda":
            torch.cuda.empty_cache()
    results.save(o.out)
    print(f"{o.out}: {len(results.points)} points in {time.monotonic() - start:.0f} s")
    return 0 if results.points or results.host_us else 1


if __name__ == "__main__":
    raise SystemExit(main())
