"""QuantEmbedding: rows of a table, gathered and dequantised from its packed codes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from qmm.nn.held import HeldWeight
from qmm.nn.linear import QuantLinear
from qmm.nn.module import QuantModule
from qmm.quantize import quantize
from qmm.weight import QuantizedWeight
from qmm.weight.dequantize import dequantize_columns
from qmm.weight.slicing import select_columns

_CODES_AT_ONCE = 1 << 22


class QuantEmbedding(QuantModule):
    """``nn.Embedding`` over a quantised table; row i of the table is column i of W ``[embedding_dim, num_embeddings]``.

    Made by :meth:`from_weight`, :meth:`from_embedding`, or :meth:`tied_to` an output layer, whose weight it then
    shares. Only the rows asked for are dequantised. The canonical form stays in memory, on a GPU too: a tied output
    layer's own layout comes on top of it there.

    Attributes:
        num_embeddings: rows of the table, N.
        embedding_dim: K.
        padding_idx: kept for others to read (the table takes no gradient).
        dtype: of the result; ``.to(dtype)`` changes it.

    Example:
        >>> import torch, qmm.nn
        >>> table = qmm.nn.QuantEmbedding.from_embedding(torch.nn.Embedding(10, 64), bits=8, group_size=32)
        >>> table(torch.tensor([[3, 1]])).shape
        torch.Size([1, 2, 64])
    """

    def __init__(
        self, held: HeldWeight, dtype: torch.dtype = torch.float32, padding_idx: int | None = None
    ) -> None:
        super().__init__()
        self.embedding_dim, self.num_embeddings = held.weight.shape
        self.padding_idx, self.dtype = padding_idx, dtype
        if held.release:
            held.release = False
            held.weight.restore()
            held.prepare()
        self._hold(held)

    @classmethod
    def from_weight(
        cls, w: QuantizedWeight, *, dtype: torch.dtype = torch.float32, padding_idx: int | None = None
    ) -> QuantEmbedding:
        """A table around ``w [embedding_dim, num_embeddings]``, which is taken over."""
        if not isinstance(w, QuantizedWeight):
            raise TypeError(f"w: must be a qmm.QuantizedWeight; got {type(w).__name__}")
        return cls(HeldWeight(w, release=False), dtype, padding_idx)

    @classmethod
    def from_embedding(
        cls,
        embedding: nn.Embedding,
        bits: int = 8,
        group_size: int = 128,
        *,
        symmetric: bool = True,
        method: str = "minmax",
        scale_dtype: torch.dtype | None = None,
    ) -> QuantEmbedding:
        """Quantise a table, see :func:`qmm.quantize`.

        Raises:
            TypeError: not an ``nn.Embedding``.
            ValueError: it renormalises its rows (``max_norm``), or as :func:`qmm.quantize`.
        """
        if not isinstance(embedding, nn.Embedding):
            raise TypeError(f"embedding: must be an nn.Embedding; got {type(embedding).__name__}")
        if embedding.max_norm is not None:
            raise ValueError(
                f"embedding: must not renormalise its rows in place; got max_norm={embedding.max_norm}"
            )
        w = quantize(
            embedding.weight,
            bits=bits,
            group_size=group_size,
            symmetric=symmetric,
            method=method,
            scale_dtype=scale_dtype,
        )
        table = cls.from_weight(w, dtype=embedding.weight.dtype, padding_idx=embedding.padding_idx)
        table.train(embedding.training)
        return table

    def tied_linear(self, bias: Tensor | None = None, *, backend: str = "auto") -> QuantLinear:
        """An output layer over the same weight, ``logits = hidden @ W``. One weight in memory: moves and loads are seen
        by both.
        """
        from qmm.nn.linear import as_bias

        self._held.backend = backend
        layer = QuantLinear.__new__(QuantLinear)
        layer._setup(self._held, as_bias(bias, self.weight))
        layer.train(self.training)
        return layer

    def forward(self, input: Tensor) -> Tensor:
        """Integers ``[...]`` in ``[0, num_embeddings)`` -> ``[..., embedding_dim]`` of ``dtype``."""
        w = self._held.weight
        t, spec = w.tensors, w.spec
        index = input.reshape(-1)
        if index.numel() == 0:
            return torch.empty(*input.shape, self.embedding_dim, dtype=self.dtype, device=w.device)
        step = max(1, _CODES_AT_ONCE // spec.in_features)
        rows = []
        for part in index.split(step) if index.numel() > step else (index,):
            count = part.shape[0]
            columns = dequantize_columns(select_columns(t, part), replace(spec, out_features=count), 0, count)
            rows.append(columns.to(self.dtype).t())
        table = rows[0].contiguous() if len(rows) == 1 else torch.cat(rows)
        return table.view(*input.shape, self.embedding_dim)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        cast = fn(torch.empty(0, dtype=self.dtype, device=self.weight.device)).dtype
        if cast.is_floating_point:
            self.dtype = cast
        return self

    def extra_repr(self) -> str:
        """Rows, columns, bits, groups, bytes, state."""
        return f"{self._facts()}, dtype={self.dtype}"
