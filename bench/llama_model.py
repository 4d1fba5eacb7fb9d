"""A model of Llama's shape with random weights, a static key/value cache, and any kind of linear layer.

Written for whole steps in a CUDA graph: few kernels, nothing read back by the host. At decode the query heads of a
key/value head are rows of one attention problem, so that the cache is read once and never expanded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qmm
from qmm.nn import QuantLinear

MakeLinear = Callable[[int, int], nn.Module]  # from in_features and out_features
Cache = tuple[Tensor, Tensor]  # keys and values, each [batch, kv_heads, context, head_dim]


@dataclass(frozen=True)
class Shape:
    """Sizes of a model. The default is Llama 3.1 8B with a short vocabulary."""

    layers: int = 32
    hidden: int = 4096
    mlp: int = 14336
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    vocabulary: int = 1024
    group_size: int = 128


TINY = Shape(layers=2, hidden=64, mlp=96, heads=4, kv_heads=2, head_dim=16, vocabulary=32, group_size=32)


class Block(nn.Module):
    """Attention and gated MLP, each behind its norm."""

    def __init__(self, shape: Shape, linear: MakeLinear, device: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape = shape
        q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj, self.k_proj = linear(shape.hidden, q), linear(shape.hidden, kv)
        self.v_proj, self.o_proj = linear(shape.hidden, kv), linear(q, shape.hidden)
        self.gate_proj, self.up_proj = linear(shape.hidden, shape.mlp), linear(shape.hidden, shape.mlp)
        self.down_proj = linear(shape.mlp, shape.hidden)
        self.norm1 = nn.RMSNorm(shape.hidden, eps=1e-5, device=device, dtype=dtype)
        self.norm2 = nn.RMSNorm(shape.hidden, eps=1e-5, device=device, dtype=dtype)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, cache: Cache, position: Tensor, mask: Tensor | None
    ) -> Tensor:
        """``x`` ``[batch, length, hidden]``; a mask for one new token each, none for a whole prompt."""
        shape, (batch, length, _) = self.shape, x.shape
        y = self.norm1(x)
        q = self._heads(self.q_proj(y), shape.heads)
        k = self._heads(self.k_proj(y), shape.kv_heads)
        v = self._heads(self.v_proj(y), shape.kv_heads)
        q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
        keys, values = cache
        keys.index_copy_(2, position, k)
        values.index_copy_(2, position, v)
        if mask is None:
            seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            rows = q.reshape(batch, shape.kv_heads, -1, shape.head_dim)
            seen = F.scaled_dot_product_attention(rows, keys, values, attn_mask=mask)
            seen = seen.reshape(batch, shape.heads, 1, shape.head_dim)
        x = x + self.o_proj(seen.transpose(1, 2).reshape(batch, length, -1))
        y = self.norm2(x)
        return x + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))

    def _heads(self, x: Tensor, heads: int) -> Tensor:
        return x.view(x.shape[0], x.shape[1], heads, self.shape.head_dim).transpose(1, 2)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding; the first half of ``sin`` is negated, so that a roll takes the place of a signed swap."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


class Model(nn.Module):
    """Embedding, blocks, norm and head.

    Args:
        shape: sizes.
        linear: makes the linear layers of the blocks.
        context: tokens that a cache may hold at most.
    """

    def __init__(
        self, shape: Shape, linear: MakeLinear, context: int, device: str, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.shape, self.dtype = shape, dtype
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden, device=device, dtype=dtype)
        self.blocks = nn.ModuleList(Block(shape, linear, device, dtype) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=1e-5, device=device, dtype=dtype)
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False, device=device, dtype=dtype)
        self.run_block: Callable[..., Tensor] = Block.__call__  # or what a compiler made of it
        half = torch.arange(shape.head_dim // 2, device=device) / (shape.head_dim // 2)
        angles = torch.arange(context, device=device)[:, None] * 500000.0**-half
        self.register_buffer("cos", angles.cos().repeat(1, 2).to(dtype))
        self.register_buffer("sin", torch.cat([-angles.sin(), angles.sin()], 1).to(dtype))
        self.register_buffer("places", torch.arange(context, device=device))

    def new_caches(self, batch: int, context: int) -> list[Cache]:
        """Empty caches for ``context`` tokens, one a block."""
        size = (batch, self.shape.kv_heads, context, self.shape.head_dim)
        device = self.places.device
        return [
            (
                torch.zeros(size, device=device, dtype=self.dtype),
                torch.zeros(size, device=device, dtype=self.dtype),
            )
            for _ in self.blocks
        ]

    def forward(self, tokens: Tensor, position: Tensor, caches: list[Cache]) -> Tensor:
        """Logits ``[batch, vocabulary]`` after the last token.

        Args:
            tokens: ``[batch, length]``; more than one a row only from position 0 on.
            position: int64 ``[length]`` on the device, the same for every row.
        """
        cos, sin = self.cos[position], self.sin[position]
        mask = None
        if tokens.shape[1] == 1:
            hidden = torch.full((), float("-inf"), dtype=self.dtype, device=tokens.device)
            places = self.places[: caches[0][0].shape[2]]
            mask = torch.where(places <= position, 0.0, hidden)[None, None, None, :]
        x = self.embedding(tokens)
        for block, cache in zip(self.blocks, caches, strict=True):
            x = self.run_block(block, x, cos, sin, cache, position, mask)
        return self.head(self.norm(x[:, -1]))  # type: ignore[no-any-return]

    def linears(self) -> Iterator[nn.Module]:
        """The linear layers of the blocks, in the order in which they run."""
        for block in self.blocks:
            for name in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"):
                yield getattr(block, name)


def random_weights(
    shape: Shape, device: str, dtype: torch.dtype
) -> Callable[[int, int], qmm.QuantizedWeight]:
    """What makes one int4 weight after the other out of random codes and scales; the same sequence each time."""
    generator = torch.Generator(device).manual_seed(0)

    def make(k: int, n: int) -> qmm.QuantizedWeight:
        words = torch.randint(
            -(2**31), 2**31, (k // 8, n), generator=generator, device=device, dtype=torch.int32
        )
        scales = torch.rand(k // shape.group_size, n, generator=generator, device=device) + 0.5
        scales *= k**-0.5 / 4.6  # 4.6: the deviation of a code, so that outputs are of the size of inputs
        return qmm.QuantizedWeight(
            words, scales.to(dtype), bits=4, group_size=shape.group_size, in_features=k
        )

    return make


def build(
    shape: Shape, context: int, device: str, dtype: torch.dtype, *, quantised: bool, merged: bool = False
) -> Model:
    """The same function with full or with quantised linear layers."""
    make = random_weights(shape, device, dtype)

    def linear(k: int, n: int) -> nn.Module:
        w = make(k, n)
        if quantised:
            return QuantLinear.from_weight(w)
        layer = nn.Linear(k, n, bias=False, device="meta")
        layer.weight = nn.Parameter(w.dequantize(dtype).t().contiguous(), requires_grad=False)
        return layer

    torch.manual_seed(1)
    model = Model(shape, linear, context, device, dtype).requires_grad_(False).eval()
    if merged:
        left = qmm.nn.merge(model).left
        if left:
            raise RuntimeError(f"could not be merged: {left}")
    return model
