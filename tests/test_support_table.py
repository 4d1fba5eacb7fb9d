"""The support table is built from class data, and the README holds exactly this text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from qmm import support
from qmm.backend import Backend, Kernel, Limits, Tier
from qmm.errors import Reason
from qmm.registry import TABLE
from qmm.weight import ZeroKind

README = Path(__file__).parents[1] / "README.md"


def test_readme_holds_the_table() -> None:
    """Between the two markers: the text of ``python -m qmm support --markdown``, nothing else."""
    text = README.read_text(encoding="utf-8")
    assert support.BEGIN in text and support.END in text, f"README.md needs {support.BEGIN} and {support.END}"
    found = text.split(support.BEGIN, 1)[1].split(support.END, 1)[0].strip("\n")
    if not hasattr(torch, "float8_e8m0fnu"):  # torch 2.7 and later
        found = found.replace(", e8m0", "")
    expected = support.support_table()
    assert found == expected, (
        f"README.md: put the output of `python -m qmm support --markdown` between the markers:\n{expected}"
    )


def test_a_row_a_kernel() -> None:
    """Every kernel of this repository has one row, in table order, with a cell a column."""
    rows = support.support_rows()
    owners = [row[0].split(".")[0] for row in rows]
    assert list(dict.fromkeys(owners)) == [name for name, _ in TABLE]
    assert all(len(row) == len(support.COLUMNS) for row in rows)
    lines = support.support_table().splitlines()
    assert len(lines) == len(rows) + 2
    assert {line.count("|") for line in lines} == {len(support.COLUMNS) + 1}


class Narrow(Backend):
    """A backend with every limit set."""

    name = "narrow"
    kernels = (
        Kernel(
            "only",
            "for the test",
            Tier.SPECIALISED,
            Limits(
                devices=("cuda",),
                a_dtypes=(torch.bfloat16,),
                bits=(1, 2, 4, 5, 6, 8),
                zero_kinds=(ZeroKind.NONE, ZeroKind.INT),
                scale_dtypes=(torch.float16, torch.float8_e4m3fn),
                activations=(),
                deterministic=(True,),
                codebook=False,
                act_order=False,
                two_level_scales=False,
                group_sizes=(64, 128),
                max_m=16,
            ),
        ),
    )

    def environment(self) -> list[Reason]:
        return []

    def run(self, *args: Any) -> None:
        raise AssertionError


def test_cells_are_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each limit shows in its column; a backend from outside is listed when named."""
    monkeypatch.setattr(support, "backends", lambda: {"narrow": Narrow()})
    row = dict(zip(support.COLUMNS, support.support_rows(["narrow"])[0], strict=True))
    assert row == {
        "kernel": "narrow.only",
        "tier": "specialised",
        "devices": "cuda",
        "A": "bf16",
        "bits": "1, 2, 4-6, 8",
        "zeros": "none, int",
        "scales": "fp16, e4m3",
        "two-level": "no",
        "codebook": "no",
        "act-order": "no",
        "group size": "64, 128",
        "M": "1 to 16",
        "activations": "none",
        "deterministic": "True",
    }
