"""The simulator's stand-in for device memory refuses what a GPU would read or write in silence."""

from __future__ import annotations

import pytest
import torch

from qmm.backends.numba_gpu.environment import is_simulated, missing

if missing(is_simulated()) or not is_simulated():
    pytest.skip("numba's simulator is not active", allow_module_level=True)

from qmm.backends.numba_gpu.simulated import Memory


def test_strides_and_offsets_are_kept() -> None:
    base = torch.arange(24, dtype=torch.bfloat16).view(4, 6)
    memory = Memory(base[1:3, 2:5])
    assert [int(memory[i]) << 16 for i in (0, 6)] == [
        int(v.view(torch.int32)) for v in (base[1, 2].float(), base[2, 2].float())
    ]
    memory[1] = 0
    assert base[1, 3] == 0


@pytest.mark.parametrize("at", [-1, 9, 1 << 40])
def test_outside_is_an_error(at: int) -> None:
    memory = Memory(torch.zeros(2, 6)[:, :3])
    assert memory[8] == 0
    with pytest.raises(IndexError, match="of a tensor with 9"):
        memory[at]
    with pytest.raises(IndexError, match="of a tensor with 9"):
        memory[at] = 1.0


def test_expanded_rows_are_one_row() -> None:
    assert Memory(torch.zeros(4).expand(1 << 40, 4))[3] == 0
