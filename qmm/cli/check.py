"""One layer of a GGUF file through ``qmm.matmul``, checked against the gguf package and float64. Prints nothing.

The reference shares nothing with qmm's reading: W is ``gguf.quants.dequantize`` of the file's bytes, the product is
numpy's in float64, the bound is rule (a) of ``qmm.testing.numerics`` with Wbar = |W|, the narrowest it can be.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

import qmm
from qmm.formats import gguf
from qmm.testing.numerics import reference_from, worst_ratio

if TYPE_CHECKING:
    import numpy.typing as npt

_BLOCK_CODES = 1 << 20  # of W in float64 at a time: 8 MB


@dataclass(frozen=True)
class Result:
    """One layer on one backend.

    Attributes:
        ratio: worst error / bound; more than 1 is wrong. None where the backend refused the call.
        seconds: of ``qmm.matmul`` alone, first-call compilation included.
        reasons: why it refused.
    """

    backend: str
    kernel: str
    layer: str
    ratio: float | None
    seconds: float = 0.0
    reasons: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Within the bound, or refused with reasons."""
        return self.ratio is None or self.ratio <= 1  # NaN is no pass


def check_blocks(
    raw: npt.NDArray[np.uint8],
    qtype: str,
    layer: str,
    backends: Sequence[str],
    *,
    rows: int,
    dtype: torch.dtype,
    device: str,
) -> list[Result]:
    """Multiply by the blocks ``raw`` (uint8 ``[N, row_bytes]``) on each backend, and check.

    Args:
        rows: M.
        dtype: of A, which is seeded by the layer's name.
        device: where A and W lie.
    """
    w = gguf.from_blocks(raw, qtype)
    a = _activations(rows, w.in_features, layer).to(dtype)
    on_device, moved = a.to(device), w.to(device)
    results, outputs = [], []
    for name in backends:
        plan = qmm.explain(on_device, moved, backend=name)
        if plan.kernel is None:
            results.append(Result(name, "-", layer, None, reasons=tuple(str(r) for r in plan.reasons[name])))
            continue
        out, seconds = _timed(on_device, moved, name)
        results.append(Result(name, plan.kernel, layer, 0.0, seconds))
        outputs.append((len(results) - 1, out.cpu()))
    for start, stop, value in _reference_columns(raw, qtype):
        expected = reference_from(a, value)
        for i, out in outputs:
            ratio = max(results[i].ratio or 0.0, worst_ratio(out[:, start:stop].contiguous(), expected))
            results[i] = Result(results[i].backend, results[i].kernel, layer, ratio, results[i].seconds)
    return results


def _activations(rows: int, k: int, layer: str) -> Tensor:
    generator = torch.Generator().manual_seed(sum(layer.encode()))
    return torch.randn(rows, k, generator=generator)


def _timed(a: Tensor, w: qmm.QuantizedWeight, backend: str) -> tuple[Tensor, float]:
    if a.is_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    out = qmm.matmul(a, w, backend=backend)
    if a.is_cuda:
        torch.cuda.synchronize()
    return out, time.perf_counter() - start


def _reference_columns(
    raw: npt.NDArray[np.uint8], qtype: str
) -> Iterator[tuple[int, int, npt.NDArray[np.float64]]]:
    """``(start, stop, W[:, start:stop])`` in float64, by the gguf package."""
    from gguf import GGMLQuantizationType, quants

    kind = gguf.block_type(qtype)
    k = raw.shape[1] // kind.nbytes * kind.size
    step = max(1, _BLOCK_CODES // k)
    for start in range(0, raw.shape[0], step):
        stop = min(raw.shape[0], start + step)
        # a copy: quants reinterprets bytes, which needs its own aligned memory
        dequantised = quants.dequantize(np.array(raw[start:stop]), GGMLQuantizationType[qtype])
        yield start, stop, dequantised.astype(np.float64).T
