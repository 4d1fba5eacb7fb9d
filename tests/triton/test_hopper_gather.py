"""The gather before the Hopper kernels, which is plain Triton: interpreted where there is no GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from qmm.backends.triton_gpu import BACKEND

DEVICE = "cpu" if BACKEND.emulated else "cuda"
HALF, BF16 = torch.float16, torch.bfloat16


def gathered(a: Tensor, order: Tensor) -> Tensor:
    from qmm.backends.triton_gpu.hopper.gather import gather_kernel, gathering

    result, programs, args, constants = gathering(a, order)
    args[2].fill_(float("nan"))
    gather_kernel[(programs,)](*args, **constants)
    width = result.stride(0)
    assert width % 8 == 0 and result.data_ptr() % 16 == 0
    whole = result.as_strided((a.shape[0], width), (width, 1))
    assert not bool(whole[:, a.shape[1] :].any())  # zeros fill up a row, no NaN is left
    return result


@pytest.mark.parametrize("dtype", [HALF, BF16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("view", ["plain", "sliced", "transposed", "expanded"])
@pytest.mark.parametrize(("m", "k"), [(1, 1), (1, 1030), (8, 37), (9, 515)])
def test_columns_in_another_order(m: int, k: int, view: str, dtype: torch.dtype) -> None:
    if DEVICE == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU or TRITON_INTERPRET=1")
    big = torch.randn(k + 3, max(m, k) + 3, device=DEVICE).to(dtype)
    a = {
        "plain": big[:m, :k].contiguous() if m <= k else torch.randn(m, k, device=DEVICE).to(dtype),
        "sliced": torch.randn(m, k + 5, device=DEVICE).to(dtype)[:, 3 : k + 3],
        "transposed": big[:k, :m].t(),
        "expanded": big[0, :k].expand(m, k),
    }[view]
    order = torch.randperm(k, device=DEVICE)
    result = gathered(a, order.to(torch.int32))
    assert torch.equal(result, a[:, order])
