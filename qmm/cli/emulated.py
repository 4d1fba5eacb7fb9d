"""Slices of layers on an emulated backend, in a process of its own that alone has the emulation's variable set.

Triton and numba decide at import whether they emulate, and an emulator is thousands of times slower than a GPU: hence
a child (``python -m qmm.cli.emulated``), a few rows and columns, and a time limit. The child writes one JSON line an
event: ``{"result": {...}}``, ``{"reasons": [...]}`` where the backend cannot run at all, ``{"left_out": n}``.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import qmm
from qmm.formats import gguf

BUDGET_SECONDS = 25.0  # no new slice after that; the demo stays under two minutes with two emulators


@dataclass(frozen=True)
class Emulator:
    """How a backend is emulated, and how much it can take.

    Attributes:
        variable: the environment variable that switches it on (to 1).
        label: what it is called in the table.
        k, n, m: most rows of W, columns of W and rows of A of a slice.
    """

    variable: str
    label: str
    k: int
    n: int
    m: int


EMULATORS = {
    "triton": Emulator("TRITON_INTERPRET", "interpreter", k=576, n=32, m=4),
    "numba": Emulator("NUMBA_ENABLE_CUDASIM", "simulator", k=64, n=8, m=2),
}


def kinds_of_layers(names: list[str]) -> list[str]:
    """The first layer of each kind: ``blk.0.ffn_up.weight`` stands for all ``blk.*.ffn_up.weight``."""
    first: dict[str, str] = {}
    for name in names:
        first.setdefault(re.sub(r"\d+", "*", name), name)
    return list(first.values())


class ChildError(RuntimeError):
    """The child ended badly; the text is the last thing it said."""


def run_child(backend: str, model: Path, layers: list[str], dtype: str) -> Iterator[dict[str, object]]:
    """The child's events as they come.

    Raises:
        ChildError: it crashed.
    """
    environment = os.environ | {EMULATORS[backend].variable: "1"}
    environment.pop("QMM_BACKEND", None)
    command = [sys.executable, "-m", "qmm.cli.emulated", backend, str(model), dtype, *layers]
    # stderr goes to a file: a pipe that nobody reads meanwhile could fill up and stop the child
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True, encoding="utf-8"
        ) as child,
    ):
        assert child.stdout is not None
        try:
            for line in child.stdout:
                if line.startswith("{"):
                    yield json.loads(line)
            code = child.wait()
        except BaseException:  # whoever reads the events has gone, or was interrupted
            child.kill()
            raise
        errors.seek(0)
        said = errors.read().decode(errors="replace").strip()
    if code:
        raise ChildError(f"exit code {code}: {said.splitlines()[-1] if said else 'it said nothing'}")


def _child(backend: str, model: str, dtype: str, layers: list[str]) -> None:
    import torch

    from qmm.cli.check import check_blocks

    reasons = qmm.backends()[backend].environment()
    if reasons:
        _say(reasons=[str(r) for r in reasons])
        return
    emulator, file = EMULATORS[backend], gguf.read(model)
    start = time.monotonic()
    for done, layer in enumerate(layers):
        if time.monotonic() - start > BUDGET_SECONDS:
            _say(left_out=len(layers) - done)
            return
        qtype = file.info[layer].qtype
        kind = gguf.block_type(qtype)
        blocks = max(1, emulator.k // kind.size)
        raw = file.blocks(layer)[: emulator.n, : blocks * kind.nbytes]
        for result in check_blocks(
            raw, qtype, layer, [backend], rows=emulator.m, dtype=getattr(torch, dtype), device="cpu"
        ):
            _say(result=asdict(result))


def _say(**event: object) -> None:
    print(json.dumps(event), flush=True)


if __name__ == "__main__":
    _child(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:])
