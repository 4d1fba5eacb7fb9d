"""torch.export: a program with one ``qmm::matmul``, any M, that runs, is saved, and runs again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import qmm
from qmm import QuantizedWeight
from qmm.testing import Case, make_inputs

FLOAT = torch.float32


class Layer(torch.nn.Module):
    """A weight as a plain attribute."""

    def __init__(self, w: QuantizedWeight, bias: Tensor | None) -> None:
        super().__init__()
        self.w, self.bias = w, bias

    def forward(self, a: Tensor) -> Tensor:
        return qmm.matmul(a, self.w, bias=self.bias, activation="gelu_tanh")


def exported(strict: bool) -> tuple[Layer, torch.export.ExportedProgram, Tensor]:
    x = make_inputs(Case(m=6, dtype=FLOAT, bias=FLOAT))
    layer = Layer(x.w, x.bias)
    rows = torch.export.Dim("rows")
    program = torch.export.export(layer, (x.a[:4],), dynamic_shapes=({0: rows},), strict=strict)
    return layer, program, x.a


@pytest.mark.parametrize("strict", [False, True], ids=["plain", "strict"])
def test_export(strict: bool) -> None:
    layer, program, a = exported(strict)
    assert str(program.graph).count("torch.ops.qmm.matmul.default") == 1
    for m in (6, 4, 2):
        assert torch.equal(program.module()(a[:m]), layer(a[:m]))


def test_saved_and_loaded(tmp_path: Path) -> None:
    """In another process, which has imported qmm and nothing else."""
    layer, program, a = exported(False)
    torch.export.save(program, tmp_path / "layer.pt2")
    torch.save({"a": a, "c": layer(a)}, tmp_path / "values.pt")
    code = f"""
import torch, qmm
values = torch.load({str(tmp_path / "values.pt")!r})
program = torch.export.load({str(tmp_path / "layer.pt2")!r}).module()
for m in (6, 3):
    torch.testing.assert_close(program(values["a"][:m]), values["c"][:m])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
