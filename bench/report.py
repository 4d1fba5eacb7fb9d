"""A saved grid as one table, and as pictures beside it.

    python -m bench.report bench/results/h200-2026-12-01.json --pictures docs/img

For each shape and number of rows: the dense matmul, qmm and its kernel, how many times faster that is, the best peer
(timed in the same run, or recorded in ``bench/data``), qmm over that peer, and the share of the roof. A recorded time
counts through the dense matmul, which moves by 8% between runs: ``peer * dense now / dense then``.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from qmm.timing import Point, Results
from qmm.timing.draw import ratios, times

RECORDED = {"H200": Path(__file__).parent / "data" / "h200-peers.json"}
OURS, DENSE = "qmm", "torch.mm"
COLUMNS = (
    "K x N", "M", "dense us", "qmm us", "dense / qmm", "best peer us", "qmm / peer", "roof", "spread", "kernel",
)  # fmt: skip
RIGHT = {"M", "dense us", "qmm us", "dense / qmm", "qmm / peer", "roof", "spread"}


@dataclass(frozen=True)
class Row:
    """One shape and number of rows; times in microseconds. ``peers``: as they would be in this run."""

    point: Point
    dense: float | None
    peers: dict[str, float]
    live: frozenset[str]
    roof_us: float
    dense_spread: float = 0.0

    @property
    def best(self) -> tuple[str, float] | None:
        """The fastest peer."""
        return min(self.peers.items(), key=lambda item: item[1]) if self.peers else None

    def cells(self) -> tuple[str, ...]:
        """As the table shows it."""
        p, best = self.point, self.best
        return (
            p.shape,
            str(p.m),
            "" if self.dense is None else f"{self.dense:.1f}",
            f"{p.us:.2f}",
            "" if self.dense is None else f"{self.dense / p.us:.2f}",
            "" if best is None else f"{best[0]} {best[1]:.1f}{'' if best[0] in self.live else ' (rec.)'}",
            "" if best is None else f"{p.us / best[1]:.2f}",
            f"{self.roof_us / p.us:.0%}",
            "" if p.spread is None else f"{p.spread:.0%}",
            p.kernel,
        )


def recorded_peers(results: Results) -> list[dict[str, object]]:
    """What ``bench/data`` has of this machine."""
    for name, path in RECORDED.items():
        if name in results.machine["device"]:
            found: list[dict[str, object]] = json.loads(path.read_text())
            return found
    return []


def rows_of(results: Results, ours: str = OURS) -> list[Row]:
    """A row for each point of ``ours``, in the order of the file."""
    live: dict[tuple, dict[str, Point]] = defaultdict(dict)
    for p in results.points:
        live[_key(p)][p.contestant] = p
    recorded: dict[tuple, list[dict]] = defaultdict(list)
    for r in recorded_peers(results):
        recorded[r["k"], r["n"], r["m"], r["bits"], r["group_size"], r["zeros"]].append(r)
    found = []
    for p in results.points:
        if p.contestant != ours:
            continue
        here = live[_key(p)]
        dense = here.get(DENSE)
        peers = {}
        for r in recorded[_key(p)[:-1]]:
            if r["dtype"] == p.dtype or r["peer"] == "tinygemm":  # which has bfloat16 alone
                scale = dense.us / r["dense_us"] if dense is not None and "dense_us" in r else 1.0
                peers[r["peer"]] = r["us"] * scale
        timed = {q.contestant: q.us for q in here.values() if not _own(q.contestant)}
        if p.dtype != "bfloat16":  # it is timed in bfloat16 beside the others' float16
            other = live.get(_key(replace(p, dtype="bfloat16")), {})
            timed |= {name: q.us for name, q in other.items() if name == "tinygemm"}
        found.append(
            Row(
                p,
                None if dense is None else dense.us,
                peers | timed,
                frozenset(timed),
                p.roof_seconds(results.roof) * 1e6,
                0.0 if dense is None or dense.spread is None else dense.spread,
            )
        )
    return found


def _key(p: Point) -> tuple:
    return p.k, p.n, p.m, p.bits, p.group_size, p.zeros, p.dtype


def _own(contestant: str) -> bool:
    return contestant == DENSE or contestant.startswith("qmm") or "." in contestant


def table(rows: Iterable[Row]) -> str:
    """Markdown."""
    lines = [COLUMNS, tuple("---:" if c in RIGHT else "---" for c in COLUMNS), *(row.cells() for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "| "
        + " | ".join(
            cell.rjust(w) if name in RIGHT else cell.ljust(w)
            for name, cell, w in zip(COLUMNS, line, widths, strict=True)
        )
        + " |"
        for line in lines
    )


def curves(rows: Sequence[Row]) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """``{shape: {contestant: [(rows of A, microseconds)]}}`` with the roof."""
    found: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for row in sorted(rows, key=lambda r: r.point.m):
        mine = found.setdefault(row.point.shape, defaultdict(list))
        mine[OURS].append((row.point.m, row.point.us))
        if row.dense is not None:
            mine[DENSE].append((row.point.m, row.dense))
        for name, us in row.peers.items():
            mine[name].append((row.point.m, us))
        mine["roof"].append((row.point.m, row.roof_us))
    return found


def pictures(results: Results, rows: Sequence[Row], folder: Path, stem: str) -> list[Path]:
    """Times for each shape; speed-up over the dense matmul; share of the roof."""
    device = results.machine["device"]
    p = rows[0].point
    kind = f"int{p.bits}, group {p.group_size}, {'integer zeros' if p.zeros else 'symmetric'}, {p.dtype}"
    where = f"{device}, {kind}, {results.machine.get('taken', '')[:10]}"
    drawn = curves(rows)
    times(drawn, folder / f"{stem}-times.png", f"Time of a call, weights cold: {where}")
    speed: dict[str, list[tuple[int, float]]] = defaultdict(list)
    share: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for row in sorted(rows, key=lambda r: r.point.m):
        if row.dense is not None:
            speed[row.point.shape].append((row.point.m, row.dense / row.point.us))
        share[row.point.shape].append((row.point.m, 100 * row.roof_us / row.point.us))
    made = [folder / f"{stem}-times.png"]
    for what, data, label, level in (
        ("speedup", speed, "times faster than the dense matmul", 1.0),
        ("roof", share, "% of the roof", 100.0),
    ):
        if data:
            made.append(folder / f"{stem}-{what}.png")
            ratios(data, made[-1], f"qmm: {where}", label, level)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, draw the pictures."""
    parser = argparse.ArgumentParser("python -m bench.report", description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, help="what bench.grid or qmm bench has written")
    parser.add_argument("--ours", default=OURS, help="the contestant to report, e.g. qmm-dependent")
    parser.add_argument("--pictures", type=Path, help="folder for PNG files; none without it")
    parser.add_argument(
        "--goals", action="store_true", help="also say which points miss the goals of bench/goals.py"
    )
    o = parser.parse_args(arguments)
    results = Results.load(o.results)
    rows = rows_of(results, o.ours)
    if not rows:
        print(f"{o.results}: no point of {o.ours!r}")
        return 1
    facts = ", ".join(f"{key} {value}" for key, value in results.machine.items())
    print(f"{facts}\n{results.how}\nroof: {results.roof.source}\n")
    print(table(rows))
    for name, us in results.host_us.items():
        print(f"host time of an eager call, K=N=1024, M=1: {name} {us} us")
    for left in results.left_out:
        where = "all rows" if left["m"] is None else f"M={left['m']}"
        print(f"left out: {left['contestant']} {left['k']}x{left['n']} {where}: {left['why']}")
    if o.goals:
        from bench.goals import print_missed

        print_missed(rows)
    if o.pictures:
        for path in pictures(results, rows, o.pictures, o.results.stem):
            print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
