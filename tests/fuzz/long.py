"""The long profile: ``python -m tests.fuzz.long --calls 20000 --seconds 200 --jobs 14 --json fuzz.json``.

Each process takes its share of a fixed list of variants (so that each is compiled once) and lets hypothesis draw calls
of one after the other, again and again until the calls or the time are used up. A call that fails is shrunk, printed
with the command that repeats it (``--call '{...}'``), and its variant is left out from then on; a process that a call
kills, or that hangs, is reported with that call. Exit status 1 where anything failed or too few calls were made.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
_SHARE = {"tiled": 5, "wgmma": 3, "decode": 4, "blocks": 2}  # variants of a kernel for each process
_CALLS_A_TURN = 30
_SHRINK_SECONDS = 15.0
_RESTARTS = 4
_GRACE = 25.0  # behind the time limit, for the call in work


def pool(seed: int, jobs: int) -> list[Any]:
    """The variants of all processes: dealt round, so that each process has some of every kernel."""
    import torch
    from fuzz_call import draw_variant

    from qmm.testing import targets

    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = []
    for target in targets():
        if target.device == device:
            rng = random.Random(f"{seed} {target}")
            count = _SHARE.get(target.kernel, 5) * jobs
            found += [draw_variant(rng.choice, target, small=device == "cpu") for _ in range(count)]
    return found


class Log:
    """What one process tells: lines of JSON, and the call in work (for whoever finds the process dead)."""

    def __init__(self, path: Path) -> None:
        self._lines = path.open("a")
        self._current = path.with_suffix(".current")

    def begin(self, call: Any) -> None:
        """Before a call."""
        self._current.write_text(call.to_json())

    def tell(self, **facts: Any) -> None:
        """One line."""
        self._lines.write(json.dumps(facts) + "\n")
        self._lines.flush()


def turn(variant: Any, number: int, calls: int, log: Log, end: float) -> bool:
    """Some calls of one variant by hypothesis; False where one failed."""
    from fuzz_call import Call, draw_call
    from fuzz_check import check
    from fuzz_profiles import long
    from hypothesis import given, seed
    from hypothesis import strategies as st

    failed: dict[str, Any] = {}
    stop = end

    @st.composite
    def drawn(draw: Any) -> Call:
        return draw_call(lambda options: draw(st.sampled_from(options)), variant)

    @seed(number)
    @long(calls)
    @given(drawn())
    def run(call: Call) -> None:
        nonlocal stop
        if time.time() > stop:
            return
        log.begin(call)
        began = time.perf_counter()
        try:
            outcome = check(call)
        except Exception as error:
            if not failed:
                stop = min(time.time() + _SHRINK_SECONDS, end + 10)
            text = "".join(traceback.format_exception_only(error)).strip()
            failed.update(target=variant.target, message=text[:2000], call=call.to_json())
            if "CUDA" in text or "illegal" in text:  # nothing works in this process any more
                log.tell(failure=failed)
                os._exit(3)
            raise
        log.tell(target=variant.target, seconds=time.perf_counter() - began, **vars(outcome))

    try:
        run()
    except BaseException as error:
        if not failed:
            log.tell(failure={"target": variant.target, "message": repr(error), "call": None})
            return False
    if failed:
        log.tell(failure=failed)
    return not failed


def work(options: argparse.Namespace) -> None:
    """One process: its variants, turn by turn."""
    import warnings

    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    log = Log(Path(options.log))
    mine = pool(options.seed, options.jobs)[options.worker :: options.jobs]
    random.Random(f"{options.seed} {options.worker} {options.restart}").shuffle(mine)
    number = options.restart * 1000
    while time.time() < options.end and mine:
        for variant in list(mine):
            number += 1
            if time.time() >= options.end:
                break
            if not turn(variant, options.seed * 100_000 + number, _CALLS_A_TURN, log, options.end):
                mine.remove(variant)


def start(options: argparse.Namespace, worker: int, restart: int, folder: Path, end: float) -> Any:
    """One process, started."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    command = [sys.executable, str(HERE / "long.py"), "--worker", str(worker), "--restart", str(restart)]
    command += ["--seed", str(options.seed), "--jobs", str(options.jobs), "--end", str(end)]
    command += ["--log", str(folder / f"{worker}.jsonl")]
    errors = (folder / f"{worker}.err").open("a")
    return subprocess.Popen(command, env=os.environ | threads, stderr=errors, stdout=errors)


def died(folder: Path, worker: int, how: str) -> dict[str, Any]:
    """A failure for a process that is no more."""
    current = folder / f"{worker}.current"
    call = current.read_text() if current.exists() else None
    tail = (folder / f"{worker}.err").read_text()[-1500:]
    target = "?"
    if call:
        v = json.loads(call)["variant"]
        target = f"{v['backend']}.{v['kernel']}:{v['device']}"
    return {"target": target, "message": f"{how}: {tail}", "call": call}


def drive(options: argparse.Namespace) -> dict[str, Any]:
    """All processes, to the end of the time; what they told, added up."""
    began = time.time()
    end = began + options.seconds
    failures: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        running = {i: (start(options, i, 0, folder, end), 0) for i in range(options.jobs)}
        while running and time.time() < end + _GRACE:
            time.sleep(0.5)
            for worker, (process, restart) in list(running.items()):
                status = process.poll()
                if status is None:
                    continue
                del running[worker]
                if status not in (0, 3):
                    failures.append(died(folder, worker, f"exit status {status}"))
                if status and restart < _RESTARTS and time.time() < end - 5:
                    running[worker] = start(options, worker, restart + 1, folder, end), restart + 1
        for worker, (process, _) in running.items():
            process.kill()
            process.wait()
            failures.append(died(folder, worker, "hang: killed behind the time limit"))
        lines = [
            json.loads(line)
            for path in sorted(folder.glob("*.jsonl"))
            for line in path.read_text().splitlines()
        ]
    return added_up(lines, failures, time.time() - began)


def added_up(lines: list[dict[str, Any]], failures: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """Figures of each kernel, and all failures."""
    kernels: dict[str, dict[str, Any]] = {}
    for line in lines:
        if "failure" in line:
            failures.append(line["failure"])
            continue
        k = kernels.setdefault(
            line["target"], {"calls": 0, "refused": 0, "worst": 0.0, "rms": 0.0, "repeats": 0, "seconds": 0.0}
        )
        k["calls"] += 1
        k["refused"] += line["refused"]
        k["repeats"] += line["repeats"]
        k["seconds"] = round(k["seconds"] + line["seconds"], 3)
        k["worst"] = max(k["worst"], line["ratio"])
        k["rms"] = max(k["rms"], line["rms"])
    total = sum(k["calls"] for k in kernels.values())
    return {
        "calls": total,
        "refused": sum(k["refused"] for k in kernels.values()),
        "repeats": sum(k["repeats"] for k in kernels.values()),
        "differing_repeats": sum("repeat:" in f["message"] for f in failures),
        "seconds": round(seconds, 1),
        "kernels": kernels,
        "failures": failures,
    }


def show(report: dict[str, Any]) -> None:
    """The report as text."""
    print(f"{'kernel':<22} {'calls':>7} {'refused':>8} {'repeats':>8} {'error/bound':>12} {'rms ratio':>10}")
    for name, k in sorted(report["kernels"].items()):
        print(
            f"{name:<22} {k['calls']:>7} {k['refused']:>8} {k['repeats']:>8} {k['worst']:>12.4f} {k['rms']:>10.3f}"
        )
    print(
        f"{report['calls']} calls in {report['seconds']} s, {report['refused']} of them refused, "
        f"{report['repeats']} repeats, {report['differing_repeats']} of them different, "
        f"{len(report['failures'])} failures"
    )
    for failure in report["failures"][:10]:
        print(f"\n{failure['target']}: {failure['message']}")
        if failure["call"]:
            print(f"  python tests/fuzz/long.py --call '{failure['call']}'")


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--calls", type=int, default=0, help="fail where fewer calls were made")
    parser.add_argument("--seconds", type=float, default=200)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--call", help="repeat one call")
    for name, kind in (("--worker", int), ("--restart", int), ("--end", float), ("--log", str)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    options = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
        os.environ.setdefault("NUMBA_ENABLE_CUDASIM", "1")
    if options.call:
        from fuzz_call import Call
        from fuzz_check import check

        print(check(Call.from_json(options.call)))
        return 0
    if options.worker is not None:
        work(options)
        return 0
    report = drive(options)
    report |= {
        "seed": options.seed,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))
    show(report)
    return 1 if report["failures"] or report["calls"] < options.calls else 0


if __name__ == "__main__":
    sys.exit(main())
