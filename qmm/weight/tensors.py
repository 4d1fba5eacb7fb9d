"""The canonical tensors of a weight as one tuple; field names are those of a state_dict."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class WeightTensors(NamedTuple):
    """K = in_features, N = out_features, G = groups; see ``qmm.QuantizedWeight`` for the meaning.

    Attributes:
        qweight: int32 ``[ceil(K*bits/32), N]``.
        scales: ``[G, N]``, or int32 words ``[ceil(G*4/32), N]`` of 4-bit ones.
        scale2: float32 ``[1]`` or ``[ceil(G/r), N]``, or None.
        zeros: int32 ``[ceil(G*bits/32), N]``, or floating ``[G, N]``, or (kind bias) as ``scales``, or None.
        zero2: like ``scale2``, for zeros of kind bias.
        codebook: floating ``[2**bits]``, or None.
        g_idx: int32 ``[K]``, or None.
    """

    qweight: Tensor
    scales: Tensor
    scale2: Tensor | None = None
    zeros: Tensor | None = None
    zero2: Tensor | None = None
    codebook: Tensor | None = None
    g_idx: Tensor | None = None

    def present(self) -> dict[str, Tensor]:
        """The tensors that are there, by name."""
        return {name: t for name, t in self._asdict().items() if t is not None}
