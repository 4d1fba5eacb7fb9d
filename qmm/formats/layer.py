"""The tensors of one layer of a checkpoint by suffix, and errors that name layer, tensor, rule and value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from qmm.errors import WeightFormatError
from qmm.weight import QuantizedWeight
from qmm.weight.spec import dtype_name


class Layer:
    """A view of ``tensors`` (keyed by suffix) that says where a rule was broken.

    Args:
        tensors: ``{suffix: tensor}``.
        name: the layer's name in the checkpoint; may be empty.
    """

    def __init__(self, tensors: Mapping[str, Tensor], name: str = "") -> None:
        if not isinstance(tensors, Mapping):
            raise TypeError(
                f"tensors: must be a mapping of suffixes to tensors; got {type(tensors).__name__}"
            )
        self.tensors, self.name = tensors, name

    def field(self, suffix: str) -> str:
        """``model.layers.0.q_proj.weight_scale`` for ``weight_scale``."""
        return f"{self.name}.{suffix}" if self.name else suffix

    def require(self, ok: bool, suffix: str, rule: str, got: object) -> None:
        """Raise ``WeightFormatError`` naming tensor, rule and value unless ``ok``."""
        if not ok:
            raise WeightFormatError(f"{self.field(suffix)}: {rule}; got {got}")

    def get(self, suffix: str) -> Tensor | None:
        """The tensor, or None where the layer has none."""
        t = self.tensors.get(suffix)
        self.require(t is None or isinstance(t, Tensor), suffix, "must be a torch.Tensor", type(t).__name__)
        return t

    def take(self, suffix: str, dtypes: tuple[torch.dtype, ...], dim: int | None = None) -> Tensor:
        """The tensor, of one of ``dtypes`` and with ``dim`` dimensions, none of them empty.

        Raises:
            WeightFormatError: it is missing, or otherwise.
        """
        t = self.get(suffix)
        if t is None:
            raise WeightFormatError(
                f"{self.field(suffix)}: must be there; got {', '.join(sorted(map(str, self.tensors))) or 'nothing'}"
            )
        names = ", ".join(dtype_name(d) for d in dtypes)
        self.require(t.dtype in dtypes, suffix, f"dtype must be one of {names}", dtype_name(t.dtype))
        shape = f"shape {list(t.shape)}"
        self.require(dim is None or t.dim() == dim, suffix, f"must have {dim} dimensions", shape)
        self.require(t.numel() > 0, suffix, "must not be empty", shape)
        return t

    def shape(self, suffix: str, t: Tensor, expected: tuple[int, ...], meaning: str) -> None:
        """Check a shape."""
        self.require(
            tuple(t.shape) == expected,
            suffix,
            f"shape must be {meaning} = {list(expected)}",
            list(t.shape),
        )

    def build(self, qweight: Tensor, scales: Tensor, **facts: Any) -> QuantizedWeight:
        """``QuantizedWeight(...)``, with the layer's name in its errors."""
        try:
            return QuantizedWeight(qweight, scales, **facts)
        except WeightFormatError as error:
            raise WeightFormatError(f"{self.name}: {error}" if self.name else str(error)) from None
