"""The small floats of quantised checkpoints: e2m1 and e4m3 as codebooks, e8m0 as scales.

Bits, most significant first::

    e2m1   s ee m          (-1)**s * 2**(e-1) * (1 + m/2);  e = 0: m/2               0 .5 1 1.5 2 3 4 6
    e4m3   s eeee mmm      (-1)**s * 2**(e-7) * (1 + m/8);  e = 0: m * 2**-9         1111 111 is NaN, no infinity
    e8m0   eeeeeeee        2**(e-127)                                                255 is NaN

Source: OCP Microscaling Formats 1.0; OCP 8-bit Floating Point 1.0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qmm.weight.facts import has_values

E8M0: torch.dtype | None = getattr(torch, "float8_e8m0fnu", None)  # torch 2.7 and later
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def e2m1_codebook(device: torch.device) -> Tensor:
    """Value of each code, float32 ``[16]``."""
    return torch.tensor(E2M1_VALUES, dtype=torch.float32, device=device)


def e4m3_codebook(device: torch.device) -> Tensor:
    """Value of each byte, float16 ``[256]`` (exact there; codes 127 and 255 are NaN)."""
    codes = torch.arange(256, dtype=torch.uint8, device="cpu")  # not every device has this view and cast
    return codes.view(torch.float8_e4m3fn).to(torch.float16).to(device)


def is_codebook(given: Tensor | None, values: Tensor) -> bool:
    """Whether ``given`` holds ``values``, signs of zero and NaN included."""
    if given is None or given.shape != values.shape or not has_values(given):
        return False
    pair = [t.to("cpu", torch.float32) for t in (given, values)]
    return torch.equal(*(t.nan_to_num(nan=1e9) for t in pair)) and torch.equal(*(t.signbit() for t in pair))


def as_e8m0(exponents: Tensor) -> Tensor:
    """Bytes uint8 (or e8m0 already) as e8m0 scales; as float32 on a torch that has no such dtype."""
    if exponents.dtype == E8M0:
        return exponents
    if E8M0 is not None:
        return exponents.view(E8M0)
    value = torch.exp2(exponents.double() - 127).float()
    return value.masked_fill(exponents == 255, torch.nan)


def e8m0_bytes(scales: Tensor) -> Tensor | None:
    """The inverse of :func:`as_e8m0`, or None where a scale is no power of two (or below 2**-127)."""
    if scales.dtype == E8M0:
        return scales.view(torch.uint8)
    value = scales.double()
    mantissa, exponent = torch.frexp(value)
    biased = exponent + 126
    ok = (mantissa == 0.5) & (biased >= 0) & (biased <= 254)
    if not bool((ok | value.isnan()).all()):
        return None
    return torch.where(value.isnan(), 255, biased).to(torch.uint8)
