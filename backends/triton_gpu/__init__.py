"""The triton backend: fused unpack-dequantise-matmul kernels for CUDA, HIP and XPU devices.

Importing this folder imports no triton; ``environment`` and ``run`` do. Under ``TRITON_INTERPRET=1`` (set before the
first use) the same kernels run on CPU tensors, slowly.
"""

from __future__ import annotations

import functools
import os
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from qmm.backend import Backend, Kernel, Limits, PreparedLayout, Tier
from qmm.devices import described_device, gpu_is_here
from qmm.errors import Reason

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from qmm.backends.triton_gpu.heuristics import TiledConfig
    from qmm.backends.triton_gpu.hopper.choose import DecodeConfig
    from qmm.backends.triton_gpu.hopper.choose_wgmma import WgmmaConfig
    from qmm.call import MatmulCall
    from qmm.weight import QuantizedWeight, WeightSpec

MIN_TRITON = (3, 2)


_HOPPER = Limits(
    devices=("cuda",),
    a_dtypes=(torch.float16, torch.bfloat16),
    bits=(4, 8),
    scale_dtypes=(torch.float16, torch.bfloat16, torch.float32),
    codebook=False,
    two_level_scales=False,
)


class TritonBackend(Backend):
    """Triton kernels. ``tiled`` reads the canonical weight, the others the fragment layout (hopper/layout.py)."""

    name = "triton"
    kernels = (
        Kernel(
            "decode",
            "streams weights in mma order through registers; warps share out K",
            Tier.SPECIALISED,
            _HOPPER,
            emulated=False,
        ),
        Kernel(
            "wgmma",
            "weights dequantised into wgmma's register operand; TMA, persistent, split-K in fixed order",
            Tier.SPECIALISED,
            replace(_HOPPER, deterministic=(True, False)),
            emulated=False,
        ),
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
        if kernel.name != "tiled":
            from qmm.backends.triton_gpu.hopper.available import reasons

            own = reasons(call, kernel.name, _interpreted())
            return [*_environment(), *kernel.limits.check(call, kernel.name), *own]
        limits = replace(kernel.limits, devices=("cpu",)) if _interpreted() else kernel.limits
        return [*_environment(), *limits.check(call, kernel.name)]

    def config(self, call: MatmulCall, kernel: Kernel) -> TiledConfig | DecodeConfig | WgmmaConfig:
        from qmm.backends.triton_gpu.heuristics import choose, device_facts
        from qmm.backends.triton_gpu.hopper.choose import choose_decode
        from qmm.backends.triton_gpu.hopper.choose_wgmma import choose_wgmma

        facts = device_facts(call.device)
        if kernel.name == "decode":
            return choose_decode(call, facts.processors, facts.shared_bytes)
        if kernel.name == "wgmma":
            return choose_wgmma(call, facts.processors, facts.shared_bytes)
        return choose(call, facts)

    def prepare(self, w: QuantizedWeight) -> PreparedLayout | None:
        from qmm.backends.triton_gpu.hopper.available import layout_serves

        if not layout_serves(w.spec, w.even_groups, w.device, _interpreted()):
            return None
        from qmm.backends.triton_gpu.hopper.layout import FragmentLayout

        return FragmentLayout(w)

    def adopt(self, spec: WeightSpec, tensors: Mapping[str, Tensor]) -> PreparedLayout | None:
        from qmm.backends.triton_gpu.hopper.layout import FragmentLayout

        return FragmentLayout.of(spec, tensors)

    def run(
        self,
        call: MatmulCall,
        kernel: Kernel,
        config: TiledConfig | DecodeConfig | WgmmaConfig,
        a: Tensor,
        w: QuantizedWeight,
        bias: Tensor | None,
        out: Tensor,
    ) -> None:
        if kernel.name == "tiled":
            from qmm.backends.triton_gpu.launch import run

            run(call, config, a, w.tensors, bias, out)  # type: ignore[arg-type]
        else:
            from qmm.backends.triton_gpu.hopper import launch

            launch.run(call, config, a, w.prepare_for(self), bias, out)  # type: ignore[arg-type]


def _interpreted() -> bool:
    """Whether kernels are interpreted; on a described device they would not be."""
    return _interpreter() and described_device() is None


@functools.cache
def _interpreter() -> bool:
    """Triton decides it when a kernel is defined, so the first answer stays."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


def _environment() -> tuple[Reason, ...]:
    if _interpreted() or gpu_is_here():
        return _package()
    fix = "run on a machine with such a GPU, or set TRITON_INTERPRET=1 before the first use (slow, for tests)"
    return (*_package(), Reason("a CUDA, HIP or XPU device", "none that torch sees", fix))


@functools.cache
def _package() -> tuple[Reason, ...]:
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
    return tuple(found)


BACKEND = TritonBackend()
