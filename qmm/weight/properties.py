"""What can be read off a weight: facts, tensors, where it lives. The base of ``QuantizedWeight``."""

from __future__ import annotations

import torch
from torch import Tensor

from qmm.weight.spec import WeightSpec, ZeroKind
from qmm.weight.store import Store
from qmm.weight.tensors import WeightTensors
from qmm.weight.text import to_text

_FLOAT16_MAX = torch.finfo(torch.float16).max


class WeightProperties:
    """Read-only properties; the subclass fills ``_spec`` and ``_store``, and calls ``_know``."""

    __slots__ = ("_bound", "_even", "_facts", "_spec", "_store")

    _bound: float
    _even: bool
    _facts: str
    _spec: WeightSpec
    _store: Store

    def _know(self, bound: float, even: bool) -> None:
        """What the values are known to be; and all facts as text, for programs that are traced.

        Args:
            bound: an upper bound on ``|W|``, NaN where none is known.
            even: see :attr:`even_groups`; False where it is not known.
        """
        self._bound, self._even = bound, even
        self._facts = to_text(self._spec, bound <= _FLOAT16_MAX, even)

    @property
    def spec(self) -> WeightSpec:
        """All facts as one hashable value."""
        return self._spec

    @property
    def is_prepared(self) -> bool:
        """Whether some backend's prepared layout is in memory."""
        return self._store.is_prepared

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return self._spec.bits

    @property
    def group_size(self) -> int:
        """Rows of K that share a scale."""
        return self._spec.group_size

    @property
    def in_features(self) -> int:
        """K."""
        return self._spec.in_features

    @property
    def out_features(self) -> int:
        """N."""
        return self._spec.out_features

    @property
    def shape(self) -> tuple[int, int]:
        """``(K, N)``, the shape of :meth:`dequantize`."""
        return (self.in_features, self.out_features)

    @property
    def zero_kind(self) -> ZeroKind:
        """How zero points enter."""
        return self._spec.zero_kind

    @property
    def device(self) -> torch.device:
        """Device of every tensor of the weight."""
        return self._store.device

    @property
    def dtype(self) -> torch.dtype:
        """What to take for the dtype of W where code asks for one: that of the scales, float32 where those have 8 bits.

        The result of a product has the dtype of ``a``, whatever this is.
        """
        dtype = self._spec.scale_dtype
        return dtype if dtype.itemsize > 1 else torch.float32

    @property
    def fits_float16(self) -> bool:
        """Whether every value is known to lie inside float16's range."""
        return self._bound <= _FLOAT16_MAX

    @property
    def even_groups(self) -> bool:
        """Whether every group is known to have ``group_size`` rows (the last may be short); act-order may break it."""
        return self._even

    @property
    def tensors(self) -> WeightTensors:
        """The canonical tensors; a released weight restores them for this one look."""
        return self._store.tensors()

    @property
    def qweight(self) -> Tensor:
        """Packed codes, int32 ``[ceil(K*bits/32), N]``."""
        return self.tensors.qweight

    @property
    def scales(self) -> Tensor:
        """Scales as stored, ``[G, N]``, or int32 words ``[ceil(G*4/32), N]`` of 4-bit ones."""
        return self.tensors.scales

    @property
    def scale2(self) -> Tensor | None:
        """Second level of the scales."""
        return self.tensors.scale2

    @property
    def zeros(self) -> Tensor | None:
        """Zero points as stored."""
        return self.tensors.zeros

    @property
    def zero2(self) -> Tensor | None:
        """Second level of bias zeros."""
        return self.tensors.zero2

    @property
    def codebook(self) -> Tensor | None:
        """Value of each code, ``[2**bits]``."""
        return self.tensors.codebook

    @property
    def g_idx(self) -> Tensor | None:
        """Group of each row, int32 ``[K]``, with act-order."""
        return self.tensors.g_idx

    @property
    def nbytes(self) -> int:
        """Bytes held now, canonical and prepared together."""
        return self._store.nbytes

    @property
    def state(self) -> str:
        """``"canonical"``, ``"kept: <backends>"`` (canonical and prepared) or ``"released: <backend>"``."""
        return self._store.state

    @property
    def released_to(self) -> str | None:
        """The backend whose prepared layout is the only copy, or None."""
        return self._store.released_to

    def stored_tensors(self) -> dict[str, Tensor]:
        """Every tensor that is in memory now, canonical and prepared, by a name for messages."""
        return self._store.stored()

    def __repr__(self) -> str:
        parts = [str(self._spec), f"{self.nbytes / 1e6:.3g} MB", str(self.device), self.state]
        return f"QuantizedWeight({', '.join(parts)})"
