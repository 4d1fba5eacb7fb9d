"""A file of times: where and how they were taken, and one point for each contestant, weight and number of rows.

Points hold microseconds, and facts from which everything else follows; shares and ratios are computed when shown.
"""

from __future__ import annotations

import json
import platform
import time
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from qmm.devices import read
from qmm.timing.contest import Failed, Measured
from qmm.timing.problem import Problem
from qmm.timing.roof import Roof
from qmm.weight.spec import dtype_name

SCHEMA = "qmm-times-1"
_PACKAGES = ("qmm", "torch", "triton", "numba-cuda", "humming-kernels", "gemlite", "torchao", "bitsandbytes")


@dataclass(frozen=True)
class Point:
    """One time.

    Attributes:
        us: median microseconds a call.
        spread: largest over smallest sample, less 1; None where it was not kept.
        error: relative error that the check found; None where it was not kept.
        kernel: what ran, for qmm.
    """

    contestant: str
    k: int
    n: int
    m: int
    us: float
    bits: int = 4
    group_size: int = 128
    zeros: bool = False
    dtype: str = "float16"
    spread: float | None = None
    error: float | None = None
    kernel: str = ""
    config: str = ""

    @property
    def shape(self) -> str:
        """``"4096x6144"``, K first."""
        return f"{self.k}x{self.n}"

    @property
    def problem(self) -> Problem:
        """The weight."""
        return Problem(self.k, self.n, self.bits, self.group_size, self.zeros, getattr(torch, self.dtype))

    def roof_seconds(self, roof: Roof) -> float:
        """The least time for the quantised weight, whatever the contestant reads."""
        return roof.seconds(self.problem.moved(self.m), self.problem.flops(self.m))


@dataclass
class Results:
    """Points with their circumstances; ``left_out`` says who did not take part, and why."""

    machine: dict[str, str]
    roof: Roof
    points: list[Point] = field(default_factory=list)
    left_out: list[dict[str, Any]] = field(default_factory=list)
    host_us: dict[str, float] = field(default_factory=dict)
    how: str = ""

    def add(self, found: Measured | Failed) -> Point | None:
        """Keep what the contest gave."""
        p = found.problem
        facts: dict[str, Any] = {"k": p.k, "n": p.n, "bits": p.bits, "group_size": p.group_size}
        facts |= {"zeros": p.zeros, "dtype": dtype_name(p.dtype)}
        if isinstance(found, Failed):
            self.left_out.append({"contestant": found.contestant, **facts, "m": found.m, "why": found.why})
            return None
        point = Point(
            found.contestant,
            m=found.m,
            us=round(found.taken.seconds * 1e6, 3),
            spread=round(found.taken.spread, 4),
            error=float(f"{found.error:.3g}"),
            **facts,
            kernel=found.facts.get("kernel", ""),
            config=found.facts.get("config", ""),
        )
        self.points.append(point)
        return point

    def save(self, path: Path) -> None:
        """Write JSON, one point a line."""
        head = {"schema": SCHEMA, "machine": self.machine, "how": self.how, "roof": asdict(self.roof)}
        rest = {"host_us": self.host_us, "left_out": self.left_out}
        lines = ",\n  ".join(json.dumps(_short(point)) for point in self.points)
        text = json.dumps(head, indent=1)[:-2] + ',\n "points": [\n  ' + lines + "\n ],\n"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + json.dumps(rest, indent=1)[2:] + "\n")

    @staticmethod
    def load(path: Path) -> Results:
        """Read what :meth:`save` wrote.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is no such file.
        """
        try:
            read = json.loads(path.read_text())
        except ValueError as error:
            raise ValueError(f"{path}: must be JSON; {error}") from None
        if not isinstance(read, dict) or read.get("schema") != SCHEMA:
            got = read.get("schema") if isinstance(read, dict) else type(read).__name__
            raise ValueError(f"{path}: schema: must be {SCHEMA!r}; got {got!r}")
        return Results(
            read["machine"],
            Roof(**read["roof"]),
            [Point(**point) for point in read["points"]],
            read["left_out"],
            read["host_us"],
            read["how"],
        )


def _short(point: Point) -> dict[str, Any]:
    """Without what was not kept."""
    return {key: value for key, value in asdict(point).items() if value not in (None, "")}


def this_machine(device: torch.device | str) -> dict[str, str]:
    """Device, versions and time."""
    device = torch.device(device)
    found = {"device": read(device).name}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    found["python"] = platform.python_version()
    found["taken"] = time.strftime("%Y-%m-%d %H:%M")
    return found
