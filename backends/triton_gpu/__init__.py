"""The triton backend: fused unpack-dequantise-matmul kernels for CUDA, HIP and XPU devices.

Importing this folder imports no triton; ``environment`` and ``run`` do. Under ``TRITON_INTERPRET=1`` (set before the
first use) the same kernels run on CPU tensors, slowly.
"""

from __future__ import annotations

import functools
import os
from dataclasses import replace
from typing import TYPE_CHECKING

from qmm.backend import Backend, Kernel, Limits, Tier
from qmm.errors import Reason

if TYPE_CHECKING:
    from torch import Tensor

    from qmm.backends.triton_gpu.heuristics import TiledConfig
    from qmm.call import MatmulCall
    from qmm.weight import QuantizedWeight

MIN_TRITON = (3, 2)


class TritonBackend(Backend):
    """Triton kernels; all of them read the canonical weight."""

    name = "triton"
    kernels = (
        Kernel(
            "tiled",
            "unpacks and dequantises a tile of W in registers, then tl.dot; split-K where M and N are small",
            Tier.PORTABLE,
            Limits(devices=("cuda", "xpu")),
        ),
    )

    @property
    def emulated(self) -> str | None:
        return "interpreter" if _interpreted() else None

    def environment(self) -> list[Reason]:
        return list(_environment())

    def why_not(self, call: MatmulCall, kernel: Kernel) -> list[Reason]:
        limits = replace(kernel.limits, devices=("cpu",)) if _interpreted() else kernel.limits
        return [*_environment(), *limits.check(call, kernel.name)]

    def config(self, call: MatmulCall, kernel: Kernel) -> TiledConfig:
        from qmm.backends.triton_gpu.heuristics import choose, device_facts

        return choose(call, device_facts(call.device))

    def run(
        self,
        call: MatmulCall,
        kernel: Kernel,
        config: TiledConfig,
        a: Tensor,
        w: QuantizedWeight,
        bias: Tensor | None,
        out: Tensor,
    ) -> None:
        from qmm.backends.triton_gpu.launch import run

        run(call, config, a, w.tensors, bias, out)


@functools.cache
def _interpreted() -> bool:
    """Whether kernels are interpreted. Triton decides it when a kernel is defined, so the first answer stays."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


@functools.cache
def _environment() -> tuple[Reason, ...]:
    import torch

    needed = ".".join(map(str, MIN_TRITON))
    found: list[Reason] = []
    try:
        import triton
    except ImportError as error:
        found.append(Reason(f"triton >= {needed}", f"no triton ({error})", "pip install 'qmm[triton]'"))
    else:
        version = tuple(int(part) for part in triton.__version__.split(".")[:2])
        if version < MIN_TRITON:
            found.append(
                Reason(f"triton >= {needed}", f"triton {triton.__version__}", "pip install -U triton")
            )
    xpu = getattr(torch, "xpu", None)
    if not (_interpreted() or torch.cuda.is_available() or (xpu is not None and xpu.is_available())):
        fix = "run on a machine with such a GPU, or set TRITON_INTERPRET=1 before the first use (slow, for tests)"
        found.append(Reason("a CUDA, HIP or XPU device", "none that torch sees", fix))
    return tuple(found)


BACKEND = TritonBackend()
