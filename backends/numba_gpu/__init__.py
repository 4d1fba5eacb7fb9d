"""The numba backend: one textbook kernel in Python, for NVIDIA GPUs and for numba's simulator. Imports no numba."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from qmm.backend import Backend, Kernel, Limits, Tier
from qmm.backends.numba_gpu.environment import is_simulated, missing
from qmm.backends.numba_gpu.heuristics import NumbaConfig, choose
from qmm.devices import described_device
from qmm.errors import Reason

if TYPE_CHECKING:
    from torch import Tensor

    from qmm.call import MatmulCall
    from qmm.weight import QuantizedWeight


def _simulated() -> bool:
    """Whether kernels would be simulated; on a described device they would not be."""
    return is_simulated() and described_device() is None


class NumbaBackend(Backend):
    """Everything a weight can express, in one readable kernel."""

    name = "numba"
    kernels = (
        Kernel(
            "tiled",
            "unpacks a tile of W into shared memory, then multiplies in float32",
            Tier.TEXTBOOK,
            Limits(devices=("cuda",)),
        ),
    )

    @property
    def emulated(self) -> str | None:
        return "simulator" if _simulated() else None

    def environment(self) -> list[Reason]:
        return list(missing(_simulated(), described_device()))

    def why_not(self, call: MatmulCall, kernel: Kernel) -> list[Reason]:
        limits = replace(kernel.limits, devices=("cpu",)) if _simulated() else kernel.limits
        return [*self.environment(), *limits.check(call, kernel.name)]

    def config(self, call: MatmulCall, kernel: Kernel) -> NumbaConfig:
        return choose(call, emulated=_simulated())

    def run(
        self,
        call: MatmulCall,
        kernel: Kernel,
        config: NumbaConfig,
        a: Tensor,
        w: QuantizedWeight,
        bias: Tensor | None,
        out: Tensor,
    ) -> None:
        from qmm.backends.numba_gpu.launch import run

        run(call, config, a, w, bias, out, emulated=is_simulated())


BACKEND = NumbaBackend()
