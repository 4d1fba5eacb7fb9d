"""The torch backend: any device torch has, everything a weight can express, extra memory bounded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from qmm.backend import Backend, Kernel, Limits, Tier
from qmm.errors import Reason

if TYPE_CHECKING:
    from torch import Tensor

    from qmm.call import MatmulCall
    from qmm.weight import QuantizedWeight


@dataclass(frozen=True)
class BlocksConfig:
    """How ``blocks`` works: columns of W and rows of A at a time, and the dtype of the product's operands."""

    block_n: int
    block_m: int
    operands: torch.dtype


class TorchBackend(Backend):
    """Dequantise a block of columns, multiply by torch.matmul, finish in float32."""

    name = "torch"
    kernels = (
        Kernel(
            "blocks",
            "dequantises a block of columns at a time, then torch.matmul",
            Tier.LIBRARY,
            Limits(a_dtypes=(torch.float16, torch.bfloat16, torch.float32, torch.float64)),
        ),
    )

    def environment(self) -> list[Reason]:
        return []

    def config(self, call: MatmulCall, kernel: Kernel) -> BlocksConfig:
        from qmm.backends.torch_ref.blocks import choose

        return choose(call)

    def run(
        self,
        call: MatmulCall,
        kernel: Kernel,
        config: BlocksConfig,
        a: Tensor,
        w: QuantizedWeight,
        bias: Tensor | None,
        out: Tensor,
    ) -> None:
        from qmm.backends.torch_ref.blocks import run

        run(call, config, a, w, bias, out)


BACKEND = TorchBackend()
