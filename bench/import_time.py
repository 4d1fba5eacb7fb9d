"""Time of ``import torch`` and of ``import qmm`` in fresh processes: ``python bench/import_time.py [runs]``.

The two are run in turn, so that a busy machine slows both alike; the medians and their ratio are printed. Exit status
1 where ``import qmm`` takes more than 1.5 times ``import torch``.
"""

from __future__ import annotations

import statistics
import subprocess
import sys

LIMIT = 1.5
PROBE = "import time; t = time.perf_counter(); import {0}; print(time.perf_counter() - t)"


def seconds(module: str) -> float:
    """Wall time of one import in a new interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE.format(module)], capture_output=True, text=True, check=True
    )
    return float(done.stdout)


def main(runs: int) -> int:
    """Print the medians of ``runs`` imports each."""
    times: dict[str, list[float]] = {"torch": [], "qmm": []}
    for module in times:
        seconds(module)  # warm the file cache
    for _ in range(runs):
        for module, found in times.items():
            found.append(seconds(module))
    torch_s, qmm_s = (statistics.median(times[m]) for m in ("torch", "qmm"))
    print(f"import torch  {torch_s:6.3f} s  (median of {runs})")
    print(f"import qmm    {qmm_s:6.3f} s  ratio {qmm_s / torch_s:.3f}, limit {LIMIT}")
    return int(qmm_s / torch_s > LIMIT)


if __name__ == "__main__":
    raise SystemExit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 7))
