"""compute-sanitizer over every kernel here: ``python tests/sanitizer/run_sanitizer.py --json sanitizer.json``.

Compiles first (so that the tools watch kernels only), then runs memcheck, racecheck and initcheck of all kernels side
by side, within ``--seconds`` in total, and prints findings by tool and kernel. Exit status 1 where one of our kernels
has a finding, or a tool did not end. Findings inside torch's own kernels are listed apart.

Racecheck does not follow asynchronous copies by TMA and products by wgmma, whose order is kept by mbarriers: what it
reports of ``triton.wgmma`` is marked as such.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from glob import glob
from pathlib import Path
from typing import Any

TOOLS = ("memcheck", "racecheck", "initcheck")
NOT_UNDERSTOOD = {("racecheck", "triton.wgmma"): "racecheck does not follow TMA, mbarrier and wgmma"}
_PLACES = ("/usr/local/cuda*/bin", "/usr/local/cuda*/compute-sanitizer", "/opt/nvidia/*/bin")
_FINDING = re.compile(
    r"^========= (Invalid|Misaligned|Uninitialized|Barrier error|Race reported|Error:|Warning: Race|Program hit|"
    r"Out-of-range|Potential|Address )"
)
_AT = re.compile(
    r"^=========\s+(?:at|and|in|Write Thread|Read Thread|Current).*?(\w+)(?:\(.*\))?(?:\+0x| in )"
)
_OURS = re.compile(r"tiled|reduce|decode_kernel|stream_kernel|wgmma", re.I)


def find() -> str | None:
    """compute-sanitizer, in PATH or where CUDA usually is."""
    found = shutil.which("compute-sanitizer")
    if found:
        return found
    places = [path for place in _PLACES for path in sorted(glob(f"{place}/compute-sanitizer"))]
    return next((path for path in places if os.access(path, os.X_OK) and Path(path).is_file()), None)


def read(text: str) -> dict[str, Any]:
    """Findings of one run's output: how many in our kernels and in others, the summary line, the first of them."""
    ours, others, first = 0, 0, []
    lines = text.splitlines()
    for i, line in enumerate(lines):
        if not _FINDING.match(line):
            continue
        block = []
        for follower in lines[i : i + 8]:
            if block and _FINDING.match(follower):
                break
            block.append(follower)
        if _OURS.search("\n".join(block)) or "Program hit" in line:
            ours += 1
            if len(first) < 3:
                first.append("\n".join(block))
        else:
            others += 1
    summary = [line for line in lines if "SUMMARY" in line]
    return {"ours": ours, "others": others, "summary": summary[-1] if summary else None, "first": first}


def start(command: list[str], log: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """A process that writes into ``log``."""
    return subprocess.Popen(command, stdout=log.open("wb"), stderr=subprocess.STDOUT, env=environment)


def wait(processes: dict[Any, subprocess.Popen[bytes]], end: float) -> dict[Any, int | None]:
    """Exit statuses; None for one that was killed behind the time limit."""
    statuses: dict[Any, int | None] = {}
    for key, process in processes.items():
        try:
            statuses[key] = process.wait(max(0.1, end - time.time()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            statuses[key] = None
    return statuses


def drive(sanitizer: str, kernels: list[str], seconds: float) -> list[dict[str, Any]]:
    """All runs; a row for each tool and kernel, and a row for each compilation that failed."""
    end = time.time() + seconds
    calls = str(Path(__file__).with_name("sanitizer_calls.py"))
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = os.environ | {"TRITON_CACHE_DIR": str(folder / "triton"), "PYTHONFAULTHANDLER": "1"}
        plain = {k: start([sys.executable, calls, k], folder / k, environment) for k in kernels}
        statuses = wait(plain, time.time() + seconds * 0.4)
        for kernel, status in statuses.items():
            if status != 0:
                rows.append(
                    {
                        "tool": "none",
                        "kernel": kernel,
                        "status": status,
                        "log": (folder / kernel).read_text()[-2000:],
                    }
                )
        # each tensor an allocation of its own, so that reading past its end is seen
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
        watched = {
            (tool, kernel): start(
                [sanitizer, "--tool", tool, "--print-limit", "50", sys.executable, calls, kernel],
                folder / f"{tool}-{kernel}",
                environment,
            )
            for tool in TOOLS
            for kernel in kernels
            if statuses[kernel] == 0
        }
        for (tool, kernel), status in wait(watched, end).items():
            text = (folder / f"{tool}-{kernel}").read_text(errors="replace")
            row = {"tool": tool, "kernel": kernel, "status": status, **read(text)}
            row["ended"] = "worst error / bound" in text
            row["note"] = NOT_UNDERSTOOD.get((tool, kernel), "")
            if not row["ended"] or row["ours"]:
                row["log"] = text[-3000:]
            rows.append(row)
    return rows


def clean(row: dict[str, Any]) -> bool:
    """Whether a row has nothing against our kernels, or only what its tool does not understand."""
    return bool(row.get("ended")) and (row["ours"] == 0 or bool(row["note"]))


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sanitizer", default=find(), help="path of compute-sanitizer")
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    import torch

    from qmm.testing import targets

    if not torch.cuda.is_available() or options.sanitizer is None:
        print(
            f"needs a CUDA GPU and compute-sanitizer; got {options.sanitizer}, {torch.cuda.device_count()} GPUs"
        )
        return 2
    kernels = [f"{t.backend}.{t.kernel}" for t in targets() if t.device == "cuda" and t.backend != "torch"]
    began = time.time()
    rows = drive(options.sanitizer, kernels, options.seconds)
    for row in rows:
        state = "clean" if clean(row) else "NOT CLEAN"
        print(
            f"{row['tool']:<10} {row['kernel']:<14} {state:<10} ours {row.get('ours')}, torch's {row.get('others')}, "
            f"status {row['status']}, ended {row.get('ended')}; {row.get('summary')} {row.get('note', '')}"
        )
        if not clean(row):
            print(row.get("log", "")[-1500:])
    report = {"seconds": round(time.time() - began, 1), "device": torch.cuda.get_device_name(), "rows": rows}
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))
    print(f"{sum(map(clean, rows))} of {len(rows)} runs clean, {report['seconds']} s")
    return 0 if rows and all(map(clean, rows)) else 1


if __name__ == "__main__":
    sys.exit(main())
