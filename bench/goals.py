"""What qmm wants to reach on an H200 with int4, group 128, float16; and which points miss it.

Peers are the fastest of those timed or recorded; a share of the roof, where given, may stand in for the peer's rule.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class Row(Protocol):
    """What ``bench.report`` has of one point."""

    point: object
    dense: float | None
    dense_spread: float
    roof_us: float
    best: tuple[str, float] | None


@dataclass(frozen=True)
class Goal:
    """For up to ``rows`` rows: time at most ``peer`` of the best peer's, or at least ``roof`` of the roof.

    And at most ``dense`` of the dense matmul's time, from 1024 rows up within the spread of that.
    """

    rows: int
    peer: float | None
    roof: float | None
    dense: float | None


GOALS = (
    Goal(8, peer=0.75, roof=0.85, dense=None),
    Goal(32, peer=0.80, roof=0.80, dense=None),
    Goal(128, peer=0.90, roof=None, dense=0.95),
    Goal(512, peer=0.97, roof=0.93, dense=1.00),
    Goal(1 << 30, peer=None, roof=None, dense=1.00),  # and the geometric mean over peers at most LARGE_PEER
)
LARGE_ROWS, LARGE_PEER = 1024, 0.98


def missed(row: Row) -> list[str]:
    """The rules that a point breaks."""
    us, m = row.point.us, row.point.m  # type: ignore[attr-defined]
    goal = next(g for g in GOALS if m <= g.rows)
    found = []
    if goal.peer is not None and row.best is not None and us > goal.peer * row.best[1]:
        share = row.roof_us / us
        if goal.roof is None or share < goal.roof:
            either = "" if goal.roof is None else f", and {share:.0%} of the roof (goal {goal.roof:.0%})"
            found.append(f"{us / row.best[1]:.2f}x of {row.best[0]} (goal {goal.peer:.2f}){either}")
    slack = 1 + (row.dense_spread if m >= LARGE_ROWS else 0)
    if goal.dense is not None and row.dense is not None and us > goal.dense * row.dense * slack:
        found.append(f"{us / row.dense:.2f}x of dense (goal {goal.dense:.2f})")
    return found


def print_missed(rows: Sequence[Row]) -> None:
    """A line for each point that misses a goal, and the count."""
    bad = [(row, broken) for row in rows if (broken := missed(row))]
    for row, broken in bad:
        print(f"misses: {row.point.shape} M={row.point.m}: {'; '.join(broken)}")  # type: ignore[attr-defined]
    print(f"goals: {len(rows) - len(bad)} of {len(rows)} points reach theirs")
    large = [row for row in rows if row.point.m >= LARGE_ROWS and row.best is not None]  # type: ignore[attr-defined]
    if large:
        logs = [math.log(row.point.us / row.best[1]) for row in large]  # type: ignore[attr-defined,index]
        mean = math.exp(sum(logs) / len(logs))
        print(f"from M={LARGE_ROWS} up: geometric mean {mean:.3f} of the best peer (goal {LARGE_PEER})")
