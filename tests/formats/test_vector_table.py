"""All 104 vectors through ``qmm.load``, and the command that prints them."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parent / "vector_table.py"

# What takes more memory than 1.1 times the file, and how much: docs/formats.md says why.
LARGER = {
    "bnb-nf4-bs64-float16-K33-N15": 6.4,
    "bnb-nf4-bs128-nested-float16-K96-N40": 1.14,
    "bnb-nf4-bs64-float32-K208-N40": 1.32,
    "bnb-nf4-bs64-nested-bfloat16-K4304-N8": 1.45,
    "hqq-b2-g32-axis0-float16-K96-N40": 11.4,
    "hqq-b3-g64-axis0-bfloat16-K128-N64": 8.8,
    "hqq-b4-g64-axis0-float16-K128-N64": 8.1,
    "hqq-b4-g64-axis1-float16-K208-N64": 1.34,
}


@pytest.fixture(scope="module")
def table() -> ModuleType:
    spec = importlib.util.spec_from_file_location("vector_table", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # for its dataclass
    spec.loader.exec_module(module)
    return module


@pytest.mark.filterwarnings("ignore::qmm.FormatWarning")
def test_every_vector(table: ModuleType) -> None:
    """104 of them; values bit for bit but for bitsandbytes' int8; memory; the bytes of all that is written whole."""
    rows = {row.name: row for row in table.rows(table.FOLDER)}
    assert len(rows) == 104
    assert {name: row.ulps for name, row in rows.items() if row.ulps} == {"bnb-int8-K128-N64": 1}
    assert {name for name, row in rows.items() if row.memory > 1.1} == set(LARGER)
    assert all(rows[name].memory <= limit for name, limit in LARGER.items())
    differ = {name for name, row in rows.items() if not row.identical}
    # nested absmax are written plain; groups across rows or columns become smaller ones
    assert differ == {name for name in rows if "-nested-" in name or "-axis0-" in name or name in LARGER} - {
        "bnb-nf4-bs64-float16-K33-N15",
        "bnb-nf4-bs64-float32-K208-N40",
    }


def test_a_wrong_value_is_seen(table: ModuleType) -> None:
    import torch

    one = torch.tensor([1.0, -0.0])
    assert table.ulps(one, torch.tensor([1.0 + 2.0**-23, 0.0])) == 1
    assert table.ulps(one, torch.tensor([-1.0, 0.0])) > 2**30


def test_the_command() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=120, check=True
    )
    last = done.stdout.splitlines()[-1]
    assert last.startswith("104 vectors: 103 bit-equal, 1 within 1 ulp, 0 further"), last
