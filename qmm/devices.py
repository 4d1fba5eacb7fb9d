"""What kernels ask of a device, read from the machine or described: so that a call can be explained with no GPU here.

Backends ask :func:`device_info`, never torch, when they decide (``environment``, ``why_not``, ``config``). Inside
``with described(info)`` it answers with that device instead of this machine's, and emulators do not count.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

_KIB, _MIB = 1 << 10, 1 << 20
_SHARED_UNKNOWN = 64 * _KIB  # HIP and XPU builds of torch do not say; all of their devices have that much
_SUBSLICES_UNKNOWN = 32


@dataclass(frozen=True)
class DeviceInfo:
    """Facts of a device.

    Attributes:
        name: as its driver, or its maker, calls it.
        type: torch's device type: ``"cuda"`` (AMD's GPUs too), ``"xpu"``, ``"cpu"``.
        vendor: ``"nvidia"``, ``"amd"``, ``"intel"``, or ``""``.
        capability: CUDA compute capability, or None.
        processors: multiprocessors (compute units).
        shared_bytes: shared memory that one program may use.
        l2_bytes: L2 cache, 0 where it is not known.
        bytes_per_s: memory bandwidth by the data sheet, 0 where it is not known.
        flops_per_s: dense float16 operations with float32 sums by the data sheet, 0 where it is not known.
    """

    name: str
    type: str
    vendor: str = ""
    capability: tuple[int, int] | None = None
    processors: int = 0
    shared_bytes: int = 0
    l2_bytes: int = 0
    bytes_per_s: float = 0.0
    flops_per_s: float = 0.0


def _nvidia(
    name: str, capability: tuple[int, int], processors: int, l2_mib: int, gb_s: float, tflop_s: float
) -> DeviceInfo:
    shared = {(7, 0): 96, (7, 5): 64, (8, 0): 163, (8, 6): 99, (8, 9): 99, (12, 0): 99}.get(capability, 227)
    return DeviceInfo(
        name,
        "cuda",
        "nvidia",
        capability,
        processors,
        shared * _KIB,
        l2_mib * _MIB,
        gb_s * 1e9,
        tflop_s * 1e12,
    )


# Compute capability, multiprocessors, L2 in MiB, GB/s, TFLOP/s (fp16, fp32 sums, no sparsity), from data sheets.
DESCRIBED: dict[str, DeviceInfo] = {
    "h200": _nvidia("NVIDIA H200", (9, 0), 132, 60, 4800, 989),
    "h100": _nvidia("NVIDIA H100 SXM", (9, 0), 132, 50, 3350, 989),
    "h100-pcie": _nvidia("NVIDIA H100 PCIe", (9, 0), 114, 50, 2039, 756),
    "b200": _nvidia("NVIDIA B200", (10, 0), 148, 126, 8000, 2250),
    "a100": _nvidia("NVIDIA A100 80GB SXM", (8, 0), 108, 40, 2039, 312),
    "a10": _nvidia("NVIDIA A10", (8, 6), 72, 6, 600, 125),
    "l4": _nvidia("NVIDIA L4", (8, 9), 58, 48, 300, 121),
    "l40s": _nvidia("NVIDIA L40S", (8, 9), 142, 96, 864, 362),
    "rtx3090": _nvidia("NVIDIA GeForce RTX 3090", (8, 6), 82, 6, 936, 71),
    "rtx4090": _nvidia("NVIDIA GeForce RTX 4090", (8, 9), 128, 72, 1008, 165),
    "rtx5090": _nvidia("NVIDIA GeForce RTX 5090", (12, 0), 170, 96, 1792, 210),
    "t4": _nvidia("NVIDIA T4", (7, 5), 40, 4, 320, 65),
    "v100": _nvidia("NVIDIA V100 SXM2", (7, 0), 80, 6, 900, 125),
    "mi300x": DeviceInfo(
        "AMD Instinct MI300X", "cuda", "amd", None, 304, 64 * _KIB, 256 * _MIB, 5.3e12, 1.307e15
    ),
    "cpu": DeviceInfo("a CPU", "cpu"),
}

_described: ContextVar[DeviceInfo | None] = ContextVar("qmm_described_device", default=None)


@contextmanager
def described(info: DeviceInfo) -> Iterator[None]:
    """Within the block (this thread or task), every device is ``info``: calls can be explained, not run.

    Example:
        >>> import torch
        >>> from qmm.devices import DESCRIBED, described, device_info
        >>> with described(DESCRIBED["a100"]):
        ...     print(device_info(torch.device("cuda")).processors)
        108
    """
    token = _described.set(info)
    try:
        yield
    finally:
        _described.reset(token)


def described_device() -> DeviceInfo | None:
    """The device that stands for all, or None outside :func:`described`."""
    return _described.get()


def device_info(device: torch.device) -> DeviceInfo:
    """Facts of ``device``; of the described one inside :func:`described`."""
    return _described.get() or read(device)


def gpu_is_here() -> bool:
    """Whether torch sees a CUDA, HIP or XPU device, or one is described."""
    info = _described.get()
    return _gpu_is_here() if info is None else info.type in ("cuda", "xpu")


@functools.cache
def _gpu_is_here() -> bool:
    xpu = getattr(torch, "xpu", None)
    return torch.cuda.is_available() or (xpu is not None and xpu.is_available())


@functools.cache
def read(device: torch.device) -> DeviceInfo:
    """Facts of a device of this machine; what a data sheet alone has is taken from the described one of its name."""
    if device.type == "cuda":
        found: Any = torch.cuda.get_device_properties(device)
        amd = torch.version.hip is not None
        sheet = next((d for d in DESCRIBED.values() if d.name == found.name), None)
        return DeviceInfo(
            found.name,
            "cuda",
            "amd" if amd else "nvidia",
            None if amd else (found.major, found.minor),
            found.multi_processor_count,
            getattr(found, "shared_memory_per_block_optin", 0) or _SHARED_UNKNOWN,
            getattr(found, "L2_cache_size", 0),
            sheet.bytes_per_s if sheet else 0.0,
            sheet.flops_per_s if sheet else 0.0,
        )
    if device.type == "xpu":
        found = torch.xpu.get_device_properties(device)
        units = getattr(found, "gpu_subslice_count", _SUBSLICES_UNKNOWN)
        return DeviceInfo(found.name, "xpu", "intel", None, units, _SHARED_UNKNOWN)
    return DeviceInfo(_cpu_name() if device.type == "cpu" else device.type, device.type)


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return f"{names[0] if names else platform.machine()} ({torch.get_num_threads()} threads)"


def devices() -> list[torch.device]:
    """The GPUs that torch sees here, then the CPU."""
    found = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    xpu = getattr(torch, "xpu", None)
    if xpu is not None and xpu.is_available():
        found += [torch.device("xpu", i) for i in range(xpu.device_count())]
    return [*found, torch.device("cpu")]
