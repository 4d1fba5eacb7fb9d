"""The roof: the least time that a machine's memory and its dense matmul allow for so many bytes and operations."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qmm.timing.clock import Call, alternate, sampler


@dataclass(frozen=True)
class Roof:
    """Sustained rates, and where they come from."""

    bytes_per_s: float
    flops_per_s: float
    source: str = "measured"

    def seconds(self, moved: float, flops: float) -> float:
        """The least time for that many bytes and operations."""
        return max(moved / self.bytes_per_s, flops / self.flops_per_s)


# Name in torch.cuda.get_device_name() -> rates that were measured, over seconds, on such a device.
_KNOWN = {"H200": Roof(4.3e12, 790e12, "sustained by an H200: 4.3 TB/s copied, 790 TFLOP/s dense float16")}


def known_roof(device_name: str) -> Roof | None:
    """The roof of a device that was measured before, or None."""
    return next((roof for name, roof in _KNOWN.items() if name in device_name), None)


def measure_roof(device: torch.device | str) -> Roof:
    """A large copy (bytes read and written counted) and torch's dense matmul, here and now."""
    gpu = torch.device(device).type == "cuda"
    dtype, side, size = (torch.float16, 8192, 2**30) if gpu else (torch.float32, 1024, 2**26)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    a, b = torch.randn(2, side, side, device=device).to(dtype)
    out = torch.empty_like(a)

    def best(call: Call) -> float:
        taken = alternate({"": sampler([call], device)}, rounds=1, idle=0.25 if gpu else 0)[""]
        return taken.seconds if gpu else min(taken.samples)

    copied = best(lambda: target.copy_(source))
    dense = best(lambda: torch.mm(a, b, out=out))
    return Roof(2 * size / copied, 2 * side**3 / dense)
