"""Where the Hopper kernels can run. Imports no triton."""

from __future__ import annotations

import functools
import re
from importlib.metadata import PackageNotFoundError, version

import torch

from qmm.backends.triton_gpu.hopper.choose import DECODE_ROWS, tiles_per_group
from qmm.backends.triton_gpu.hopper.layout import block_k
from qmm.call import MatmulCall
from qmm.devices import DeviceInfo, device_info
from qmm.errors import Reason
from qmm.weight.spec import WeightSpec

KNOWN_TRITON = ((3, 6), (3, 9))  # Gluon's names move between releases: see compat.py
DECODE_CAPABILITY = (8, 0)
WGMMA_CAPABILITY = (9, 0)


def reasons(call: MatmulCall, kernel: str, emulated: bool) -> list[Reason]:
    """Every reason, beyond its limits, why ``kernel`` (``"decode"`` or ``"wgmma"``) cannot take ``call``."""
    found: list[Reason] = []
    if emulated:
        found.append(
            Reason("a GPU", "the interpreter, which does not know Gluon", "unset TRITON_INTERPRET", kernel)
        )
    else:
        found += _triton_reasons(kernel)
        if call.device.type == "cuda":
            found += _device_reasons(call.device, kernel)
    spec = call.weight
    if spec.bits in (4, 8):
        block = block_k(spec.bits) if kernel == "decode" else 64
        if tiles_per_group(spec, block) is None:
            rule = f"group_size {block // 2}, a multiple of {block}, or K"
            found.append(Reason(rule, str(spec.group_size), "", kernel))
    if kernel == "decode":
        if call.m > DECODE_ROWS and call.deterministic != "batch":
            found.append(
                Reason(f"M <= {DECODE_ROWS} (any with deterministic='batch')", str(call.m), "", kernel)
            )
    else:
        if call.deterministic == "batch":
            found.append(Reason("deterministic True or False", "batch", "the decode kernel does it", kernel))
        if call.a_dtype == torch.float16 and not call.fits_float16:
            found.append(Reason("weights inside float16's range", "larger ones", "use bfloat16", kernel))
    if spec.act_order and not call.even_groups:
        found.append(
            Reason("act-order with group_size rows in each group", "groups of other sizes", "", kernel)
        )
    if call.unprepared_in_capture:
        fix = "call qmm.prepare(w), or matmul once, before the capture"
        found.append(Reason("a prepared weight", "graph capture, in which none is made", fix, kernel))
    return found


def layout_serves(spec: WeightSpec, even_groups: bool, device: torch.device, emulated: bool) -> bool:
    """Whether some Hopper kernel here reads the fragment layout of such a weight."""
    if emulated or device.type != "cuda" or _triton_reasons("decode") or _device_reasons(device, "decode"):
        return False
    plain = spec.bits in (4, 8) and spec.codebook_dtype is None and even_groups
    plain = plain and spec.scale2_ratio is None and spec.zero2_ratio is None
    return (
        plain
        and spec.scale_dtype.itemsize in (2, 4)
        and tiles_per_group(spec, block_k(spec.bits)) is not None
    )


@functools.cache
def _triton_reasons(kernel: str) -> tuple[Reason, ...]:
    low, high = (".".join(map(str, v)) for v in KNOWN_TRITON)
    rule = f"triton {low} to {high}"
    try:
        text = version("triton")
    except PackageNotFoundError:
        return (Reason(rule, "no triton", "pip install 'qmm[triton]'", kernel),)
    number = re.match(r"(\d+)\.(\d+)", text)
    known = number is not None and KNOWN_TRITON[0] <= (int(number[1]), int(number[2])) <= KNOWN_TRITON[1]
    return () if known else (Reason(rule, f"triton {text}", "", kernel),)


def _device_reasons(device: torch.device, kernel: str) -> tuple[Reason, ...]:
    return _info_reasons(device_info(device), kernel)


@functools.cache
def _info_reasons(info: DeviceInfo, kernel: str) -> tuple[Reason, ...]:
    if info.vendor == "amd":
        return (Reason("an NVIDIA GPU", "an AMD GPU", "", kernel),)
    got = info.capability or (0, 0)
    if kernel == "decode":
        rule, ok = "compute capability 8.0 to 9.0", DECODE_CAPABILITY <= got <= WGMMA_CAPABILITY
    else:
        rule, ok = "compute capability 9.0", got == WGMMA_CAPABILITY
    return () if ok else (Reason(rule, ".".join(map(str, got)), "", kernel),)
